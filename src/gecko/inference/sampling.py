"""Draw the next token from logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gecko.ops.decoding.cpu import first_broken, sample, samples_in_c

_FIRST_LOOK = 512
"""Number of most likely tokens that are searched for a nucleus first."""
_DRAWN_TOGETHER = 64
"""Random numbers of a sequence that are made at a time."""
_ALL = 1 << 53
"""Upper bound of top-k: the largest integer up to which float64 is exact, above any vocabulary size."""
_PENALTIES = (0.01, 100.0)
"""Range of the repetition penalty; beyond it, scores may overflow to infinity, and inf − inf is NaN."""
_BAN = -100.0
"""Largest logit bias that excludes a token, as in OpenAI's API."""
NO_TOKEN = "logit_bias and penalties must leave tokens to draw, and finite scores; here they do not. Try smaller ones."
"""Error of a row for which ``Sampler.draw`` returns −1."""
MAX_PENALTY = 2.0
"""Largest magnitude of the presence and frequency penalties, as in OpenAI's API."""


def check_seed(seed: int) -> None:
    """Raise ValueError unless ``seed`` fits in 64 bits, signed or not."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"a seed must fit in 64 bits; got {seed}. Try a smaller one.")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one sequence.

    They are applied in this order: logit bias, repetition penalty, presence and frequency penalties, temperature,
    top-k, top-p of the tokens that top-k keeps, min-p of the tokens that top-p keeps. Raise ValueError if a number is
    out of range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 always selects the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens, and tokens exactly as likely as the k-th."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens with at least this total probability; ties: lower ids first."""
    min_p: float | None = None
    """Keep tokens with at least this fraction of the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that the sequence contains; 0.01 to 100."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; with −100 or less, a token is never drawn."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before; −2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for every time it was generated before; −2 to 2."""

    def __post_init__(self) -> None:
        least, most = _PENALTIES
        signed = f"must be in −{MAX_PENALTY:g}..{MAX_PENALTY:g}, and is 0 for none"
        extra = -MAX_PENALTY, MAX_PENALTY, signed, " Try 0.5."
        rules: dict[str, tuple[float, float, str, str]] = {
            "temperature": (0, sys.float_info.max, "must be 0 (greedy) or above", " Try 0.8."),
            "top_k": (1, math.inf, "must be at least 1, or None for no limit", ""),
            "top_p": (math.ulp(0), 1, "must be above 0 and at most 1, or None for no limit", ""),
            "min_p": (0, 1, "must be in 0..1, or None for no limit", " Try 0.05."),
            "repetition_penalty": (least, most, f"must be in {least}..{most:g}, and is 1 for none", " Try 1.1."),
            "presence_penalty": extra, "frequency_penalty": extra,
        }  # fmt: skip
        for name, (low, high, rule, advice) in rules.items():
            value: Any = getattr(self, name)
            if not (value is None and rule.endswith("None for no limit")) and not low <= value <= high:
                raise ValueError(f"{name} {rule}; got {value}.{advice}")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(
                    f"logit_bias must be finite; got {bias} for token {token}. Use −100 to exclude a token."
                )

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often each token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def excluded(self) -> frozenset[int]:
        """Token ids that are never drawn."""
        return frozenset(token for token, bias in self.logit_bias.items() if bias <= _BAN)

    @property
    def is_plain(self) -> bool:
        """Whether it is greedy or at a temperature, with nothing else."""
        uncut = (self.top_k, self.top_p, self.min_p) in ((None, None, None), (None, 1, None))
        return uncut and self.repetition_penalty == 1 and not self.counts_tokens and not self.logit_bias

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError if an id of the logit bias is outside a vocabulary of this size, or all are excluded."""
        if len(self.excluded) == vocab_size:
            raise ValueError(f"logit_bias must leave a token to draw; got −100 or less for all {vocab_size} tokens.")
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias must have ids in 0..{vocab_size - 1}; got {token}. Check the tokenizer.")


def random_numbers(seed: int) -> Iterator[float]:
    """Yield the uniform random numbers in [0, 1) of one sequence, which depend on its seed only."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        # One call of PyTorch for many numbers: a call for each takes as long as a small model's layer.
        yield from torch.rand(_DRAWN_TOGETHER, generator=generator, dtype=torch.float64, device="cpu").tolist()


