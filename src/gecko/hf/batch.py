"""Padded and packed batches of transformers, which are read without their padding, and the cache between calls."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from gecko.inference.pieces import piece_length
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

_NAMES = ("past_key_values", "cache")
CACHE = _NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""Name of the cache in transformers: ``cache`` from 5.24 on, ``past_key_values`` before."""


class GeckoCache(Cache):
    """``transformers`` cache that wraps a ``GeckoState``, whose size does not depend on the number of tokens read.

    Every call of the model replaces ``state``, so ``GeckoCache(cache.state)`` is an independent branch. The tokens of
    the initial state, for example from ``GeckoState.load``, must not be in ``input_ids``; those that later calls read
    must be, as ``generate`` expects.
    """

    is_compileable = False
    is_croppable = False
    max_cache_len = -1
    """There is no longest text; PEFT asks."""
    is_linear: Any = (False,)
    """transformers 5.24 passes the whole text again to a cache all of whose layers are linear; this one has none."""

    def __init__(self, state: GeckoState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.text: Tensor | None = None
        """(B, columns) bool: which of the columns of ``input_ids`` read with this cache are text. None: no columns."""
        self.last: Tensor | None = None
        """(B, D): input of the head at the last token of every row, 0 in rows without one. None: no tokens."""
        self._digest: Tensor | None = None
        """(B,) int64, computed from the tokens read in these columns. None: no columns, or embeddings among them."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of ``input_ids`` that were read with this cache, padding included."""
        return 0 if self.text is None else self.text.shape[1]

    def follow(self, state: GeckoState, inputs: Tensor, text: Tensor, last: Tensor) -> None:
        """Store what is known after T more columns: tokens (B, T), or embeddings; ``text`` (B, T) are text."""
        known = inputs.dim() == 2 and (self.text is None or self._digest is not None)
        self._digest = _digest(inputs, text, self._digest) if known else None
        self.state, self.last = state, last
        self.text = text if self.text is None else torch.cat([self.text.to(text.device), text], dim=1)

    def check(self, ids: Tensor) -> None:
        """Raise ValueError unless ``ids`` (B, columns) are the whole text: the columns read before, and new ones."""
        columns = self.get_seq_length()
        if columns and ids.shape[1] <= columns:
            raise ValueError(
                f"input_ids must be the whole text: the {columns} columns that the cache has read, and new ones; got "
                f"{ids.shape[1]}. To continue with new tokens alone, pass past_key_values=GeckoCache(cache.state)."
            )
        if self.text is None or self._digest is None:
            return
        rows = ids[:, :columns].repeat_interleave(max(1, len(self.text) // len(ids)), dim=0)  # as generate repeats them
        if len(rows) != len(self.text):
            held = f"{len(self.text)} for {len(ids)} of input_ids"
            raise ValueError(f"the cache must hold as many rows as are generated; it holds {held}. Leave it out.")
        found = _digest(rows.to(self._digest.device), self.text)
        if wrong := (found != self._digest).nonzero().flatten().tolist():
            raise ValueError(
                f"input_ids must begin with the tokens that the cache has read; those of row {wrong[0]} differ. A beam "
                "search leaves the states of its last beams, which need not be those of the sequences that it returns; "
                "a chat template may change earlier messages. Leave the cache out to read the text anew."
            )

    def reset(self) -> None:
        self.state = self.text = self.last = self._digest = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the state of the beam that it continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices.tolist())
        if self.text is not None and self.last is not None:
            self.text, self.last = (x[indices.to(x.device)] for x in (self.text, self.last))
        if self._digest is not None:
            self._digest = self._digest[indices.to(self._digest.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch_size, device="cpu").repeat_interleave(repeats))

    def crop(self, *_: int) -> None:
        raise ValueError(
            "a Gecko's state cannot go back to an earlier token; keep cache.state from that point and continue with "
            "GeckoCache(state)."
        )


def given_cache(past_key_values: GeckoCache | None, cache: GeckoCache | None) -> GeckoCache | None:
    """Return the one of the two names of a cache that a caller used; ValueError if both were used."""
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are names of one argument; got both. Pass one of them.")
    return cache if past_key_values is None else past_key_values


_BASE = 6_364_136_223_846_793_005
"""Multiplier of a common random number generator modulo 2⁶⁴: it is odd, and its powers look random."""


def _digest(ids: Tensor, text: Tensor, before: Tensor | None = None) -> Tensor:
    """Return h (B,) after h ← h · ``_BASE`` + id + 1 for every token of text, modulo 2⁶⁴, from ``before`` or 0."""
    counts = text.long().cumsum(1)
    powers = torch.full_like(counts, _BASE).pow(counts[:, -1:] - counts)
    added = ((ids.long() + 1) * powers).masked_fill(~text, 0).sum(1)
    return added if before is None else added + before.to(ids.device) * torch.full_like(added, _BASE).pow(counts[:, -1])


Layers = Sequence[Tensor]
"""Hidden states (B, T, D): the input of the head, and any others that were asked for after it."""


@dataclass(frozen=True)
class PaddedBatch:
    """Inputs of a call, which of them are text, and where documents start."""

    inputs: Tensor
    """Tokens (B, T) or embeddings (B, T, D), 0 at padding."""
    text: Tensor | None
    """(B, T) bool, True at text. None: there is no padding."""
    columns: Tensor | None
    """(B, T): the columns of the text of every row, and after them those of its padding. None: there is no padding."""
    starts: Tensor | None = None
    """(B, T) bool, in the order of ``columns``: True at the first token of every document except the first of a row,
    for which ``generate`` passes position 0 even if the cache has read tokens. None: no such document."""

    @classmethod
    def build(
        cls, ids: Tensor | None, mask: Tensor | None, positions: Tensor | None, cache: GeckoCache | None,
        embeds: Tensor | None = None,
    ) -> PaddedBatch:  # fmt: skip
        """Check the arguments of ``GeckoForCausalLM`` and build the batch. A row may have no text if a later call can
        continue it, with a cache.

        Raises:
            TypeError: the cache is of another kind.
            ValueError: shapes are wrong, a row has no text, positions jump, or the mask contradicts what the cache has
                read, or has other numbers.
        """
        if (ids is None) == (embeds is None):
            raise ValueError(
                f"one of input_ids and inputs_embeds must be given; got {'neither' if ids is None else 'both'}."
            )
        inputs: Any = embeds if ids is None else ids
        if cache is not None and not isinstance(cache, GeckoCache):
            raise TypeError(
                f"past_key_values must be a GeckoCache; got {type(cache).__name__}. Leave it out to make one. "
                "Prefix tuning of PEFT needs keys and values, which no Gecko has: use prompt tuning, p-tuning or LoRA."
            )
        if cache is not None and cache.state is not None and cache.state.batch_size != len(inputs):
            held = cache.state.batch_size
            raise ValueError(f"the cache must hold {len(inputs)} rows, as input_ids; it holds {held}.")
        if inputs.dim() not in (2, 3) or 0 in inputs.shape:
            raise ValueError(
                "input_ids must have shape (batch, length), and inputs_embeds (batch, length, hidden size), with "
                f"length of at least 1; got {tuple(inputs.shape)}. An empty prompt has no next token; put the token "
                "that starts a document first."
            )
        text, columns = None if mask is None else _text(inputs, mask, None if cache is None else cache.text), None
        if text is not None:
            if cache is None and not bool(text.any(1).all()):
                raise ValueError(
                    "attention_mask must leave at least one token of text in every row; a row has only padding."
                )
            columns = (~text).int().argsort(dim=1, stable=True)
            inputs = inputs.masked_fill(~(text if inputs.dim() == 2 else text.unsqueeze(-1)), 0)
        batch = cls(inputs, text, columns)
        return batch if positions is None else replace(batch, starts=batch._find_starts(positions))

    def _find_starts(self, positions: Tensor) -> Tensor | None:
        batch, length = self.shape
        if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, batch):
            raise ValueError(
                f"position_ids must have the shape of input_ids, {self.shape}; got {tuple(positions.shape)}."
            )
        positions = self._text_first(positions.expand(batch, -1))
        inside = torch.arange(1, length, device=positions.device) < self._lengths(positions.device)
        begins = inside & (positions[:, 1:] == 0)
        jumps = inside & ~begins & (positions[:, 1:] != positions[:, :-1] + 1)
        if self.columns is not None:  # over padding, positions may have counted it
            jumps &= self.columns.diff(dim=1) == 1
        if bool(jumps.any()):
            raise ValueError(
                "position_ids must count by one within a document and be 0 where one starts; they jump. A Gecko knows "
                "positions by itself, so leave them out unless a row packs several documents."
            )
        return torch.cat([torch.zeros_like(begins[:, :1]), begins], dim=1) if bool(begins.any()) else None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        batch, length = self.inputs.shape[:2]
        return batch, length

    def _text_first(self, x: Tensor) -> Tensor:
        """Return x (B, T, …) in the order of ``columns``."""
        if self.columns is None:
            return x
        return x[torch.arange(len(x), device=x.device).unsqueeze(1), self.columns.to(x.device)]

    def _lengths(self, device: torch.device) -> Tensor:
        """Return the number of tokens of text in every row, (B, 1)."""
        batch, length = self.shape
        lengths = torch.full((batch, 1), length, device=device) if self.text is None else self.text.sum(1, keepdim=True)
        return lengths.to(device)

    def targets(self, labels: Tensor, ignored: int, *, shifted: bool = False) -> Tensor:
        """Return the target of every token (B, T): the label of the next text of its row and document, or ``ignored``.
        ``labels`` (B, T) are of the tokens themselves, or if ``shifted`` of the tokens after them: after the last token
        of the call, the caller knows the next."""
        if labels.shape != self.shape:
            raise ValueError(f"labels must have the shape of input_ids, {self.shape}; got {tuple(labels.shape)}.")
        labels = self._text_first(labels.long())
        lengths = self._lengths(labels.device)
        none = torch.arange(self.shape[1], device=labels.device) >= (lengths if shifted else lengths - 1)
        if self.starts is not None:
            none[:, :-1] |= self.starts[:, 1:].to(labels.device)
        targets = (labels if shifted else labels.roll(-1, 1)).masked_fill(none, ignored)
        return targets if self.columns is None else targets.scatter(1, self.columns.to(labels.device), targets)

    def read(self, model: Gecko, cache: GeckoCache | None, *, every: bool) -> Layers:
        """Return hidden states (B, T, D), those of the last text before it, or 0, at padding; the cache follows."""
        device, before, ids = self.inputs.device, None if cache is None else cache.state, None
        if cache is not None and before is not None and cache.text is None:  # those of earlier calls are there already
            before = before.to(device)
        if self.starts is not None:
            ids = self.starts.long().cumsum(1)
            ids = ids if before is None else ids + before.clock.segment_id.to(ids.device).unsqueeze(1)
        state: GeckoState | None
        if self.text is None:
            layers, state = _read(model, self.inputs, ids, before, every)
        else:
            layers, state = self._read_text(model, ids, before, cache, every)
            # ``generate`` samples from the last column, so padding repeats the text before it.
            place = (self.text.cumsum(1) - 1).unsqueeze(-1)
            head, *others = (x.gather(1, place.clamp(min=0).expand_as(x)).masked_fill(place < 0, 0) for x in layers)
            if cache is not None and cache.last is not None:
                head = torch.where(place < 0, cache.last.unsqueeze(1), head)
            layers = head, *others
        if cache is not None and state is not None:
            text = torch.ones(self.shape, dtype=torch.bool, device=device) if self.text is None else self.text
            cache.follow(state, self.inputs, text, layers[0][:, -1].clone())
        return layers

    def _read_text(
        self, model: Gecko, ids: Tensor | None, before: GeckoState | None, cache: GeckoCache | None, every: bool
    ) -> tuple[Layers, GeckoState | None]:
        """Read a batch with padding; hidden states are in the order of ``columns``."""
        # With a cache, rows of equal length are read together, because padding after a text would change the state.
        # Without it all rows are: later tokens do not change earlier hidden states.
        inputs, lengths = self._text_first(self.inputs), self._lengths(self.inputs.device).squeeze(1)
        numbers = torch.arange(len(lengths), device=lengths.device)
        groups = [numbers] if cache is None else [numbers[lengths == length] for length in torch.unique(lengths)]
        parts, states = [], []
        for rows in groups:
            length, state = int(lengths[rows].max()), None if before is None else before.rows(rows.tolist())
            nothing = model.embedding.weight.new_zeros(len(rows), 0, model.config.model_dim)
            found: Layers = [nothing] * (1 + every * model.config.num_layers)
            if length:
                of_rows = None if ids is None else ids[rows, :length]
                found, state = _read(model, inputs[rows, :length], of_rows, state, every)
            parts.append([F.pad(x, (0, 0, 0, self.shape[1] - length)) for x in found])
            if state is None:
                state = model.empty_state(len(rows))
                state = replace(state, model="") if torch.is_grad_enabled() else state
            states.append(state)
        order = torch.cat(groups).argsort()
        layers = [torch.cat(part)[order] for part in zip(*parts, strict=True)]
        return layers, None if cache is None else GeckoState.stack(states).rows(order.tolist())


def _read(
    model: Gecko, inputs: Tensor, ids: Tensor | None, state: GeckoState | None, every: bool
) -> tuple[Layers, GeckoState]:
    """Return hidden states and the state; if ``every``, those of every block too, after the input of the head."""
    # Without gradients the text is read in pieces, so that a long prompt takes little memory.
    size = inputs.shape[1] if torch.is_grad_enabled() else piece_length(model.config)
    layers: list[Tensor] = []
    blocks: Any = model.blocks if every else ()
    handles = [block.register_forward_pre_hook(lambda _, given: layers.append(given[0])) for block in blocks]
    parts = []
    try:
        for begin in range(0, inputs.shape[1], size):
            layers.clear()
            piece = slice(begin, begin + size)
            hidden, state = model.hidden(inputs[:, piece], None if ids is None else ids[:, piece], state)
            parts.append((hidden, *layers))
    finally:
        for handle in handles:
            handle.remove()
    assert state is not None
    return parts[0] if len(parts) == 1 else [torch.cat(part, dim=1) for part in zip(*parts, strict=True)], state


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
