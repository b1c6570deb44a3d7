"""Reading, scoring and continuing one text with a Llama, whose memory of it grows with every token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.baselines.llama import KeyValues, Llama
from gecko.generation.reading import checked, cut, inference
from gecko.generation.sampling import Sampler, Sampling
from gecko.generation.stream import NewToken
from gecko.ops.loss import token_cross_entropy

PIECE_TOKENS = 2048
"""Tokens read in one call."""


@dataclass(frozen=True)
class LlamaReading:
    """Where one text stands."""

    cache: KeyValues
    """Of one row."""
    logits: Tensor
    """(V,) of the token that follows."""


def read_llama(model: Llama, tokens: Iterable[Tensor], after: LlamaReading | None = None) -> LlamaReading:
    """Read one text, 1-D integers of any lengths, to its end; TypeError or ValueError for what are no ids, or none."""
    before, reading = None if after is None else after.cache, None
    for hidden, cache, _ in _read(model, tokens, before):
        with inference(model):
            reading = LlamaReading(cache, model.lm_head(hidden[-1]))
    if reading is None:
        raise ValueError("a prompt must hold at least one token; got none. Try the document start.")
    return reading


def score_llama(model: Llama, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """Losses in nats of all tokens of one text but its first, piece by piece; all its keys and values are held."""
    last = None
    for hidden, _, part in _read(model, tokens, None):
        before = hidden[:-1] if last is None else torch.cat([last, hidden[:-1]])
        targets = part[1:] if last is None else part
        last = hidden[-1:]
        if len(targets):
            with inference(model):
                losses = token_cross_entropy(before, model.lm_head.weight, targets)
            yield losses


class LlamaStream:
    """Continues a reading; iterate for the tokens, all of row 0. A stop token ends it and is not returned.

    The same logits and seed give the tokens of ``TokenStream``.
    """

    def __init__(
        self, model: Llama, reading: LlamaReading, *, seed: int, temperature: float, max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._reading, self._left = model, reading, max_new_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._sampler = Sampler([Sampling(temperature)], reading.logits.device)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[NewToken]:
        while self._left:
            (token,) = self._sampler.draw(self._reading.logits.unsqueeze(0), [self._generator])
            if token in self._stop_tokens:
                return
            self._left -= 1
            yield NewToken(0, token)
            if self._left:
                self._reading = read_llama(self._model, [torch.tensor([token])], self._reading)

    def stop(self, row: int) -> None:
        """Make no more tokens."""
        self._left = 0


def _read(
    model: Llama, tokens: Iterable[Tensor], cache: KeyValues | None
) -> Iterator[tuple[Tensor, KeyValues, Tensor]]:
    """Of each piece what the head projects, (n, D), keys and values of all that was read, and the tokens."""
    device = model.lm_head.weight.device
    for part in cut(checked(tokens, model.config.vocab_size), PIECE_TOKENS, PIECE_TOKENS):
        part = part.to(device)
        with inference(model):
            hidden, cache = model.read(part.unsqueeze(0), cache)
        yield hidden[0], cache, part
