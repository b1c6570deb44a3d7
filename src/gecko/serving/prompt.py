"""Reading one prompt piece by piece, between other work."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gecko.generation import Reading
from gecko.model import Gecko
from gecko.serving.prefix_cache import PrefixCache
from gecko.serving.request import Request
from gecko.state import GeckoState


class PromptReader:
    """What was read of a prompt so far, for all requests that go on from it.

    Args:
        request: one of them; it tells prompt and state.
        cache: where the states of known beginnings are. A prompt after a state of the request's own does not use it.
        piece: what is read at once where nothing else waits; at a multiple of it, the cache gets a state.
    """

    def __init__(self, request: Request, model: Gecko, cache: PrefixCache | None, piece: int) -> None:
        self.requests: dict[int, Request] = {}
        """By id, those that it reads for."""
        self._model, self._piece, self._begins_after = model, piece, request.state
        self._device = model.embedding.weight.device
        self._cache = cache if request.state is None else None
        self._prompt = request.prompt.to("cpu", torch.int64)
        self._state: GeckoState | None = None
        self.position = request.begins_at
        """Tokens of the text that the state has read."""
        self.piece = 0
        """Tokens that ``read`` read last."""
        self._read = self._known = 0
        self._begun = False
        self._borders: Mapping[int, bytes] = {}

    @property
    def reused(self) -> int:
        """Prompt tokens of the requests that need no reading: the cache knows them, or another one has them read."""
        return self._known + (len(self.requests) - 1) * len(self._prompt)

    def serves(self, request: Request) -> bool:
        """Whether ``request`` goes on from the same tokens after the same state."""
        if request.state is not self._begins_after or len(request.prompt) != len(self._prompt):
            return False
        return torch.equal(request.prompt.to("cpu", torch.int64), self._prompt)

    def read(self, piece: int) -> Reading | None:
        """Read on to the next multiple of ``piece``; at the prompt's end, where the text stands."""
        if not self._begun:
            self._begin()
        begin, end = self._read, self._next_border(piece)
        tokens = self._prompt[begin:end].unsqueeze(0).to(self._device)
        hidden, self._state = self._model.hidden(tokens, state=self._state)
        self._read, self.piece, self.position = end, end - begin, self.position + end - begin
        if self._cache is not None and end in self._borders:
            self._cache.keep(self._borders[end], self._state)
        if end < len(self._prompt):
            return None
        return Reading(self._state, self._model.head(hidden[:, -1:])[0, 0], self._seen())

    def _begin(self) -> None:
        """Take up what is known now; requests that came before may have added to it."""
        self._begun = True
        if self._begins_after is not None:
            self._state = self._begins_after.to(self._device)
        if self._cache is None:
            return
        prefix = self._cache.find(self._model.fingerprint(), self._prompt, self._model.config.chunk_size, self._piece)
        self._borders = prefix.borders
        if prefix.state is not None:
            self._state = prefix.state
            self.position = self._read = self._known = prefix.length

    def _next_border(self, piece: int) -> int:
        kept = (border for border in self._borders if border > self._read)
        return min(len(self._prompt), self._read + piece - self.position % piece, *kept)

    def _seen(self) -> Tensor:
        seen = torch.zeros(self._model.config.vocab_size, dtype=torch.bool)
        return seen.index_fill_(0, self._prompt, True).to(self._device)
