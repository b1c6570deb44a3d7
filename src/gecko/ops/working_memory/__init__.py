"""Working memory: a matrix per head that stores the tokens that have left the attention window (paper Eq. 9–16)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import CPU_KERNEL_WIDTH, choose_backend, kernels_of
from gecko.ops.common import (
    check_segments,
    check_shape,
    common_chunk_offset,
    compute_dtype,
    full_precision,
    run_by_chunk_offset,
)
from gecko.ops.working_memory.chunked import working_memory_chunked, working_memory_step
from gecko.ops.working_memory.reference import working_memory_reference
from gecko.ops.working_memory.rules import RULES, ChunkSummary, empty_summary
from gecko.runtime.records import TensorRecord
from gecko.segments import Segments

__all__ = ["ChunkSummary", "WorkingMemoryState", "working_memory", "working_memory_reference"]


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
        cls, rule: Literal["adaptive", "linear"], batch: int, heads: int, key_dim: int, value_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> WorkingMemoryState:  # fmt: skip
        nothing = empty_summary(RULES[rule], (batch, heads), key_dim, value_dim, dtype, torch.device(device))
        memory = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=device)
        resets = torch.zeros(batch, dtype=torch.bool, device=device)
        return cls(memory, nothing.weight, nothing, nothing, resets)


def working_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    *,
    rule: Literal["adaptive", "linear"] = "adaptive",
    state: WorkingMemoryState | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, WorkingMemoryState]:
    """Read the memory for each query, and write each chunk into the memory when it leaves the attention window.

    Adaptive rule (paper Eq. 16): w is the sum of exp(k) over a chunk, z the sum over the document so far, ρ = w / z,
    φ the softmax of k over the time steps of the chunk, and ψ the softmax over features:
        M ← (1 − ρ) ⊙ M + ρ ⊙ Σ_j φ_j (v_j − ψ(k_j) M)ᵀ,   read: ψ(q)ᵀ M.
    Linear rule (Infini-attention, paper Eq. 9–11): ψ = elu + 1, and τ is the sum of ψ(k) over the document so far:
        M ← M + Σ_j ψ(k_j) (v_j − ψ(k_j) M / ψ(k_j) τ)ᵀ,   read: ψ(q)ᵀ M / ψ(q) τ.
    A query of chunk u reads the memory after chunk u − 2. It reads zero if chunk u − 2 ends in another document.
    If a chunk holds several documents, only the tokens of the last one enter.

    Args:
        q, k: (B, H, T, key_head_dim), without rotary embedding; v: (B, H, T, value_head_dim). Arithmetic is float32
            or wider.

    Returns:
        (B, H, T, value_head_dim) in the dtype of v, and the state after the last token.

    Raises:
        ValueError: the shapes are inconsistent.
    """
    batch, heads, length, key_dim = q.shape
    check_shape("k", k, (batch, heads, length, key_dim))
    check_shape("v", v, (batch, heads, length, v.shape[-1]))
    dtype = compute_dtype(q)
    if state is None:
        state = WorkingMemoryState.empty(rule, batch, heads, key_dim, v.shape[-1], dtype, q.device)
    _check_state(state, (batch, heads), key_dim, v.shape[-1])
    segments = segments or Segments.build(batch, length, device=q.device)
    check_segments(segments, batch, length)
    alone = segments.exchange is None
    on_gpu = choose_backend(v, triton=alone and length > 1, cpu=False) == "triton"
    inputs = (q, k, v) if on_gpu else (q.to(dtype), k.to(dtype), v.to(dtype))
    with full_precision(q):
        if length == 1:
            out, state = working_memory_step(RULES[rule], chunk_size, inputs, state, segments)
            return out.to(v.dtype), state
        form = working_memory_chunked
        if on_gpu:
            from gecko.ops.working_memory.triton import working_memory_triton

            form = working_memory_triton
        elif rule == "adaptive" and alone and _cpu_kernel_takes(inputs, state):
            form = kernels_of("working_memory", "cpu").working_memory_cpu
        one = partial(form, RULES[rule], chunk_size)
        if common_chunk_offset(segments, chunk_size) is None:
            out, state = run_by_chunk_offset(one, inputs, state, segments, chunk_size)
        else:
            out, state = one(inputs, state, segments)
    return out.to(v.dtype), state


def _check_state(state: WorkingMemoryState, lists: tuple[int, int], key_dim: int, value_dim: int) -> None:
    check_shape("state.memory", state.memory, (*lists, key_dim, value_dim))
    check_shape("state.normaliser", state.normaliser, (*lists, key_dim))
    check_shape("state.previous_resets", state.previous_resets, lists[:1])
    for name, part in (("previous", state.previous), ("current", state.current)):
        check_shape(f"state.{name}.weight", part.weight, (*lists, key_dim))
        check_shape(f"state.{name}.key_sum", part.key_sum, (*lists, key_dim, key_dim))
        check_shape(f"state.{name}.value_sum", part.value_sum, (*lists, key_dim, value_dim))


def _cpu_kernel_takes(inputs: tuple[Tensor, ...], state: WorkingMemoryState) -> bool:
    """Return whether the C kernels support these dtypes and sizes: features per head must fill whole registers."""
    floats = (x for x in state.tensors().values() if x.is_floating_point())
    fits = all(x.shape[-1] % CPU_KERNEL_WIDTH == 0 for x in inputs)
    return choose_backend(*inputs, *floats, triton=False, cpu=fits) == "cpu"
