"""Padded and packed batches of transformers, which are read without their padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gecko.hf.cache import GeckoCache
from gecko.inference.pieces import piece_length
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

Layers = tuple[Tensor, ...]
"""Hidden states (B, T, D): the input of the head, and any others that were asked for after it."""


class Reader:
    """Reader of a Gecko.

    Without gradients it reads in pieces, so that a long prompt takes little memory. With ``layers`` it also returns the
    input of every block, after the input of the head.
    """

    def __init__(self, model: Gecko, layers: bool) -> None:
        self._model, self._layers = model, layers

    def read(self, inputs: Tensor, ids: Tensor | None, state: GeckoState | None) -> tuple[Layers, GeckoState]:
        size = inputs.shape[1] if torch.is_grad_enabled() else piece_length(self._model.config)
        parts = []
        for begin in range(0, inputs.shape[1], size):
            piece = slice(begin, begin + size)
            with _inputs_of(self._model.blocks if self._layers else ()) as layers:
                hidden, state = self._model.hidden(inputs[:, piece], None if ids is None else ids[:, piece], state)
            parts.append((hidden, *layers))
        assert state is not None
        joined = parts[0] if len(parts) == 1 else tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return joined, state

    def start(self, rows: int) -> GeckoState:
        state = self._model.empty_state(rows)
        return replace(state, model="") if torch.is_grad_enabled() else state

    def blank(self, batch: int, length: int) -> Layers:
        config, weight = self._model.config, self._model.embedding.weight
        count = 1 + self._layers * config.num_layers
        return tuple(weight.new_zeros(batch, length, config.model_dim) for _ in range(count))


@contextmanager
def _inputs_of(blocks: Any) -> Iterator[list[Tensor]]:
    """Collect the input of each of ``blocks`` while they run."""
    found: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class PaddedBatch:
    """Inputs of a call, which of them are text, and where documents start."""

    inputs: Tensor
    """Tokens (B, T) or embeddings (B, T, D)."""
    text: Tensor | None
    """(B, T) bool, True at text. None: there is no padding."""
    starts: Tensor | None
    """(B, T) bool, True at the first token of every document except the first of a row. None: no such document."""

    @classmethod
    def build(
        cls, inputs: Tensor, mask: Tensor | None, positions: Tensor | None, *,
        read: Tensor | None = None, continued: bool = False,
    ) -> PaddedBatch:  # fmt: skip
        """Check the arguments that transformers passes, and build the batch. Raise ValueError for wrong shapes, a row
        without text, positions that jump, or a mask that contradicts ``read`` or has other numbers.

        Args:
            inputs: (B, T) integers, or embeddings (B, T, D).
            mask: (B, T), or (B, columns before + T), 1 at text and 0 at padding, which may be anywhere.
            positions: (B, T) or (1, T). They increase by one within a document, and in any way over padding. A document
                starts at every 0 except the first token of a row, for which ``generate`` passes 0 even if the cache has
                read tokens.
            read: (B, columns before) bool, True at the columns that the cache has read as text. None: no columns.
            continued: whether a later call can continue this one, so that a row may have no text in this call.
        """
        if inputs.dim() not in (2, 3) or 0 in inputs.shape:
            raise ValueError(
                "input_ids must have shape (batch, length), and inputs_embeds (batch, length, hidden size), with "
                f"length of at least 1; got {tuple(inputs.shape)}. An empty prompt has no next token; put the token "
                "that starts a document first."
            )
        text = None if mask is None else _text(inputs, mask, read)
        if text is not None and not continued and not bool(text.any(1).all()):
            raise ValueError(
                "attention_mask must leave at least one token of text in every row; a row has only padding."
            )
        starts = None if positions is None else _starts(inputs, positions, text)
        if text is not None:
            inputs = inputs.masked_fill(~(text if inputs.dim() == 2 else text.unsqueeze(-1)), 0)
        return cls(inputs, text, starts)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        batch, length = self.inputs.shape[:2]
        return batch, length

    @property
    def is_text(self) -> Tensor:
        """(B, T) bool, True at text."""
        if self.text is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.inputs.device)
        return self.text

    def read(self, reader: Reader, cache: GeckoCache | None) -> tuple[Layers, GeckoState | None]:
        """Return hidden states (B, T, D) and, with a cache, the state after the last text of every row.

        Hidden states at padding are those of the last text before it in the row. Where there is none, they are 0.

        With a cache, rows of unequal length are read in groups of equal length, because padding after a text
        would change the state. Without it all rows are read together: later tokens do not change earlier hidden states.
        """
        before = None if cache is None else cache.state_on(self.inputs.device)
        ids = self._segment_ids(before)
        if self.text is None:
            return reader.read(self.inputs, ids, before)
        lengths, columns = self.text.sum(1), (~self.text).int().argsort(dim=1, stable=True)
        layers = reader.blank(*self.shape)
        states: list[GeckoState] = []
        order: list[int] = []
        for length in [int(lengths.max())] if cache is None else torch.unique(lengths).tolist():
            every = torch.arange(len(lengths), device=lengths.device)
            rows = every if cache is None else (lengths == length).nonzero().flatten()
            state = None if before is None else before.rows(rows.tolist())
            if length:
                at = (rows[:, None], columns[rows, :length])
                parts, state = reader.read(self.inputs[at], None if ids is None else ids[at], state)
                layers = tuple(x.to(part.dtype).index_put(at, part) for x, part in zip(layers, parts, strict=True))
            states.append(reader.start(len(rows)) if state is None else state)
            order += rows.tolist()
        places = torch.tensor(order, device="cpu").argsort().tolist()
        if cache is None:
            return self._fill_padding(layers, None), None
        return self._fill_padding(layers, cache.last), GeckoState.stack(states).rows(places)

    def _fill_padding(self, layers: Layers, last: Tensor | None) -> Layers:
        """Repeat the hidden states of the text before each padding: ``generate`` samples from the last column."""
        assert self.text is not None
        before = _last_text(self.text).unsqueeze(-1)
        filled = (layer.gather(1, before.clamp(min=0).expand_as(layer)) for layer in layers)
        head, *others = (x.masked_fill(before < 0, 0) for x in filled)
        return (head if last is None else torch.where(before < 0, last.unsqueeze(1), head), *others)

    def targets(self, labels: Tensor, ignored: int, *, shifted: bool = False) -> Tensor:
        """Return the target of every token (B, T): the label of the next text of its row and document, or ``ignored``.

        Args:
            labels: (B, T), of the tokens themselves, or if ``shifted`` of the tokens after them.
        """
        if labels.shape != self.shape:
            raise ValueError(f"labels must have the shape of input_ids, {self.shape}; got {tuple(labels.shape)}.")
        following = self._following()
        last = following == self.shape[1]
        if self.starts is not None:
            last |= self.starts.gather(1, following.clamp(max=self.shape[1] - 1))
        if shifted:
            ends = last & (following < self.shape[1])  # after the last token of the call, the caller knows the next
            targets = labels.long().masked_fill(ends.to(labels.device), ignored)
        else:
            at = following.clamp(max=self.shape[1] - 1).to(labels.device)
            targets = labels.long().gather(1, at).masked_fill(last.to(labels.device), ignored)
        return targets if self.text is None else targets.masked_fill(~self.text.to(labels.device), ignored)

    def _following(self) -> Tensor:
        """Return the next column of text after every column, (B, T); T if there is none."""
        batch, length = self.shape
        column = torch.arange(length, device=self.inputs.device).expand(batch, -1)
        if self.text is None:
            return column + 1
        found = column.masked_fill(~self.text, length).flip(1).cummin(dim=1).values.flip(1)
        return torch.cat([found[:, 1:], torch.full_like(found[:, :1], length)], dim=1)

    def _segment_ids(self, state: GeckoState | None) -> Tensor | None:
        if self.starts is None:
            return None
        ids = self.starts.long().cumsum(1)
        return ids if state is None else ids + state.clock.segment_id.to(ids.device).unsqueeze(1)


def _last_text(text: Tensor) -> Tensor:
    """Return the last column of text up to every column, (B, T); −1 if there is none."""
    column = torch.arange(text.shape[1], device=text.device).expand_as(text)
    return column.masked_fill(~text, -1).cummax(dim=1).values


def _text(inputs: Tensor, mask: Tensor, read: Tensor | None) -> Tensor | None:
    batch, length = inputs.shape[:2]
    columns = 0 if read is None else read.shape[1]
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, columns + length):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {(batch, length)}, or be longer by the {columns} "
            f"columns read with the cache; got {tuple(mask.shape)}. A Gecko takes no mask between tokens."
        )
    is_text = mask != 0
    other = mask[mask != is_text]
    if other.numel():
        raise ValueError(
            f"attention_mask must be 1 at text and 0 at padding; it has {other[0].item()}. Packed documents are marked "
            "by position_ids, which start at 0 in each."
        )
    earlier = is_text[:, :columns] if read is not None and mask.shape[1] > length else None
    if read is not None and earlier is not None and len(changed := (earlier != read.to(mask.device)).nonzero()):
        row, column = changed[0].tolist()
        raise ValueError(
            f"attention_mask must stay the same in the columns that the cache has read; in row {row} it differs at "
            f"column {column}. A state keeps all it has read, also the padding that generate appends to rows that stop "
            "early: leave this cache out and read one row at a time, or continue only rows that ended together."
        )
    text = is_text[:, -length:]
    return None if bool(text.all()) else text


def _starts(inputs: Tensor, positions: Tensor, text: Tensor | None) -> Tensor | None:
    batch, length = inputs.shape[:2]
    if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, batch):
        raise ValueError(
            f"position_ids must have the shape of input_ids, {(batch, length)}; got {tuple(positions.shape)}."
        )
    positions = positions.expand(batch, -1)
    text = torch.ones_like(positions, dtype=torch.bool) if text is None else text
    column, before = torch.arange(1, length, device=positions.device), _last_text(text)[:, :-1]
    inside = text[:, 1:] & (before >= 0)
    begins = inside & (positions[:, 1:] == 0)
    adjacent = inside & (column - before == 1)
    if bool((adjacent & ~begins & (positions[:, 1:] != positions[:, :-1] + 1)).any()):
        raise ValueError(
            "position_ids must count by one within a document and be 0 where one starts; they jump. A Gecko knows "
            "positions by itself, so leave them out unless a row packs several documents."
        )
    return torch.cat([torch.zeros_like(text[:, :1]), begins], dim=1) if bool(begins.any()) else None


def pick(layers: Sequence[Tensor], wanted: Sequence[int] | bool) -> tuple[Tensor | None, ...]:
    """Return the layers, with None for those whose index is not in ``wanted``; True wants all. Raise IndexError if
    there is no layer with an index."""
    if isinstance(wanted, bool):
        return tuple(layers)
    kept = {range(len(layers))[index] for index in wanted}
    return tuple(layer if index in kept else None for index, layer in enumerate(layers))
