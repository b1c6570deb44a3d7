"""The update rules of the memory: how a chunk is summarised, and how a summary updates the memory.

The adaptive and the linear rule are affine in the memory, M ← A M + B. Chunks are therefore summarised in parallel, and
only the short chain of products with A is sequential. What the orthogonal rule writes depends on the memory before it.
The normaliser is a sum over all chunks of a document so far: log z (adaptive, orthogonal) or τ (linear).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.runtime.tensors import TensorRecord

EMPTY_LOG = -1e30
"""Logarithm of an empty sum. It is finite because the gradient of logaddexp(−∞, −∞) is NaN."""


@dataclass(frozen=True)
class ChunkSummary(TensorRecord):
    """Sums over some tokens of one chunk, which replace the tokens when the memory is updated.

    weight: (…, key): log Σ exp(k) (adaptive) or Σ ψ(k) (linear).
    key_sum: (…, key, key): Σ_j φ_j ψ_jᵀ.  value_sum: (…, key, value): Σ_j φ_j v_jᵀ.
    """

    weight: Tensor
    key_sum: Tensor
    value_sum: Tensor


class Entered(NamedTuple):
    """A call of ``working_memory`` whose chunks are summarised, up to the memory before the call."""

    affine_map: Callable[[], Tensor]
    """Returns A and B, (B, H, key, key + value), of the map M ← A M + B of all chunks that enter in the call. B
    includes the memory of the state before the call: the map is applied to the memory that is added to it."""
    read: Callable[[Tensor], tuple[Tensor, WorkingMemoryState]]
    """Returns the outputs and the state after the call, given the memory (B, H, key, value) before it."""


def with_identity(terms: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a chain of updates needs to compute A and B at once: terms [0 | terms], and the memory [I | memory].

    Args:
        terms: (…, value), terms of the chain, or values that it sums; memory: (B, H, key, value), before the chain.
    """
    keys = memory.shape[-2]
    identity = torch.eye(keys, dtype=memory.dtype, device=memory.device).expand(*memory.shape[:-1], -1)
    return F.pad(terms, (keys, 0)), torch.cat([identity, memory], dim=-1)


def empty_summary(rule: Rule, memory: Tensor) -> ChunkSummary:
    """Return the summary of an empty set of tokens, for a ``memory`` (B, H, key, value)."""
    keys, weight = memory.shape[2], memory.new_full(memory.shape[:3], rule.empty_weight)
    return ChunkSummary(weight, memory.new_zeros(*memory.shape[:3], keys), torch.zeros_like(memory))


