"""What transformers calls a cache: here a reading state, of the same size however much was read."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gecko.state import GeckoState


class GeckoCache(Cache):
    """Holds the state of a batch of texts; every call puts the one after it in its place.

    ``GeckoCache(cache.state)`` branches: states are values, and what a new cache begins with needs no columns in
    ``input_ids``. After calls with it, ``generate`` wants what they have read in ``input_ids`` once more.

    Args:
        state: what was read before, such as ``GeckoState.load`` returns; None: nothing.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: GeckoState | None = None) -> None:
        super().__init__(layers=[])
        self.state = state
        self.text: Tensor | None = None
        """(B, columns) booleans: where the columns of ``input_ids`` read with this cache were text; None: none yet."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of ``input_ids`` that were read with this cache, padding included."""
        return 0 if self.text is None else self.text.shape[1]

    def follow(self, state: GeckoState, text: Tensor) -> None:
        """Take the state after more columns, with booleans (B, T) that say which of them are text."""
        self.state = state
        self.text = text if self.text is None else torch.cat([self.text.to(text.device), text], dim=1)

    def reset(self) -> None:
        self.state = self.text = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the state of the one that it goes on from."""
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
            "a reading state cannot go back to an earlier token; keep cache.state from before, and go on from there "
            "with GeckoCache(state)."
        )
