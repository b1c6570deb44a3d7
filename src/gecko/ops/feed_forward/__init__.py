"""SwiGLU, and the gated feed-forward with its residual.

In C, SwiGLU takes one pass each for forward and backward, and saves only the two projections. The hidden features of
the feed-forward stay in a core's cache, except for the two projections that the backward pass needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, packed_weights_run_on, save, saved
from gecko.ops.backends.dispatch import choose_backend, products_are_rounded
from gecko.ops.common import check_shape
from gecko.ops.projections import projections

_FEW = 2**17
"""Up to this many numbers, PyTorch's operations stay in the cache and take less time than a call of the C kernel."""


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) · b for two tensors of one shape and dtype.

    Raises:
        ValueError: the shapes differ.
    """
    check_shape("b", b, tuple(a.shape))
    match choose_backend(a, b, cpu=a.numel() > _FEW):
        case "triton":
            from gecko.ops.feed_forward.triton import swiglu_triton

            return swiglu_triton(a, b)
        case "cpu":
            return SwiGLUCPU.run(a, b)
        case "eager":
            return F.silu(a) * b


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
    """Compute onto + (silu(x gateᵀ) · x upᵀ) downᵀ.

    Args:
        x: (…, D), any float dtype; gate, up: (F, D); down: (D, F).
        onto: tensor of the shape of x.

    Returns:
        (…, D), in the dtype of a linear layer (see ``projections``), or of ``onto`` if it is wider.
    """
    hidden, features = len(gate), x.shape[-1]
    check_shape("gate", gate, (hidden, features))
    check_shape("up", up, (hidden, features))
    check_shape("down", down, (features, hidden))
    check_shape("onto", onto, tuple(x.shape))
    if packed_weights_run_on(x, (gate, up, down), (onto,)):
        return FeedForwardCPU.run(products_are_rounded(), x, gate, up, down, onto)
    (y,) = projections(swiglu(*projections(x, (gate, up), (None, None))), (down,), (None,), onto)
    return y


class SwiGLUCPU(CFunction):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        save(ctx, a, b)
        y = torch.empty_like(a)
        call("swiglu_forward", a, b, y, a.numel())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = saved(ctx)
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        call("swiglu_backward", grad, a, b, grad_a, grad_b, a.numel())
        return grad_a, grad_b


class FeedForwardCPU(CFunction):
    @staticmethod
    def forward(ctx: Any, rounded: bool, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
        ctx.rounded, (hidden, inputs), y = rounded, gate.shape, torch.empty_like(x)
        kept = [x.new_empty(*x.shape[:-1], hidden) if any(ctx.needs_input_grad) else None for _ in range(2)]
        save(ctx, x, gate, up, down, *kept)
        sizes = int(rounded), x.numel() // inputs, inputs, hidden
        call("feed_forward_forward", x, gate, up, down, onto, *kept, y, *sizes)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, a, b = saved(ctx)
        hidden, inputs = gate.shape
        trained = any(ctx.needs_input_grad[2:5])
        grads = [torch.empty_like(x), *(torch.empty_like(t) if trained else None for t in (gate, up, down))]
        sizes = int(ctx.rounded), x.numel() // inputs, inputs, hidden
        call("feed_forward_backward", grad, x, gate, up, down, a, b, *grads, *sizes)
        return None, *grads, grad
