"""Tokens as they are made, for one text or for several side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from gecko.generation.reading import Reading, inference, read
from gecko.generation.sampling import Sampler, Sampling, finite_rows, not_finite
from gecko.model import Gecko
from gecko.state import GeckoState

FinishReason = Literal["length", "stop"]
"""``length``: as many tokens as asked for. ``stop``: a stop token came, or ``TokenStream.stop`` was called."""


class NewToken(NamedTuple):
    row: int
    token: int


@dataclass
class _Row:
    index: int
    generator: torch.Generator
    made: int = 0


@dataclass(frozen=True)
class _Left:
    """What a row that left the batch had read, and its last token if that is not among it."""

    state: GeckoState
    unread: list[int]


def check_options(model: Gecko, sampling: Sampling, max_new_tokens: int) -> None:
    """Raises ValueError for what no stream of ``model`` can do; cheap, to be asked before long prompts are read."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0; got {max_new_tokens}.")
    sampling.check_ids(model.config.vocab_size)


class TokenStream:
    """Continues every reading; iterate for the tokens, step by step, each step's in the order of rows.

    Rows decode in one batch, each at its own position, and leave it when they are finished. A row's
    tokens depend on its own reading and seed only. A stop token is neither returned nor read.

    Args:
        readings: one for each row.
        seeds: one for each row; a row takes one random number a token.
        max_new_tokens: most tokens of a row, at least 0.

    Raises:
        ValueError: numbers out of range; while iterating, logits that are not finite.
    """

    def __init__(
        self,
        model: Gecko,
        readings: Sequence[Reading],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:
        check_options(model, sampling, max_new_tokens)
        self._model, self._sampling = model, sampling
        self._max_new_tokens, self._stop_tokens = max_new_tokens, frozenset(stop_tokens)
        self._state = GeckoState.stack([reading.state for reading in readings])
        self._logits = torch.stack([reading.logits for reading in readings])
        self._seen = torch.stack([reading.seen for reading in readings])
        self._unread: list[int] = []
        self._live = [_Row(i, torch.Generator().manual_seed(seed)) for i, seed in enumerate(seeds)]
        self._sampler = self._new_sampler()
        self._left: dict[int, _Left] = {}
        self._finish: dict[int, FinishReason] = {}
        if max_new_tokens == 0:
            self._retire(dict.fromkeys(range(len(seeds)), "length"))

    def __iter__(self) -> Iterator[NewToken]:
        while self._live:
            yield from self._step()

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """By row; None for a row that is not finished."""
        return [self._finish.get(row) for row in range(len(self._finish) + len(self._live))]

    @property
    def state(self) -> GeckoState:
        """What every row has read, all tokens made so far included. Takes a call for each row's last token."""
        places = {row.index: place for place, row in enumerate(self._live)}
        lefts = {**self._left, **{index: self._leaving(place) for index, place in places.items()}}
        with inference(self._model):
            states = [self._settled(lefts[row]) for row in sorted(lefts)]
            stacked = GeckoState.stack(states)
        # Copied outside of inference mode, a state may be used for anything, also where gradients flow.
        return stacked.map(torch.clone)

    def stop(self, row: int) -> None:
        """Make no more tokens for a row; no effect on a finished one."""
        self._retire({place: "stop" for place, live in enumerate(self._live) if live.index == row})

    def _step(self) -> list[NewToken]:
        """The next token of every row in the batch. The state only moves forward when a token is wanted."""
        with inference(self._model):
            if self._unread:
                tokens = torch.tensor(self._unread, device=self._logits.device)
                self._logits, self._state = self._model.step(tokens, self._state)
                # Read from now on, whatever becomes of the draw.
                self._unread = []
            self._unread = self._draw()
        made: list[NewToken] = []
        finished: dict[int, FinishReason] = {}
        for place, (row, token) in enumerate(zip(self._live, self._unread, strict=True)):
            if token in self._stop_tokens:
                finished[place] = "stop"
                continue
            row.made += 1
            made.append(NewToken(row.index, token))
            if row.made == self._max_new_tokens:
                finished[place] = "length"
        self._retire(finished)
        return made

    def _draw(self) -> list[int]:
        finite = finite_rows(self._logits)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise ValueError(f"row {self._live[row].index}: {not_finite(self._logits[row])}")
        tokens = self._sampler.draw(self._logits, [row.generator for row in self._live], self._seen)
        if self._sampler.looks_back:
            self._seen[range(len(tokens)), tokens] = True
        return tokens

    def _new_sampler(self) -> Sampler:
        return Sampler([self._sampling] * len(self._live), self._logits.device)

    def _retire(self, finished: dict[int, FinishReason]) -> None:
        """Take rows, by their place in the batch, out of it."""
        if not finished:
            return
        for place, reason in finished.items():
            index = self._live[place].index
            self._left[index], self._finish[index] = self._leaving(place), reason
        kept = [place for place in range(len(self._live)) if place not in finished]
        self._live = [self._live[place] for place in kept]
        self._unread = [self._unread[place] for place in kept if self._unread]
        if kept:
            self._state = self._state.rows(kept)
            self._logits, self._seen = self._logits[kept], self._seen[kept]
            self._sampler = self._new_sampler()

    def _leaving(self, place: int) -> _Left:
        unread = self._unread[place : place + 1]
        return _Left(self._state.rows([place]), [token for token in unread if token not in self._stop_tokens])

    def _settled(self, left: _Left) -> GeckoState:
        return read(self._model, [torch.tensor(left.unread)], left.state).state if left.unread else left.state