class Adaptive:
    """Position-aware online softmax with the delta rule (paper Eq. 13–16)."""

    empty_weight: float = EMPTY_LOG
    """Weight of an empty set of tokens."""

    def weigh(self, k: Tensor, counted: Tensor | None) -> Tensor:
        """Return the weight (…, key) of the ``counted`` (…, T, 1) tokens among k (…, T, key); None counts all."""
        return self.total(k, counted)

    def accumulate(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the weight of the union of two sets of tokens."""
        return _logaddexp(first, second)

    def total(self, weights: Tensor, counted: Tensor | None) -> Tensor:
        """Return the weight (…, key) of the union of the ``counted`` (…, n, 1) sets of weights (…, n, key)."""
        return _masked(weights, counted, EMPTY_LOG).logsumexp(-2)

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        """Summarise the counted tokens of one chunk, given their ``weight`` and the normaliser ``before`` the chunk."""
        phi = _masked(k - weight.unsqueeze(-2), counted, -torch.inf).exp()
        return ChunkSummary(weight, phi.mT @ k.softmax(-1), phi.mT @ v)

    def subtracted(self, k: Tensor) -> Tensor:
        """Return ψ of keys (…, T, key), by which the memory's answers are subtracted from the values."""
        return k.softmax(-1)

    def merge(self, first: ChunkSummary, second: ChunkSummary) -> ChunkSummary:
        """Merge the summaries of two parts of one chunk."""
        weight = torch.logaddexp(first.weight, second.weight)
        a, b = ((part.weight - weight).exp().unsqueeze(-1) for part in (first, second))
        return ChunkSummary(weight, a * first.key_sum + b * second.key_sum, a * first.value_sum + b * second.value_sum)

    def add(self, summary: ChunkSummary, k: Tensor, v: Tensor, before: Callable[[], Tensor]) -> ChunkSummary:
        """Add one token, k (…, 1, key) and v (…, 1, value). Faster than ``summarise`` and ``merge``."""
        # share: the token's fraction of the new weight; the earlier tokens have 1 − share.
        share = (k.squeeze(-2) - summary.weight).sigmoid().unsqueeze(-1)
        weight = _logaddexp(summary.weight, k.squeeze(-2))
        return ChunkSummary(weight, *(
            old.lerp(new.expand_as(old), share.expand_as(old))
            for old, new in ((summary.key_sum, self.subtracted(k)), (summary.value_sum, v))
        ))  # fmt: skip

    def affine(self, summary: ChunkSummary, after: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B of M ← A M + B. ``after`` is the normaliser including this chunk."""
        rho = (summary.weight - after).exp().unsqueeze(-1)
        return torch.diag_embed(1 - rho.squeeze(-1)) - rho * summary.key_sum, rho * summary.value_sum

    def read(self, q: Tensor, allowed: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        """Read the memory (…, key, value) for queries (…, T, key); return zero where not ``allowed`` (…, T, 1)."""
        return q.softmax(-1).masked_fill(~allowed, 0) @ memory


class Orthogonal(Adaptive):
    """Removes from each value its part along the memory's answer, instead of subtracting the answer.

    A token writes v − (v · p / V) p, with p = RMSNorm(ψ(k)ᵀ M) for the memory M before the token's chunk. This is not
    affine in M, so chunks are summarised one after the other, of the values ``written``, and their sums of keys are 0.
    """

    def written(self, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """Return what tokens with keys k (…, T, key) and values v (…, T, value) write, given the memory before them."""
        answer = k.softmax(-1) @ memory
        direction = answer * (answer.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return v - (v * direction).mean(-1, keepdim=True) * direction

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        phi = _masked(k - weight.unsqueeze(-2), counted, -torch.inf).exp()
        return ChunkSummary(weight, k.new_zeros(*weight.shape, k.shape[-1]), phi.mT @ v)

    def subtracted(self, k: Tensor) -> Tensor:
        return torch.zeros_like(k)


class Linear:
    """Infini-attention's delta rule with ψ = φ = elu + 1 and its normaliser (paper Eq. 9–11)."""

    empty_weight = 0.0

    def weigh(self, k: Tensor, counted: Tensor | None) -> Tensor:
        return self.total(_elu1(k), counted)

    def accumulate(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def total(self, weights: Tensor, counted: Tensor | None) -> Tensor:
        return _masked(weights, counted, 0).sum(-2)

    def summarise(self, k: Tensor, v: Tensor, counted: Tensor | None, weight: Tensor, before: Tensor) -> ChunkSummary:
        phi = _masked(_elu1(k), counted, 0)
        return ChunkSummary(weight, phi.mT @ _normalised(_elu1(k), before), phi.mT @ v)

    def merge(self, first: ChunkSummary, second: ChunkSummary) -> ChunkSummary:
        return ChunkSummary(
            first.weight + second.weight, first.key_sum + second.key_sum, first.value_sum + second.value_sum
        )

    def add(self, summary: ChunkSummary, k: Tensor, v: Tensor, before: Callable[[], Tensor]) -> ChunkSummary:
        psi = _elu1(k)
        phi = psi.mT
        return ChunkSummary(
            summary.weight + psi.squeeze(-2),
            summary.key_sum.addcmul(phi, _normalised(psi, before())), summary.value_sum.addcmul(phi, v),
        )  # fmt: skip

    def affine(self, summary: ChunkSummary, after: Tensor) -> tuple[Tensor, Tensor]:
        identity = torch.eye(after.shape[-1], dtype=after.dtype, device=after.device)
        return identity - summary.key_sum, summary.value_sum

    def read(self, q: Tensor, allowed: Tensor, memory: Tensor, normaliser: Tensor) -> Tensor:
        return _normalised(_elu1(q), normaliser).masked_fill(~allowed, 0) @ memory


def _masked(x: Tensor, counted: Tensor | None, value: float) -> Tensor:
    return x if counted is None else x.masked_fill(~counted, value)


def _logaddexp(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(first) + exp(second)). ONNX computes it by this formula, which would be −∞ for two empty sums."""
    if not torch.compiler.is_exporting():
        return torch.logaddexp(first, second)
    return torch.maximum(first, second) + (first - second).abs().neg().exp().log1p()


def _elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _normalised(features: Tensor, normaliser: Tensor) -> Tensor:
    """Return ψ / (ψ τ), or zero if τ is zero."""
    total = features @ normaliser.unsqueeze(-1)
    empty = total == 0
    return (features / total.masked_fill(empty, 1)).masked_fill(empty, 0)


Rule = Adaptive | Linear
RULES: dict[str, Rule] = {"adaptive": Adaptive(), "orthogonal": Orthogonal(), "linear": Linear()}


@dataclass(frozen=True)
class WorkingMemoryState(TensorRecord):
    """The memory, and summaries of the two chunks that have not entered it yet; float32 or wider.

    A chunk enters the memory when it leaves the attention window, two chunks later. Until then the state holds its
    summary. The state therefore does not depend on how the text was split into calls.
    """

    memory: Tensor
    """(B, H, key_head_dim, value_head_dim): M after chunk u − 2, where chunk u is the chunk of the next token."""
    normaliser: Tensor
    """(B, H, key_head_dim): log z (adaptive rule) or τ (linear rule)."""
    previous: ChunkSummary
    """Summary of chunk u − 1."""
    current: ChunkSummary
    """Summary of the tokens read so far of chunk u, from the current document only."""
    previous_resets: Tensor
    """(B,) bool: a document started in chunk u − 1, so the memory is cleared before that chunk enters."""

    @classmethod
    def empty(
        cls, rule: str, batch: int, heads: int, key_dim: int, value_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> WorkingMemoryState:  # fmt: skip
        memory = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=device)
        nothing = empty_summary(RULES[rule], memory)
        resets = torch.zeros(batch, dtype=torch.bool, device=device)
        return cls(memory, nothing.weight, nothing, nothing, resets)
