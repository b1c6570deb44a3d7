"""Cache class for transformers that holds a ``GeckoState``."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gecko.hf.batch import Memory
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
        self._last: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of ``input_ids`` that were read with this cache, padding included."""
        return 0 if self.text is None else self.text.shape[1]

    def memory(self, device: torch.device) -> Memory:
        """Return what a call continues. An initial state is moved to ``device``; those of calls are there."""
        state = self.state
        if state is not None and self.text is None:
            state = state.to(device)
        return Memory(state, self.text, self._last)

    def follow(self, state: GeckoState, text: Tensor, last: Tensor) -> None:
        """Store what is known after T more columns.

        Args:
            text: (B, T), True at text and False at padding.
            last: (B, D), the input of the head at the last token of every row.
        """
        self.state, self._last = state, last
        self.text = text if self.text is None else torch.cat([self.text.to(text.device), text], dim=1)

    def reset(self) -> None:
        self.state = self.text = self._last = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, so that every beam has the state of the beam that it continues."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.rows(indices.tolist())
        if self.text is not None and self._last is not None:
            self.text, self._last = (x[indices.to(x.device)] for x in (self.text, self._last))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def crop(self, *_: int) -> None:
        raise ValueError(
            "a Gecko's state cannot go back to an earlier token; keep cache.state from that point and continue with "
            "GeckoCache(state)."
        )