class Sampler:
    """Sampler of a batch in which every row has its own ``Sampling`` and does not depend on the other rows."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> None:
        self._device = device
        self._plain = all(sampling.is_plain for sampling in samplings)
        self._temperatures = [sampling.temperature for sampling in samplings]
        self._drawn = [row for row, temperature in enumerate(self._temperatures) if temperature > 0]
        """Rows that draw a random number; ``_index`` is None if all do."""
        self._index = None if len(self._drawn) == len(samplings) else self._integers(self._drawn)
        biases = [(row, *item) for row, sampling in enumerate(samplings) for item in sampling.logit_bias.items()]
        rows, tokens, values = zip(*biases, strict=True) if biases else ((), (), ())
        self._bias = (self._integers(rows), self._integers(tokens)) if biases else None
        self._biases = self._column([-math.inf if value <= _BAN else value for value in values]).squeeze(1)
        penalties = [sampling.repetition_penalty for sampling in samplings]
        self._penalty = self._column(penalties) if any(penalty != 1 for penalty in penalties) else None
        counted = [row for row, sampling in enumerate(samplings) if sampling.counts_tokens]
        self._counted = self._integers(counted) if counted else None
        self._presence = self._column([samplings[row].presence_penalty for row in counted])
        self._frequency = self._column([samplings[row].frequency_penalty for row in counted])
        drawn = [samplings[row] for row in self._drawn]
        self._temperature = self._column([sampling.temperature for sampling in drawn])
        self._top_k = self._limits([None if x.top_k is None else min(x.top_k, _ALL) for x in drawn])
        self._top_p = self._limits([None if sampling.top_p == 1 else sampling.top_p for sampling in drawn])
        self._min_p = self._limits([sampling.min_p for sampling in drawn])

    @property
    def uses_history(self) -> bool:
        """Whether ``draw`` needs ``seen``."""
        return self._penalty is not None

    def draw(
        self, logits: Tensor, randoms: Sequence[Iterator[float]], seen: Tensor | None = None,
        counts: Sequence[Tensor] = (),
    ) -> list[int]:  # fmt: skip
        """Draw one token per row; a row with a temperature above 0 draws one random number. The token is −1 if all
        scores of a row are −inf, or one is NaN or inf.

        Args:
            logits: (B, V), finite, or −inf for tokens that must not be drawn.
            seen: (B, V) bool, the tokens that each sequence contains; required if ``uses_history``.
            counts: for each row whose sampling ``counts_tokens``, (V,) integers: how often the sequence has generated
                each token.
        """
        in_c = self._plain and samples_in_c(logits)
        scores = logits if in_c else self._adjusted(logits, seen, counts)
        lost = [] if in_c and first_broken(logits) is None else _lost_rows(scores)
        scores = scores.index_fill(0, self._integers(lost), 0) if lost else scores
        if in_c:
            uniforms = [next(random) if x else 0.0 for x, random in zip(self._temperatures, randoms, strict=True)]
            tokens = sample(scores, self._temperatures, uniforms)
        else:
            tokens = self._in_pytorch(scores, randoms)
        return [-1 if row in lost else token for row, token in enumerate(tokens)] if lost else tokens

    def _in_pytorch(self, scores: Tensor, randoms: Sequence[Iterator[float]]) -> list[int]:
        """Return one token per row of finite scores."""
        chosen: list[int] = []
        if self._drawn:
            cumulative = self._probabilities(scores).cumsum(-1)
            total = cumulative[:, -1:]
            # The random numbers come from the host, as in C.
            uniform = torch.tensor([[next(randoms[row])] for row in self._drawn], dtype=torch.float64, device="cpu")
            # Rounding could give the total itself, which lies behind the last token with nonzero probability.
            point = torch.minimum(uniform.to(total.device) * total, total.nextafter(torch.zeros_like(total)))
            chosen = torch.searchsorted(cumulative, point, right=True).squeeze(-1).tolist()
        if self._index is None:
            return chosen
        tokens: list[int] = scores.argmax(-1).tolist()
        for row, token in zip(self._drawn, chosen, strict=True):
            tokens[row] = token
        return tokens

    def _adjusted(self, logits: Tensor, seen: Tensor | None, counts: Sequence[Tensor]) -> Tensor:
        """Return the logits after biases and penalties."""
        scores = logits
        if self._bias is not None:
            scores = scores.double().index_put(self._bias, self._biases, accumulate=True)
        if self._penalty is not None:
            assert seen is not None, "a repetition penalty needs the tokens of the sequence"
            penalised = torch.where(scores > 0, scores / self._penalty, scores * self._penalty)
            scores = torch.where(seen, penalised, scores)
        if self._counted is not None:
            made = torch.stack(list(counts))
            taken = self._frequency * made + self._presence * (made > 0)
            scores = scores.double().index_add(0, self._counted, taken, alpha=-1)
        return scores

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Return the distributions to draw from, (rows with a temperature above 0, V) float64."""
        scores = (scores if self._index is None else scores.index_select(0, self._index)).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self._temperature
        scores = _limited(scores, self._top_k, _only_top)
        probabilities = _limited(scores.softmax(-1), self._top_p, _nucleus)
        return _limited(probabilities, self._min_p, _above_min_p)

    def _limits(self, values: Sequence[float | None]) -> tuple[Tensor, Tensor] | None:
        """Return the rows that have a limit and the limits as a column."""
        rows = [row for row, value in enumerate(values) if value is not None]
        return (self._integers(rows), self._column([values[row] for row in rows])) if rows else None

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: Sequence[float | None]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device).unsqueeze(1)


