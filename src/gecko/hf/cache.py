"""Cache class for transformers that holds a ``GeckoState``, and padded batches that are read without their padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gecko.state import GeckoState


class GeckoCache(Cache):
    """``transformers`` cache that wraps a ``GeckoState``. Its size does not depend on the number of tokens read.

    Every call of the model replaces ``state`` and never writes into it, so ``GeckoCache(cache.state)`` is an
    independent branch. The tokens of the initial state must not be in ``input_ids``; tokens that later calls read must
    be, as ``generate`` expects.

    Args:
        state: initial state, for example from ``GeckoState.load``. None: nothing was read.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: GeckoState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.text: Tensor | None = None
        """(B, columns) bool: which of the columns of ``input_ids`` read with this cache are text. None: no columns."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of ``input_ids`` that were read with this cache, padding included."""
        return 0 if self.text is None else self.text.shape[1]

    def follow(self, state: GeckoState, text: Tensor) -> None:
        """Store the state after T more columns; ``text`` (B, T) is True at text and False at padding."""
        self.state = state
        self.text = text if self.text is None else torch.cat([self.text.to(text.device), text], dim=1)

    def reset(self) -> None:
        self.state = self.text = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, so that every beam has the state of the beam that it continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices.tolist())
        if self.text is not None:
            self.text = self.text[indices.to(self.text.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def crop(self, *_: int) -> None:
        raise ValueError(
            "a Gecko's state cannot go back to an earlier token; keep cache.state from that point and continue with "
            "GeckoCache(state)."
        )


Read = Callable[[Tensor, Tensor | None, GeckoState | None], tuple[Tensor, GeckoState]]
"""Maps tokens (B, T), segment ids or None, and a state or None to hidden (B, T, D) and the next state."""


@dataclass(frozen=True)
class Batch:
    """Tokens of a call, which of them are text, and where documents start; all (B, T)."""

    tokens: Tensor
    text: Tensor | None
    """Bool, True at text, which is contiguous in every row. None: there is no padding."""
    starts: Tensor | None
    """True at the first token of every document except the first document of a row. None: no such document."""

    @classmethod
    def build(cls, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, read: Tensor | None = None) -> Batch:
        """Check the arguments that transformers passes, and build the batch.

        Args:
            tokens: (B, T) integers.
            mask: (B, T), or (B, columns before + T), 0 at padding.
            positions: (B, T) or (1, T). They increase by one within a document. A document starts at every 0 except the
                first token of a row, for which ``generate`` passes 0 even if the cache has read tokens.
            read: (B, columns before) bool, True at the columns that the cache has read as text. None: no columns.

        Raises:
            ValueError: wrong shapes, padding inside a text, a row without text, positions that jump, or a mask that
                contradicts ``read``.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"input_ids must have shape (batch, length) with length of at least 1; got {tuple(tokens.shape)}. "
                "An empty prompt has no next token; put the token that starts a document first."
            )
        text = None if mask is None else _text(tokens, mask, read)
        starts = None if positions is None else _starts(tokens, positions, text)
        return cls(tokens if text is None else tokens.masked_fill(~text, 0), text, starts)

    @property
    def is_text(self) -> Tensor:
        """(B, T) bool, True at text."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.text is None else self.text

    def read(self, read: Read, state: GeckoState | None, *, keep_state: bool) -> tuple[Tensor, GeckoState | None]:
        """Return hidden (B, T, D) and, with ``keep_state``, the state after the last token of text of every row.

        Hidden is 0 at padding before a row's text; at padding after the text it repeats that of the last token.

        With ``keep_state``, rows of unequal length are read in groups of equal length, because padding after a text
        would change the state. Without it all rows are read together: later tokens do not change earlier hidden.
        """
        ids = self._segment_ids(state)
        if self.text is None:
            return read(self.tokens, ids, state)
        first, lengths = self.text.int().argmax(1), self.text.sum(1)
        groups = torch.unique(lengths).tolist() if keep_state else [int(lengths.max())]
        hidden: Tensor | None = None
        states: list[GeckoState] = []
        order: list[int] = []
        for length in groups:
            rows = (lengths == length).nonzero().flatten() if keep_state else torch.arange(len(lengths)).to(lengths)
            at = (rows[:, None], (first[rows, None] + torch.arange(length).to(rows)) % self.tokens.shape[1])
            before = None if state is None else state.rows(rows.tolist())
            part, after = read(self.tokens[at], None if ids is None else ids[at], before)
            hidden = part.new_zeros(*self.tokens.shape, part.shape[-1]) if hidden is None else hidden
            hidden = hidden.index_put(at, part)
            states.append(after)
            order += rows.tolist()
        assert hidden is not None
        kept = GeckoState.stack(states).rows(torch.tensor(order).argsort().tolist()) if keep_state else None
        return self._fill_padding(hidden, first + lengths), kept

    def _fill_padding(self, hidden: Tensor, end: Tensor) -> Tensor:
        """Repeat the last hidden state after each text: ``generate`` samples from the last column of every row."""
        assert self.text is not None
        row, column = (torch.arange(size, device=end.device) for size in self.tokens.shape)
        last, after = hidden[row, end - 1], column >= end[:, None]
        return torch.where(after.unsqueeze(-1), last.unsqueeze(1), hidden * self.text.unsqueeze(-1))

    def targets(self, labels: Tensor, ignored: int) -> Tensor:
        """Return the labels shifted by one, ``ignored`` next to padding and across the start of a document."""
        if labels.shape != self.tokens.shape:
            raise ValueError(
                f"labels must have the shape of input_ids, {tuple(self.tokens.shape)}; got {tuple(labels.shape)}."
            )
        labels = labels.long()
        if self.starts is not None:
            labels = labels.masked_fill(self.starts, ignored)
        if self.text is not None:
            labels = labels.masked_fill(~self.text, ignored)
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignored)], dim=1)
        return targets if self.text is None else targets.masked_fill(~self.text, ignored)

    def _segment_ids(self, state: GeckoState | None) -> Tensor | None:
        if self.starts is None:
            return None
        ids = self.starts.long().cumsum(1)
        return ids if state is None else ids + state.clock.segment_id.to(ids.device).unsqueeze(1)


