"""How the kernels of CEMA cut a call: items of at most a unit of tokens, none holding two documents.

Units lie side by side in a row and end with it; an item is what one document has of one unit. So an item that
continues the one before starts where its unit starts, and follows an item that filled its own unit to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gecko.segments import Segments

ITEMS = 16
"""Items that a kernel takes at once: rows of a matrix product of tiles."""

CHUNK = 16
"""Steps of an item that it takes in one matrix product."""

MOST = 256
"""Tokens of a unit: more would not stay in the cache between the two readings of a tile."""

MOST_MODES = 16
"""Modes of a channel that the filter's kernel takes: the tables of more would not stay in registers."""

FRESH, CONTINUES, PASSES = 0, 1, 2
"""What the state before an item is: empty, that after the item before, or (the first of a row) that before the call."""


@dataclass(frozen=True)
class VarlenTiles:
    """Items of all rows in the order in which a kernel takes them, each row's filled up in front to whole tiles."""

    first: Tensor
    """(items,) int64: flat index of the first token of the item's unit."""
    begin: Tensor
    """(items,) int32: the item's first token in its unit."""
    end: Tensor
    """(items,) int32: the token after its last one; with ``begin`` 0 where there is no item."""
    kind: Tensor
    """(items,) int32."""
    tiles: Tensor
    """(rows + 1,) int32: first tile of each row."""

    def tensors(self) -> list[Tensor]:
        return [self.first, self.begin, self.end, self.kind, self.tiles]


@dataclass(frozen=True)
class VarlenTilePlan:
    """A call of T tokens a row as a head of T mod unit tokens, which is left to the chunked form, and items."""

    head: int
    head_segments: Segments | None
    unit: int
    continues: Tensor
    """(rows,) bool: the state before the items enters the first of them."""
    forwards: VarlenTiles
    backwards: VarlenTiles

    @classmethod
    def of(cls, segments: Segments) -> VarlenTilePlan:
        """The plan of a call of at least ``CHUNK`` tokens, made once for all layers."""
        return segments.shared("cema items", lambda: cls.build(segments))

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
            torch.from_numpy(~starts[:, 0]).to(segments.device),
            _items(rows, segments.device),
            _items([_reversed(row) for row in rows], segments.device),
        )  # fmt: skip


def unit_of(length: int) -> int:
    """A power of two, so that a row has sixteen items if it is long enough: what a tile holds."""
    return int(max(CHUNK, min(MOST, 1 << (length // ITEMS).bit_length() - 1))) if length >= ITEMS else CHUNK


def _part(segments: Segments, length: int) -> Segments:
    """The first ``length`` tokens of every row."""
    starts = None if segments.starts is None else segments.starts[:, :length]
    starts = None if starts is None or not starts.any() else starts
    return Segments(segments.batch, length, segments.clock, starts, segments.last_id, segments.device)


def _row(row: int, starts: np.ndarray, unit: int) -> np.ndarray:
    """(4, items): first, begin, end and kind, in the order of time."""
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
    """The same items from the last one: each receives what the one after it hands back, if that continues it."""
    first, begin, end, kind = row[:, ::-1]
    handed = np.append(PASSES, np.where(kind == CONTINUES, CONTINUES, FRESH)[:-1])
    return np.stack([first, begin, end, handed])


def _items(rows: list[np.ndarray], device: torch.device) -> VarlenTiles:
    filled = []
    for row in rows:
        nothing = np.zeros((4, -row.shape[1] % ITEMS), dtype=row.dtype)
        nothing[3] = PASSES
        filled.append(np.concatenate([nothing, row], axis=1))
    tiles = np.cumsum([0, *(row.shape[1] // ITEMS for row in filled)])
    first, begin, end, kind = np.concatenate(filled, axis=1)

    def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype).to(device)

    return VarlenTiles(
        on_device(first, torch.int64), *(on_device(x, torch.int32) for x in (begin, end, kind, tiles)),
    )  # fmt: skip
