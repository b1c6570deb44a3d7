"""Batches as transformers lays them out, rows padded on either side, read as texts without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.state import GeckoState

Read = Callable[[Tensor, Tensor | None, GeckoState | None], tuple[Tensor, GeckoState]]
"""(tokens (B, T), segment ids or None, state or None) to hidden (B, T, D) and the state after."""


@dataclass(frozen=True)
class Batch:
    """Tokens of a call, which of them are text, and where documents begin in it; all (B, T)."""

    tokens: Tensor
    text: Tensor | None
    """Booleans, one run of them in every row; None: all is text."""
    starts: Tensor | None
    """True at the first token of a document that is not the call's first; None: there is none."""

    @classmethod
    def build(cls, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, read: Tensor | None = None) -> Batch:
        """Check what transformers handed over.

        Args:
            tokens: (B, T) integers.
            mask: (B, T), or (B, columns before + T), 0 where there is padding.
            positions: (B, T) or (1, T): within a document they count by one, and another starts at every 0 that is
                not a row's first. (``generate`` begins with 0 also where a cache has read something before.)
            read: (B, columns before) booleans, what the cache has read as text; None: it has read no columns.

        Raises:
            ValueError: shapes that do not fit, padding inside a text, a row without text, jumping positions, a mask
                that contradicts ``read``.
        """
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"input_ids must have shape (batch, length) with length of at least 1; got {tuple(tokens.shape)}. "
                "An empty prompt has no next token; begin it with the token that starts a document."
            )
        text = None if mask is None else _text(tokens, mask, read)
        starts = None if positions is None else _starts(tokens, positions, text)
        return cls(tokens if text is None else tokens.masked_fill(~text, 0), text, starts)

    @property
    def is_text(self) -> Tensor:
        """(B, T) booleans."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.text is None else self.text

    def read(self, read: Read, state: GeckoState | None, *, keep_state: bool) -> tuple[Tensor, GeckoState | None]:
        """Hidden (B, T, D), and the state after every row's last token of text if it is to be kept.

        At padding, hidden is 0 before a row's text, and after it what came of the last token.

        Rows of unequal lengths are read one length after the other if the state is kept, and together if not:
        what follows a text then cannot change what came of it.
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
        """``generate`` takes the first new token from the last column, also of a row whose text ended before it."""
        assert self.text is not None
        row, column = (torch.arange(size, device=end.device) for size in self.tokens.shape)
        last, after = hidden[row, end - 1], column >= end[:, None]
        return torch.where(after.unsqueeze(-1), last.unsqueeze(1), hidden * self.text.unsqueeze(-1))

    def targets(self, labels: Tensor, ignored: int) -> Tensor:
        """Labels moved one place forward, ``ignored`` where padding or another document is on either side."""
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
            "where generate is to work without a cache."
        )
    return text


def _check_before(text: Tensor, read: Tensor) -> None:
    """Whether a mask says of the columns (B, columns before) what it said when they were read."""
    changed = (text != read.to(text.device)).nonzero()
    if len(changed):
        row, column = changed[0].tolist()
        raise ValueError(
            f"attention_mask must stay the same in the columns that the cache has read; in row {row} it differs at "
            f"column {column}. What was read stays in a state, also the padding that generate gives rows that stop "
            "early: leave this cache out and read one row at a time, or go on only from rows that ended together."
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