def _text(tokens: Tensor, mask: Tensor, read: Tensor | None) -> Tensor | None:
    batch, length = tokens.shape
    columns = 0 if read is None else read.shape[1]
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, columns + length):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {(batch, length)}, or be longer by the {columns} "
            f"columns read with the cache; got {tuple(mask.shape)}. A Gecko takes no mask between tokens."
        )
    if read is not None and mask.shape[1] > length:
        _check_before(mask[:, :columns] != 0, read)
    text = mask[:, -length:] != 0
    if bool(text.all()):
        return None
    if not bool(text.any(1).all()):
        raise ValueError("attention_mask must leave at least one token of text in every row; a row has only padding.")
    column = torch.arange(length, device=text.device)
    first, last = text.int().argmax(1, keepdim=True), length - 1 - text.flip(1).int().argmax(1, keepdim=True)
    if bool((text != (column >= first) & (column <= last)).any()):
        raise ValueError(
            "attention_mask must mark padding before or after a row's text; it has zeros inside of it. Pad on the left "
            "if generate is to work without a cache."
        )
    return text


def _check_before(text: Tensor, read: Tensor) -> None:
    """Check that a mask agrees with the mask of the columns (B, columns before) that were read."""
    changed = (text != read.to(text.device)).nonzero()
    if len(changed):
        row, column = changed[0].tolist()
        raise ValueError(
            f"attention_mask must stay the same in the columns that the cache has read; in row {row} it differs at "
            f"column {column}. A state keeps all it has read, also the padding that generate appends to rows that stop "
            "early: leave this cache out and read one row at a time, or continue only rows that ended together."
        )


def _starts(tokens: Tensor, positions: Tensor, text: Tensor | None) -> Tensor | None:
    if positions.dim() != 2 or positions.shape[1] != tokens.shape[1] or positions.shape[0] not in (1, len(tokens)):
        raise ValueError(
            f"position_ids must have the shape of input_ids, {tuple(tokens.shape)}; got {tuple(positions.shape)}."
        )
    positions = positions.expand_as(tokens)
    text = torch.ones_like(tokens, dtype=torch.bool) if text is None else text
    inside = text[:, 1:] & text[:, :-1]
    begins = inside & (positions[:, 1:] == 0)
    if bool((inside & ~begins & (positions[:, 1:] != positions[:, :-1] + 1)).any()):
        raise ValueError(
            "position_ids must count by one within a document and be 0 where one starts; they jump. A Gecko knows "
            "positions by itself, so leave them out unless a row packs several documents."
        )
    return torch.cat([torch.zeros_like(text[:, :1]), begins], dim=1) if bool(begins.any()) else None
