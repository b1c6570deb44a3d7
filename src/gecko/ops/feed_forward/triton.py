"""Triton backend of SwiGLU: 3 passes forward and 5 backward. Only the two projections are saved.

As separate operations, silu and the product take 5 and 8 passes and save silu(a) too. ``torch.compile`` has the same
kernel; this one needs no compilation at the first step, and is one operator for activation checkpointing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op
from gecko.ops.common import empty_contiguous

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


BLOCK = 2048
"""Numbers per program."""


@custom_op("swiglu_backward")
def _backward(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    grad_a, grad_b = map(empty_contiguous, (a, b))
    Launch(_gradients, (blocks(a.numel(), BLOCK),), {
        "p_grad": grad.contiguous(), "p_a": a.contiguous(), "p_b": b.contiguous(), "p_grad_a": grad_a,
        "p_grad_b": grad_b, "total": a.numel(), "block": BLOCK,
    }, 4).run()  # fmt: skip
    return grad_a, grad_b


@custom_op("swiglu", _backward, of=[0, 1])
def swiglu_triton(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``swiglu`` for the dtypes of the kernels."""
    y, total = empty_contiguous(a), a.numel()
    tensors = {"p_a": a.contiguous(), "p_b": b.contiguous(), "p_y": y}
    Launch(_product, (blocks(total, BLOCK),), {**tensors, "total": total, "block": BLOCK}, 4).run()
    return y


@triton.jit
def _product(p_a, p_b, p_y, total, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    b_a = tl.load(p_a + i, mask=i < total, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i, mask=i < total, other=0.0).to(tl.float32)
    tl.store(p_y + i, (b_a * tl.sigmoid(b_a) * b_b).to(p_y.dtype.element_ty), mask=i < total)


@triton.jit
def _gradients(p_grad, p_a, p_b, p_grad_a, p_grad_b, total, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    b_grad = tl.load(p_grad + i, mask=i < total, other=0.0).to(tl.float32)
    b_a = tl.load(p_a + i, mask=i < total, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + i, mask=i < total, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_a)
    b_grad_a = b_grad * b_b * b_sigmoid * (1 + b_a * (1 - b_sigmoid))
    tl.store(p_grad_a + i, b_grad_a.to(p_grad_a.dtype.element_ty), mask=i < total)
    tl.store(p_grad_b + i, (b_grad * b_a * b_sigmoid).to(p_grad_b.dtype.element_ty), mask=i < total)
