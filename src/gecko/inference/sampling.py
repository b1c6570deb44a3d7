"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIRST_LOOK = 512
"""Tokens in which a nucleus is searched first."""
_ALL = 1 << 53
"""A top-k beyond every vocabulary, the largest whole number that float64 counts up to."""
_PENALTIES = (0.01, 100.0)
"""Far beyond what helps a text; further out, scores overflow, and two infinite ones have no difference."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: logit bias, repetition penalty, temperature, then top-k, then top-p of what top-k left,
    then min-p of what top-p left.

    Raises:
        ValueError: a number is out of range.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token always."""
    top_k: int | None = None
    """Keep the k most likely tokens, and those that are exactly as likely as the k-th."""
    top_p: float | None = None
    """Keep the fewest most likely tokens that have at least this probability together; of equals, lower ids."""
    min_p: float | None = None
    """Keep the tokens that are at least this share as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the text so far held are divided by it where positive, else multiplied;
    0.01 to 100."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token id: what is added to its logit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or above; got {self.temperature}. Try 0.8.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for no limit; got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, or None for no limit; got {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in 0..1, or None for no limit; got {self.min_p}. Try 0.05.")
        least, most = _PENALTIES
        if not least <= self.repetition_penalty <= most:
            raise ValueError(
                f"repetition_penalty must be in {least}..{most:g}, and is 1 for none; "
                f"got {self.repetition_penalty}. Try 1.1."
            )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias must be finite; got {bias} for token {token}. −100 rules a token out.")

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError for a bias of a token that a vocabulary of this size does not have."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias must be of ids in 0..{vocab_size - 1}; got {token}.")


class Sampler:
    """``Sampling`` for a batch of rows, each with settings of its own; a row's tokens do not depend on the others.

    Args:
        samplings: one for each row.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> None:
        self._device = device
        self._drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        """Rows that are not greedy."""
        self._index = None if len(self._drawn) == len(samplings) else self._integers(self._drawn)
        self._bias = self._biases(samplings)
        penalties = [sampling.repetition_penalty for sampling in samplings]
        self._penalty = self._column(penalties) if any(penalty != 1 for penalty in penalties) else None

        drawn = [samplings[row] for row in self._drawn]
        self._temperature = self._column([sampling.temperature for sampling in drawn])
        self._top_k = self._limits(
            [None if sampling.top_k is None else min(sampling.top_k, _ALL) for sampling in drawn]
        )
        self._top_p = self._limits([None if sampling.top_p == 1 else sampling.top_p for sampling in drawn])
        self._min_p = self._limits([sampling.min_p for sampling in drawn])

    @property
    def looks_back(self) -> bool:
        """Whether ``seen`` makes a difference."""
        return self._penalty is not None

    def draw(
        self, logits: Tensor, generators: Sequence[torch.Generator], seen: Tensor | None = None
    ) -> list[int]:  # fmt: skip
        """One token for each row, which takes one number of the row's generator unless it is greedy.

        Args:
            logits: (B, V), finite.
            seen: (B, V) bool, tokens that the row's text held; needed where ``looks_back``.
        """
        scores = self._adjusted(logits, seen)
        if not self._drawn:
            return scores.argmax(-1).tolist()
        chosen = self._choose(scores, [generators[row] for row in self._drawn])
        if self._index is None:
            return chosen
        tokens: list[int] = scores.argmax(-1).tolist()
        for row, token in zip(self._drawn, chosen, strict=True):
            tokens[row] = token
        return tokens

    def _adjusted(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        scores = logits
        if self._bias is not None:
            scores = scores.double().index_put(*self._bias, accumulate=True)
        if self._penalty is None:
            return scores
        assert seen is not None, "a repetition penalty needs to know what the text held"
        penalised = torch.where(scores > 0, scores / self._penalty, scores * self._penalty)
        return torch.where(seen, penalised, scores)

    def _probabilities(self, scores: Tensor) -> Tensor:
        """The distributions that tokens are drawn from, (rows that are not greedy, V) float64; sums are 1 but for
        rounding.
        """
        scores = (scores if self._index is None else scores.index_select(0, self._index)).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self._temperature
        scores = _limited(scores, self._top_k, _only_top)
        chances = _limited(scores.softmax(-1), self._top_p, _nucleus)
        return _limited(chances, self._min_p, _likely)

    def _choose(self, scores: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        cumulative = self._probabilities(scores).cumsum(-1)
        total = cumulative[:, -1:]
        # One number a token from the host, so that a seed means the same on every device.
        uniform = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
        # Rounding could bring it up to the total, behind the last token that has any probability.
        point = torch.minimum(uniform.to(total.device) * total, total.nextafter(torch.zeros_like(total)))
        return torch.searchsorted(cumulative, point, right=True).squeeze(-1).tolist()

    def _biases(self, samplings: Sequence[Sampling]) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Rows and tokens, and what is added there."""
        found = [(row, *item) for row, sampling in enumerate(samplings) for item in sampling.logit_bias.items()]
        if not found:
            return None
        rows, tokens, values = zip(*found, strict=True)
        return (self._integers(rows), self._integers(tokens)), self._column(values).squeeze(1)

    def _limits(self, values: Sequence[float | None]) -> tuple[Tensor, Tensor] | None:
        """The rows that have a limit, and the limits as a column."""
        rows = [row for row, value in enumerate(values) if value is not None]
        return (self._integers(rows), self._column([values[row] for row in rows])) if rows else None

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: Sequence[float | None]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device).unsqueeze(1)


def _limited(x: Tensor, limits: tuple[Tensor, Tensor] | None, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """x (B, V) with ``function`` applied to the rows that have a limit; only they pay for it."""
    if limits is None:
        return x
    rows, values = limits
    if len(rows) == len(x):
        return function(x, values)
    return x.index_copy(0, rows, function(x.index_select(0, rows), values))


def _only_top(scores: Tensor, count: Tensor) -> Tensor:
    count = count.long().clamp(max=scores.shape[-1])
    least = scores.topk(int(count.max()), dim=-1).values.gather(-1, count - 1)
    return scores.masked_fill(scores < least, -torch.inf)


def _nucleus(chances: Tensor, share: Tensor) -> Tensor:
    ordered, kept = _likeliest_with_share(chances, share)
    count = kept.sum(-1, keepdim=True)
    least = ordered.gather(-1, count - 1)
    equal = chances == least
    # Of the tokens as likely as the least likely one, as many as there is place for.
    some = equal & (equal.cumsum(-1) <= count - (ordered > least).sum(-1, keepdim=True))
    chosen = chances.masked_fill(~(some | (chances > least)), 0)
    return chosen / chosen.sum(-1, keepdim=True)


def _likeliest_with_share(chances: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The largest chances of each row in order, enough to have ``share`` together, and which of them are needed.

    Of a large vocabulary a nucleus is a small part, and to put all of it in order takes many times as long.
    """
    size, vocabulary = _FIRST_LOOK, chances.shape[-1]
    while True:
        ordered = chances.topk(min(size, vocabulary), dim=-1).values
        kept = ordered.cumsum(-1) - ordered < share
        if size >= vocabulary or not bool(kept[:, -1].any()):
            return ordered, kept
        size *= 8


def _likely(chances: Tensor, share: Tensor) -> Tensor:
    kept = chances.masked_fill(chances < share * chances.amax(-1, keepdim=True), 0)
    return kept / kept.sum(-1, keepdim=True)


def finite_rows(logits: Tensor) -> Tensor:
    """(B,) bool: rows of logits (B, V) that a token can be chosen from."""
    return logits.isfinite().all(-1)


def not_finite(logits: Tensor) -> str:
    """What is wrong with logits (V,) that are not finite."""
    return (
        f"logits must be finite to choose a token from; got {int(logits.isnan().sum())} NaN and "
        f"{int(logits.isinf().sum())} infinite of {len(logits)}. "
        "The weights or the reading state hold such values, or 16-bit arithmetic overflows: try float32."
    )
