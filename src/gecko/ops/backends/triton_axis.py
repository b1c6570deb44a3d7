"""Device functions that take one index of the first axis of a tile, for kernels that go through an axis step by step.

Triton has no indexing of tiles. Where a thread holds the whole axis and the index is constant, these take no
instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _is_step(b_x, i):
    """Return where the first axis of b_x is at ``i``, with as many axes."""
    i_step = tl.arange(0, b_x.shape[0])
    for _ in tl.static_range(len(b_x.shape) - 1):
        i_step = tl.expand_dims(i_step, len(i_step.shape))
    return i_step == i


@triton.jit
def at_step(b_x, i):
    """Return b_x at ``i`` of its first axis. A sum of bits, as the compiler removes additions of the integer 0."""
    b_bits = tl.where(_is_step(b_x, i), b_x.to(tl.int32, bitcast=True), 0)
    return tl.sum(b_bits, 0).to(tl.float32, bitcast=True)
