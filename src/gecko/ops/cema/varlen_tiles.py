"""Work items of the CEMA kernels: a call is divided into units, and units into items of a single document.

A unit is ``unit`` consecutive tokens of a row; the last unit ends with the row. An item is the part of one document
within one unit. So if an item continues the one before, it starts at the start of its unit, and the item before ends
at the end of its unit. Kernels process tiles of ``ITEMS`` items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gecko.runtime.tensors import to_device
from gecko.segments import Segments

ITEMS = 16
"""Items per tile: rows of a matrix product."""

FEWEST = 16
"""Minimum tokens of a call for the kernels."""

LEAST, MOST = 16, 512
"""Minimum tokens per unit, and their maximum: a tile must stay in the cache between its two reads."""

MOST_MODES = 16
"""Maximum modes per channel for the kernels: the tables of more modes do not fit in registers."""

FRESH, CONTINUES, PASSES = 0, 1, 2
"""State before an item: zero, the state after the item before, or (first item of a row) the state before the call."""


class VarlenTiles(NamedTuple):
    """Items of all rows in processing order. The items of each row are padded at the front to whole tiles; the tensors
    of items go on after the last one (``_capacity``)."""

    first: Tensor
    """(items,) int64: flat index of the first token of the item's unit."""
    begin: Tensor
    """(items,) int32: the item's first token in its unit."""
    end: Tensor
    """(items,) int32: the token after its last one. Padding has ``begin`` = ``end`` = 0."""
    kind: Tensor
    """(items,) int32: FRESH, CONTINUES or PASSES."""
    tiles: Tensor
    """(rows + 1,) int32: first tile of each row."""


@dataclass(frozen=True)
class VarlenTilePlan:
    """Plan of a call of T tokens per row: a head of T mod unit tokens for the chunked form, and items for the rest."""

    head: int
    head_segments: Segments | None
    unit: int
    continues: Tensor
    """(rows,) bool: the first item continues the document of the state before it."""
    forwards: VarlenTiles
    backwards: VarlenTiles

    @classmethod
    def of(cls, segments: Segments) -> VarlenTilePlan:
        """Return the plan of a call of at least ``FEWEST`` tokens. It is computed once for all layers."""
        return segments.shared("cema items", cls.build)

    @classmethod
    def build(cls, segments: Segments) -> VarlenTilePlan:
        unit = unit_of(segments.length)
        head = segments.length % unit
        length = segments.length - head
        starts = np.zeros((segments.batch, length), dtype=bool)
        if segments.starts is not None:
            starts = segments.starts[:, head:]
        rows = [_row(row, begins, unit) for row, begins in enumerate(starts)]
        return cls(
            head, _part(segments, head) if head else None, unit,
            to_device(torch.from_numpy(~starts[:, 0]), segments.device),
            _items(rows, length // unit, segments.device),
            _items([_reversed(row) for row in rows], length // unit, segments.device),
        )  # fmt: skip


def unit_of(length: int) -> int:
    """Return the tokens per unit: the largest power of two that gives a row at least ``ITEMS`` units, within limits."""
    return int(max(LEAST, min(MOST, 1 << (length // ITEMS).bit_length() - 1))) if length >= ITEMS else LEAST


def _part(segments: Segments, length: int) -> Segments:
    """Return the layout of the first ``length`` tokens of every row."""
    starts = None if segments.starts is None else segments.starts[:, :length]
    starts = None if starts is None or not starts.any() else starts
    return Segments(segments.batch, length, segments.clock, starts, segments.last_id, segments.device)


def _row(row: int, starts: np.ndarray, unit: int) -> np.ndarray:
    """Return first, begin, end and kind of the items of one row, (4, items), in the order of time."""
    length = len(starts)
    is_begin = starts.copy()
    is_begin[::unit] = True
    begins = np.flatnonzero(is_begin)
    ends = np.append(begins[1:], length)
    inside = begins % unit
    kind = np.where(starts[begins], FRESH, CONTINUES)
    kind[0] = FRESH if starts[0] else PASSES
    return np.stack([row * length + begins - inside, inside, ends - begins + inside, kind])


def _reversed(row: np.ndarray) -> np.ndarray:
    """Return the items in reverse order, for the backward pass. An item receives the gradient of its final state from
    the next item in time if that item continues it."""
    first, begin, end, kind = row[:, ::-1]
    handed = np.append(PASSES, np.where(kind == CONTINUES, CONTINUES, FRESH)[:-1])
    return np.stack([first, begin, end, handed])


def _capacity(tiles: int, rows: int, units: int) -> int:
    """Return the tiles of a plan with its padding at the end, which no kernel reads. Most batches of a shape get the
    same number, so that one captured step serves them."""
    return max(2 * rows * -(-units // ITEMS), 1 << (tiles - 1).bit_length())


def _items(rows: list[np.ndarray], units: int, device: torch.device) -> VarlenTiles:
    filled = []
    for row in rows:
        nothing = np.zeros((4, -row.shape[1] % ITEMS), dtype=row.dtype)
        nothing[3] = PASSES
        filled.append(np.concatenate([nothing, row], axis=1))
    tiles = np.cumsum([0, *(row.shape[1] // ITEMS for row in filled)])
    unread = _capacity(int(tiles[-1]), len(rows), units) - int(tiles[-1])
    first, begin, end, kind = np.pad(np.concatenate(filled, axis=1), ((0, 0), (0, unread * ITEMS)))

    def on_device(array: np.ndarray, dtype: type[np.signedinteger]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array, dtype)), device)

    return VarlenTiles(on_device(first, np.int64), *(on_device(x, np.int32) for x in (begin, end, kind, tiles)))
