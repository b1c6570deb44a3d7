"""The two rules of writing: how a chunk is summarised, and how a summary changes the memory.

Both are affine in the memory, M ← A M + B, so that chunks are summarised in parallel and only the
short chain of A and B is sequential. A normaliser is what the rule accumulates over the chunks of a
document: log z (adaptive) or τ (linear).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.runtime.records import TensorRecord

EMPTY_LOG = -1e30
"""Log of an empty sum: finite, because logaddexp(−∞, −∞) has no gradient."""


@dataclass(frozen=True)
class ChunkSummary(TensorRecord):
    """Some tokens of one chunk, reduced to what the memory needs of them.

    weight: (…, key): log Σ exp(k) (adaptive) or Σ ψ(k) (linear).
    key_sum: (…, key, key): Σ_j φ_j ψ_jᵀ.  value_sum: (…, key, value): Σ_j φ_j v_jᵀ.
    """

    weight: Tensor
    key_sum: Tensor
    value_sum: Tensor


class Rule(Protocol):
    """What a rule must say; see ``Adaptive`` and ``Linear``."""

    empty_weight: float
    """The weight of no tokens."""

    def weigh(self, k: Tensor, counted: Tensor | None) -> Tensor:
        """Weight (…, key) of the tokens k (…, T, key) that are ``counted`` (…, T, 1); None is all."""

    def accumulate(self, first: Tensor, second: Tensor) -> Tensor:
        """The weight of two sets of tokens together."""

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        """The counted tokens of one chunk, whose weight is ``weight``, after chunks that come to ``before``."""

    def merge(self, first: ChunkSummary, second: ChunkSummary) -> ChunkSummary:
        """Two parts of one chunk as one."""

    def add(
        self, summary: ChunkSummary, k: Tensor, v: Tensor, before: Callable[[], Tensor], overwrites: bool
    ) -> ChunkSummary:
        """The same as merging the summary of one token, k (…, 1, key) and v (…, 1, value), in fewer steps.

        ``overwrites``: into the tensors of ``summary``, without gradients.
        """

    def affine(self, summary: ChunkSummary, after: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of M ← A M + B; ``after`` is the normaliser with this chunk."""

    def read(self, q: Tensor, allowed: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        """What queries (…, T, key) find in the memory (…, key, value), zero where not ``allowed`` (…, T, 1)."""


def empty_summary(
    rule: Rule, shape: tuple[int, ...], key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> ChunkSummary:
    """No tokens."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(*shape, *sizes, dtype=dtype, device=device)

    return ChunkSummary(zeros(key_dim) + rule.empty_weight, zeros(key_dim, key_dim), zeros(key_dim, value_dim))


class Adaptive:
    """Position-aware online softmax with the delta rule (paper Eq. 13–16)."""

    empty_weight = EMPTY_LOG

    def weigh(self, k: Tensor, counted: Tensor | None) -> Tensor:
        return _masked(k, counted, EMPTY_LOG).logsumexp(-2)

    def accumulate(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.logaddexp(first, second)

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        phi = _masked(k - weight.unsqueeze(-2), counted, -torch.inf).exp()
        return ChunkSummary(weight, phi.mT @ k.softmax(-1), phi.mT @ v)

    def merge(self, first: ChunkSummary, second: ChunkSummary) -> ChunkSummary:
        weight = torch.logaddexp(first.weight, second.weight)
        a, b = ((part.weight - weight).exp().unsqueeze(-1) for part in (first, second))
        return ChunkSummary(weight, a * first.key_sum + b * second.key_sum, a * first.value_sum + b * second.value_sum)

    def add(
        self, summary: ChunkSummary, k: Tensor, v: Tensor, before: Callable[[], Tensor], overwrites: bool
    ) -> ChunkSummary:
        # The token's share of the weight; that of all before it is 1 − share.
        share = (k.squeeze(-2) - summary.weight).sigmoid().unsqueeze(-1)
        weight = torch.logaddexp(summary.weight, k.squeeze(-2))
        lerp = Tensor.lerp_ if overwrites else Tensor.lerp
        return ChunkSummary(weight, *(
            lerp(old, new.expand_as(old), share.expand_as(old))
            for old, new in ((summary.key_sum, k.softmax(-1)), (summary.value_sum, v))
        ))  # fmt: skip

    def affine(self, summary: ChunkSummary, after: Tensor) -> tuple[Tensor, Tensor]:
        rho = (summary.weight - after).exp().unsqueeze(-1)
        return torch.diag_embed(1 - rho.squeeze(-1)) - rho * summary.key_sum, rho * summary.value_sum

    def read(self, q: Tensor, allowed: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        return q.softmax(-1).masked_fill(~allowed, 0) @ memory


class Linear:
    """Infini-attention's delta rule with ψ = φ = elu + 1 and its normaliser (paper Eq. 9–11)."""

    empty_weight = 0.0

    def weigh(self, k: Tensor, counted: Tensor | None) -> Tensor:
        return _masked(_elu1(k), counted, 0).sum(-2)

    def accumulate(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        phi = _masked(_elu1(k), counted, 0)
        return ChunkSummary(weight, phi.mT @ _normalised(_elu1(k), before), phi.mT @ v)

    def merge(self, first: ChunkSummary, second: ChunkSummary) -> ChunkSummary:
        return ChunkSummary(
            first.weight + second.weight, first.key_sum + second.key_sum, first.value_sum + second.value_sum
        )

    def add(
        self, summary: ChunkSummary, k: Tensor, v: Tensor, before: Callable[[], Tensor], overwrites: bool
    ) -> ChunkSummary:
        psi = _elu1(k)
        phi = psi.mT
        addcmul = Tensor.addcmul_ if overwrites else Tensor.addcmul
        return ChunkSummary(
            summary.weight + psi.squeeze(-2),
            addcmul(summary.key_sum, phi, _normalised(psi, before())), addcmul(summary.value_sum, phi, v),
        )  # fmt: skip

    def affine(self, summary: ChunkSummary, after: Tensor) -> tuple[Tensor, Tensor]:
        identity = torch.eye(after.shape[-1], dtype=after.dtype, device=after.device)
        return identity - summary.key_sum, summary.value_sum

    def read(self, q: Tensor, allowed: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        return _normalised(_elu1(q), normaliser).masked_fill(~allowed, 0) @ memory


def _masked(x: Tensor, counted: Tensor | None, value: float) -> Tensor:
    return x if counted is None else x.masked_fill(~counted, value)


def _elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _normalised(features: Tensor, normaliser: Tensor) -> Tensor:
    """ψ / (ψ τ), and zero before anything was accumulated."""
    total = features @ normaliser.unsqueeze(-1)
    empty = total == 0
    return (features / total.masked_fill(empty, 1)).masked_fill(empty, 0)


RULES: dict[str, Rule] = {"adaptive": Adaptive(), "linear": Linear()}
