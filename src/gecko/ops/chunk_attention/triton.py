"""Triton backend of chunk attention: place the call on a grid of chunks, attend on the grid, and compute the state.

Rows may have different chunk offsets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import custom_op
from gecko.ops.chunk_attention.chunked import Attended, AttentionState, Pattern
from gecko.ops.chunk_attention.triton_layout import Laid, lay, rotary_table, row_dot
from gecko.ops.chunk_attention.triton_narrow import WIDEST, narrow_backward, narrow_forward
from gecko.ops.chunk_attention.triton_wide import wide_backward, wide_forward
from gecko.ops.common import compute_dtype
from gecko.runtime.tensors import to_device
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@dataclass(frozen=True)
class AttentionLayout:
    """Positions of the tokens of a call on a grid with n chunks of queries and n + ``before`` chunks of keys."""

    chunks: int
    before: int
    """1 if windows reach into the chunk before the first chunk of the call, else 0."""
    reads: bool
    """Whether a query may see tokens of the state."""
    phases: list[int]
    """Chunk offset of each batch row."""
    offset: Tensor
    """(B,) int64: place of the first token in the grid of keys."""
    shift: Tensor
    """(B,) int64: slot in the ring minus place in the grid of keys, modulo 2c."""
    ring_offset: Tensor
    """(B,) int64: slot of the first token in the ring."""
    first: Tensor
    """(B, n · c) int32: the first key that each query sees."""

    @classmethod
    def build(cls, pattern: Pattern, segments: Segments) -> AttentionLayout:
        chunk, position, length = pattern.chunk_size, segments.clock.position, segments.length
        phase = position % chunk
        chunks = -(-(max(phase.tolist()) + length) // chunk)
        reads = bool((segments.document_starts[:, 0] < position).numpy().any())
        before = int(reads and pattern.lookback)
        offset = phase + before * chunk
        # The first key that each query sees. In places without a token, a query sees only itself.
        own = torch.arange(chunks * chunk, device="cpu") + offset[:, None] // chunk * chunk
        token, place = own - offset[:, None], own % chunk
        start = segments.document_starts.gather(1, token.clamp(0, length - 1)) - position[:, None] + offset[:, None]
        window = own - pattern.last_slot(place) + pattern.first_slot(place)
        first = torch.maximum(start, window).clamp(min=0)
        first = torch.where((token >= 0) & (token < length), first, own).to(torch.int32)
        on_device = (offset, (position - offset) % (2 * chunk), position % (2 * chunk), first)
        return cls(chunks, before, reads, phase.tolist(), *(to_device(x, segments.device) for x in on_device))

    @property
    def common_chunk_offset(self) -> int | None:
        return self.phases[0] if len(set(self.phases)) == 1 else None

    def taken(self, out: Tensor, length: int) -> Tensor:
        """Return the tokens of the call, (B, H, T, d), from the grid (B, H, n · c, d)."""
        if self.common_chunk_offset is not None:
            return out[:, :, self.common_chunk_offset : self.common_chunk_offset + length]
        return torch.stack([row[:, p : p + length] for row, p in zip(out.unbind(0), self.phases, strict=True)])


def chunk_attention_triton(
    pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> Attended:
    """Attend to the window with several tokens per row and a key for each head. Products are in the dtype of v, softmax
    in float32."""
    q, k, v = inputs
    chunk, dtype = pattern.chunk_size, v.dtype
    layout = segments.shared(("layout", pattern), partial(AttentionLayout.build, pattern))
    table, turned = None, pattern.turned(q.shape[1])
    if turned:
        key = ("turns", pattern, q.shape[-1])
        table = segments.once(key, lambda: rotary_table(chunk, pattern.frequencies(q.shape[-1]), q.device))
    skipped, rows = layout.before * chunk, (layout.chunks + layout.before) * chunk
    turn, back = (chunk, turned), bool(pattern.lookback)
    ring_keys, ring_values = (state.keys, state.values) if layout.reads else (None, None)
    keys, near, *far = lay(
        k, q, ring_keys, table, layout.offset, layout.shift, rows, False, *turn, skipped, back, dtype
    )
    values = v.contiguous()
    if layout.reads or layout.common_chunk_offset != 0 or v.shape[2] != rows:
        (values,) = lay(v, None, ring_values, None, layout.offset, layout.shift, rows, False, chunk, 0, 0, False, dtype)
    given = (None if x is None else x.flatten(0, 1) for x in (near, far[0] if back else None, keys, values))
    out, log_sums = attend_grid(*given, layout.first, q.shape[1], chunk)
    if segments.keeps_state:
        state = AttentionState(*(
            lay(x, None, ring, turns, layout.ring_offset, layout.shift, 2 * chunk, True, *turn, 0, False, to)[0]
            for x, ring, turns, to in ((k, state.keys, table, compute_dtype(k)), (v, state.values, None, dtype))
        ))  # fmt: skip
    out, log_sums = (layout.taken(x.unflatten(0, q.shape[:2]), q.shape[2]) for x in (out, log_sums.unsqueeze(-1)))
    return out, log_sums.squeeze(-1) * math.log(2) if pattern.sinks else None, state


def _is_narrow(v: Tensor) -> bool:
    """Return whether the fused kernels are used. 32-bit tiles need three products each and do not fit in registers."""
    return v.itemsize == 2 and v.shape[2] <= WIDEST


@custom_op("attend_grid_backward")
def attend_grid_backward(
    grad: Tensor, grad_log_sum: Tensor | None, near: Tensor, far: Tensor | None, k: Tensor, v: Tensor, first: Tensor,
    out: Tensor, log_sum: Tensor, heads: int, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of near, far, k and v; that of far is empty if there is no far."""
    form, grad = narrow_backward if _is_narrow(v) else wide_backward, grad.contiguous()
    dot = row_dot(grad, out)
    if grad_log_sum is not None:
        dot = dot - grad_log_sum / math.log(2)
    laid = Laid(near, far, k, v, first, heads, chunk_size)
    grad_near, grad_far, grad_k, grad_v = form(laid, grad, dot, log_sum)
    return grad_near, near.new_empty(0) if grad_far is None else grad_far, grad_k, grad_v


def _saved(inputs, output):
    return *inputs[:5], *output, *inputs[5:]


@custom_op("attend_grid", attend_grid_backward, of=range(4), saves=_saved, zeros=False)
def attend_grid(
    near: Tensor, far: Tensor | None, k: Tensor, v: Tensor, first: Tensor, heads: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Attend on the grid of chunks that ``triton_layout`` describes.

    Returns:
        (R, n · c, value width) in the dtype of v, and log₂ Σ exp(score), (R, n · c) float32.
    """
    form = narrow_forward if _is_narrow(v) else wide_forward
    return form(Laid(near, far, k, v, first, heads, chunk_size))