def _limited(x: Tensor, limits: tuple[Tensor, Tensor] | None, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return x (B, V) with ``function`` applied only to the rows that have a limit."""
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


def _nucleus(probabilities: Tensor, mass: Tensor) -> Tensor:
    # The nucleus is a small part of a large vocabulary, so sorting all of it would take many times longer.
    size, vocabulary = _FIRST_LOOK, probabilities.shape[-1]
    while True:
        ordered = probabilities.topk(min(size, vocabulary), dim=-1).values
        kept = ordered.cumsum(-1) - ordered < mass
        if size >= vocabulary or not bool(kept[:, -1].any()):
            break
        size *= 8
    count = kept.sum(-1, keepdim=True)
    least = ordered.gather(-1, count - 1)
    equal = probabilities == least
    # Among tokens as likely as the last one kept, keep the lower ids.
    some = equal & (equal.cumsum(-1) <= count - (ordered > least).sum(-1, keepdim=True))
    chosen = probabilities.masked_fill(~(some | (probabilities > least)), 0)
    return chosen / chosen.sum(-1, keepdim=True)


def _above_min_p(probabilities: Tensor, mass: Tensor) -> Tensor:
    kept = probabilities.masked_fill(probabilities < mass * probabilities.amax(-1, keepdim=True), 0)
    return kept / kept.sum(-1, keepdim=True)


def _lost_rows(scores: Tensor) -> list[int]:
    """Return the rows of scores (B, V) from which no token can be drawn."""
    return [row for row, most in enumerate(scores.amax(-1).tolist()) if not math.isfinite(most)]


def broken_rows(logits: Tensor) -> list[int]:
    """Return the rows of logits (B, V) that are not all finite."""
    if first_broken(logits) is None if samples_in_c(logits) else bool(logits.isfinite().all()):
        return []
    return (~logits.isfinite().all(-1)).nonzero().flatten().tolist()


def not_finite(logits: Tensor) -> str:
    """Describe what is wrong with logits (V,) that are not finite."""
    return (
        f"logits must be finite to draw a token; got {int(logits.isnan().sum())} NaN and "
        f"{int(logits.isinf().sum())} infinite of {len(logits)}. "
        "The weights or the state have such values, or 16-bit arithmetic overflows: try float32."
    )
