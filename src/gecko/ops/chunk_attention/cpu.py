"""Chunk attention by C kernels, which store no windows, masks or scores of a whole call in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, save, saved
from gecko.ops.backends.dispatch import CPU_KERNEL_WIDTH
from gecko.ops.chunk_attention.chunked import Attended, AttentionState, Pattern, in_order, ring_after
from gecko.ops.common import common_chunk_offset
from gecko.ops.rotary import rotate
from gecko.segments import Segments

_SPAN = 512
"""Tokens per task if a chunk is shorter than that; else a task is one chunk."""


def takes(inputs: tuple[Tensor, ...], pattern: Pattern, ring_start: int | None) -> bool:
    """Return whether the kernels support these sizes. A call with gradients must start at the first slot of a chunk."""
    q, _, v = inputs
    if ring_start is None or (ring_start % pattern.chunk_size and torch.is_grad_enabled()):
        return False
    return q.shape[-1] % CPU_KERNEL_WIDTH == 0 and v.shape[-1] % CPU_KERNEL_WIDTH == 0


def chunk_attention_cpu(
    pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments, rounded: bool
) -> Attended:
    """Compute ``chunk_attention_chunked``. If ``rounded``, products with values have factors in bfloat16."""
    q, k, v = inputs
    size, length = 2 * pattern.chunk_size, q.shape[2]
    ring_start = common_chunk_offset(segments, size)
    assert ring_start is not None, "rows must agree on their phase"
    phase = ring_start % pattern.chunk_size
    keys, values = (in_order(x, ring_start, size).float() for x in (state.keys, state.values))
    before = (x[:, :, pattern.chunk_size - phase : size - phase] for x in (keys, values))
    given_k, given_v = (
        torch.cat([old[:, :, size - phase :], new], 2) if phase else new for old, new in ((keys, k), (values, v))
    )
    turns = segments.once(("turns", pattern, q.shape[-1]), lambda: _turns(pattern, q))
    first = segments.shared(("first", pattern), partial(_first, pattern))
    rounded = rounded and pattern.chunk_size % 2 == 0 and v.shape[-1] % (2 * CPU_KERNEL_WIDTH) == 0
    out, log_sums = ChunkAttentionCPU.run(pattern, rounded, q, given_k, given_v, *before, turns, first)
    if segments.ends is not None:
        rows = _rings_of_rows(pattern, (k, v), (keys, values), segments.ends, ring_start)
        return out, log_sums, AttentionState(*rows)

    kept = slice(max(0, length - size), length)
    place = torch.arange(phase + kept.start, phase + length, device="cpu") % pattern.chunk_size
    phases = segments.once(("recent", pattern, q.shape[-1]), lambda: pattern.phases(k, place))
    turned, end = rotate(k[:, :, kept], phases, pattern.turned(k.shape[1])), ring_start + length
    ring_keys, ring_values = ring_after(keys, turned, end, size), ring_after(values, v[:, :, kept], end, size)
    return out, log_sums, AttentionState(ring_keys, ring_values)


def _rings_of_rows(
    pattern: Pattern, new: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor], ends: Tensor, ring_start: int
) -> tuple[Tensor, Tensor]:
    """Return the rings of keys and values of a padded call, from those before it in order of time."""
    k, v = new
    size = 2 * pattern.chunk_size
    place = (ring_start + torch.arange(k.shape[2], device="cpu")) % pattern.chunk_size
    turned = rotate(k, pattern.phases(k, place), pattern.turned(k.shape[1]))
    # Place of slot s in the last ``size`` tokens of a row, of the ring before the call and its own.
    places = ends.unsqueeze(1) + (torch.arange(size, device="cpu") - ring_start - ends.unsqueeze(1)) % size

    def ring(old: Tensor, added: Tensor) -> Tensor:
        both = torch.cat([old, added], dim=2)
        return both.gather(2, places.view(len(places), 1, size, 1).expand(*both.shape[:2], size, both.shape[3]))

    return ring(before[0], turned), ring(before[1], v)


def _turns(pattern: Pattern, x: Tensor) -> Tensor:
    """Return cosines and sines of the rotations by 0 … c − 1 and −c, (c + 1, 2, d). A number becomes its product with
    the cosine plus the product of the other number of its pair with the sine, whose sign is included."""
    positions = torch.tensor([*range(pattern.chunk_size), -pattern.chunk_size], device="cpu")
    phases = pattern.phases(x, positions)
    sines = torch.stack([-phases.imag, phases.imag], dim=-1).flatten(-2)
    return torch.stack([phases.real.repeat_interleave(2, dim=-1), sines], dim=1).contiguous()


def _first(pattern: Pattern, segments: Segments) -> Tensor:
    """Return the first slot that each query sees in the window of the previous and its own chunk, (B, T) int32."""
    position = segments.clock.position.unsqueeze(1) + torch.arange(segments.length, device="cpu")
    first = torch.maximum(segments.document_starts, pattern.first_position(position))
    window = (position // pattern.chunk_size - 1) * pattern.chunk_size
    return (first - window).to(torch.int32).contiguous()


class ChunkAttentionCPU(CFunction):
    """Attention of q, k, v and the keys and values of the chunk before the call; see cpu.c.

    Returns the output and log Σ exp(score), (B, H, T), which backward and sinks need.
    """

    @staticmethod
    def forward(ctx: Any, pattern: Pattern, rounded: bool, *given: Tensor) -> tuple[Tensor, Tensor | None]:
        q, _, v = given[:3]
        log_sums = q.new_empty(q.shape[:3]) if pattern.sinks or any(ctx.needs_input_grad) else None
        ctx.pattern, ctx.rounded = pattern, rounded
        ctx.set_materialize_grads(False)
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        call("chunk_attention_forward", *given, out, log_sums, *_sizes(q, v, pattern), int(rounded))
        save(ctx, *given, log_sums)
        return out, log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, turns, first, log_sums = saved(ctx)
        q, k, v, k_before, v_before = inputs
        grad = q.new_zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
        sizes = _sizes(q, v, ctx.pattern)
        ranges = -(-q.shape[2] // (ctx.pattern.chunk_size * sizes[-1]))
        # Each head of queries has gradients of keys and values; those of shared heads are added.
        shared = [x.new_empty(*q.shape[:2], *x.shape[2:]) for x in (k, v)]
        borders = [x.new_empty(*q.shape[:2], ranges, *x.shape[2:]) for x in (k_before, v_before)]
        grad_q = torch.empty_like(q)
        call(
            "chunk_attention_backward", *inputs, turns, first, log_sums, grad, grad_log_sums, grad_q, *shared, *borders,
            *sizes, int(ctx.rounded),
        )  # fmt: skip
        heads = k.shape[1]
        own = (_over_shared(x, heads) for x in shared)
        return None, None, grad_q, *own, *(_over_shared(x[:, :, 0], heads) for x in borders), None, None


def _over_shared(grad: Tensor, heads: int) -> Tensor:
    """Return the sum of the gradients (B, H, …) of the query heads that share each of ``heads`` heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _sizes(q: Tensor, v: Tensor, pattern: Pattern) -> tuple[int, ...]:
    """Return lists, heads, query heads per key head, rotated heads, keys with those of earlier calls in the first
    chunk, how many these are, chunk size, key and value widths, and chunks per task."""
    batch, heads, asked, key = q.shape
    (_, key_heads, length, value), chunk = v.shape, pattern.chunk_size
    ranks = batch * heads, heads, heads // key_heads, pattern.turned(heads)
    return *ranks, length, length - asked, chunk, key, value, max(1, _SPAN // chunk)
