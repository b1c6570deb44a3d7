"""Prefill, score and decode one sequence with a Llama, whose key-value cache grows with every token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.inference.generate import NewToken
from gecko.inference.pieces import checked, cut
from gecko.inference.prefill import inference
from gecko.inference.sampling import RandomNumbers, Sampler, Sampling
from gecko.models.llama import KeyValues, Llama
from gecko.ops.loss import token_cross_entropy

PIECE_TOKENS = 2048
"""Tokens per model call."""


@dataclass(frozen=True)
class LlamaPrefill:
    """Key-value cache of one sequence and the logits of its next token."""

    cache: KeyValues
    """Has one row."""
    logits: Tensor
    """(V,), of the next token."""


def prefill_llama(model: Llama, tokens: Iterable[Tensor], after: LlamaPrefill | None = None) -> LlamaPrefill:
    """Read one sequence, given as 1-D integer tensors of any lengths. Raise TypeError or ValueError if the tokens are
    not ids of the model, or there are none."""
    before, reading = None if after is None else after.cache, None
    for hidden, cache, _ in _read(model, tokens, before):
        with inference(model):
            reading = LlamaPrefill(cache, model.lm_head(hidden[-1]))
    if reading is None:
        raise ValueError("a prompt must have at least one token; got none. Try the document start.")
    return reading


def score_llama(model: Llama, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the losses in nats of all tokens after the first, piece by piece; the keys and values of all are kept."""
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
    """Iterator over the tokens that continue a prefilled sequence, all of row 0; a stop token ends it.

    The same logits and seed give the same tokens as ``TokenStream``.
    """

    def __init__(
        self, model: Llama, reading: LlamaPrefill, *, seed: int, temperature: float, max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._reading, self._left = model, reading, max_new_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._sampler = Sampler([Sampling(temperature)], reading.logits.device)
        self._random = RandomNumbers(seed)

    def __iter__(self) -> Iterator[NewToken]:
        while self._left:
            (token,) = self._sampler.draw(self._reading.logits.unsqueeze(0), [self._random])
            if token in self._stop_tokens:
                return
            self._left -= 1
            yield NewToken(0, token)
            if self._left:
                self._reading = prefill_llama(self._model, [torch.tensor([token], device="cpu")], self._reading)

    def stop(self, row: int) -> None:
        """Generate no more tokens."""
        self._left = 0


def _read(
    model: Llama, tokens: Iterable[Tensor], cache: KeyValues | None
) -> Iterator[tuple[Tensor, KeyValues, Tensor]]:
    """Yield per piece: the input of the head (n, D), the cache after it, and its tokens."""
    device = model.lm_head.weight.device
    for part in cut(checked(tokens, model.config.vocab_size), PIECE_TOKENS, PIECE_TOKENS):
        part = part.to(device)
        with inference(model):
            hidden, cache = model.read(part.unsqueeze(0), cache)
        yield hidden[0], cache, part
