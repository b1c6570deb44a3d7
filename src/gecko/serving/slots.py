"""Memory for the texts that are continued side by side: set aside once, and written in place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gecko.model import Gecko
from gecko.state import GeckoState


class Slots:
    """States of texts, compact in the first ``count`` rows of tensors that have ``capacity`` of them.

    So a step works on views, and empty places cost it nothing. When a text leaves, the last one moves to its place.
    For use without gradients.
    """

    def __init__(self, model: Gecko, capacity: int) -> None:
        device = model.embedding.weight.device
        # A state that the model made has the dtypes that its steps write.
        _, state = model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=device))
        self._all = state.map(lambda x: x.new_zeros(capacity, *x.shape[1:]))
        self._seen = torch.zeros(capacity, model.config.vocab_size, dtype=torch.bool, device=device)
        self.capacity = capacity
        self._resize(0)

    @property
    def seen(self) -> Tensor:
        """(count, V) bool, of each text: the tokens it held so far. A view: write into it."""
        return self._seen[: self.count]

    def add(self, state: GeckoState, seen: Tensor) -> None:
        """Copy a text of one row to the next place, ``count``."""
        assert self.count < self.capacity, "there must be a free place"
        if not self.count:
            # Nothing is left of other weights, should they have changed.
            self._all = replace(self._all, model=state.model)
        for place, tensor in zip(self._all.tensors().values(), state.tensors().values(), strict=True):
            place[self.count].copy_(tensor[0])
        self._seen[self.count].copy_(seen)
        self._resize(self.count + 1)

    def remove(self, place: int) -> None:
        """Give up the text at ``place``; that of the last place moves there."""
        last = self.count - 1
        if place != last:
            for tensor in (*self._all.tensors().values(), self._seen):
                tensor[place].copy_(tensor[last])
        self._resize(last)

    def update(self, state: GeckoState) -> None:
        """The texts after a step, where it was not written into ``state``'s tensors already."""
        for place, tensor in zip(self._tensors, state.tensors().values(), strict=True):
            if tensor is not place:
                place.copy_(tensor)

    def _resize(self, count: int) -> None:
        self.count = count
        self.state = replace(self._all.map(lambda x: x[:count]), exclusive=True)
        """Views of the rows in use: what a step reads and writes."""
        self._tensors = list(self.state.tensors().values())
