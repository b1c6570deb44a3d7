"""Cache class for transformers that holds a ``GeckoState``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from gecko.state import GeckoState

_NAMES = ("past_key_values", "cache")
CACHE = _NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""Name of the cache in transformers: ``cache`` from 5.24 on, ``past_key_values`` before."""


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

    def state_on(self, device: torch.device) -> GeckoState | None:
        """Return the state that a call continues. An initial state is moved to ``device``; those of calls are there."""
        return self.state.to(device) if self.state is not None and self.text is None else self.state

    def follow(self, state: GeckoState, ids: Tensor | None, text: Tensor, last: Tensor) -> None:
        """Store what is known after T more columns.

        Args:
            ids: (B, T), the tokens read; None: embeddings were read.
            text: (B, T), True at text and False at padding.
            last: (B, D), the input of the head at the last token of every row.
        """
        known = ids is not None and (self.text is None or self._digest is not None)
        self._digest = _digest(ids, text, self._digest) if known and ids is not None else None
        self.state, self.last = state, last
        self.text = text if self.text is None else torch.cat([self.text.to(text.device), text], dim=1)

    def check(self, ids: Tensor) -> None:
        """Check that ``ids`` (B, columns) are the whole text, which begins with the columns that the cache has read.

        Raises:
            ValueError: they are fewer, or begin with other tokens.
        """
        columns = self.get_seq_length()
        if columns and ids.shape[1] <= columns:
            raise ValueError(
                f"input_ids must be the whole text: the {columns} columns that the cache has read, and new ones; got "
                f"{ids.shape[1]}. To continue with new tokens alone, pass past_key_values=GeckoCache(cache.state)."
            )
        if self.text is None or self._digest is None or len(ids) != len(self.text):
            return
        found = _digest(ids[:, :columns].to(self._digest.device), self.text)
        wrong = (found != self._digest).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"input_ids must begin with the tokens that the cache has read; those of row {wrong[0]} differ. A beam "
                "search leaves the states of its last beams, which need not be those of the sequences that it returns; "
                "a chat template may change earlier messages. Leave the cache out to read the text anew."
            )

    def reset(self) -> None:
        self.state = self.text = self.last = self._digest = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, so that every beam has the state of the beam that it continues."""
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
    """Return h (B,) after h ← h · ``_BASE`` + id + 1 for every token of text, modulo 2⁶⁴, from ``before`` or 0.

    So it does not depend on how a text was divided into calls, nor on padding.
    """
    counts = text.long().cumsum(1)
    powers = torch.full_like(counts, _BASE).pow(counts[:, -1:] - counts)
    added = ((ids.long() + 1) * powers).masked_fill(~text, 0).sum(1)
    return added if before is None else added + before.to(ids.device) * torch.full_like(added, _BASE).pow(counts[:, -1])
