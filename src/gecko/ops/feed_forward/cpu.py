"""C kernels of SwiGLU and of the gated feed-forward.

SwiGLU takes one pass each for forward and backward, and saves only the two projections. The hidden features of the
feed-forward stay in a core's cache, except for the two projections that the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, refuse_second_derivatives, save, saved
from gecko.ops.backends.dispatch import products_are_rounded


def swiglu_cpu(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``swiglu`` in float32."""
    form = SwiGLUCPU.apply if torch.is_grad_enabled() else _swiglu_forward
    y: Tensor = form(a.contiguous(), b.contiguous())
    return y


def _swiglu_forward(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    call("swiglu_forward", a, b, y, a.numel())
    return y


class SwiGLUCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        save(ctx, a, b)
        return _swiglu_forward(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = saved(ctx)
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        call("swiglu_backward", grad.contiguous(), a, b, grad_a, grad_b, a.numel())
        return grad_a, grad_b


def feed_forward_cpu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
    """Compute ``feed_forward`` in float32."""
    given = [t.contiguous() for t in (x, gate, up, down, onto)]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    form: Callable[..., Tensor] = FeedForwardCPU.apply if differentiated else _feed_forward_forward
    return form(products_are_rounded(), *given)


def _feed_forward_forward(
    rounded: bool, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor,
    kept: tuple[Tensor | None, ...] = (None, None),
) -> Tensor:  # fmt: skip
    hidden, inputs = gate.shape
    y = torch.empty_like(x)
    call("feed_forward_forward", x, gate, up, down, onto, *kept, y, int(rounded), x.numel() // inputs, inputs, hidden)
    return y


class FeedForwardCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: bool, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
        ctx.rounded = rounded
        kept = tuple(x.new_empty(*x.shape[:-1], len(gate)) for _ in range(2))
        save(ctx, x, gate, up, down, *kept)
        return _feed_forward_forward(rounded, x, gate, up, down, onto, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, gate, up, down, a, b = saved(ctx)
        hidden, inputs = gate.shape
        trained = any(ctx.needs_input_grad[2:5])
        grads = [torch.empty_like(x), *(torch.empty_like(t) if trained else None for t in (gate, up, down))]
        grad = grad.contiguous()
        call(
            "feed_forward_backward", grad, x, gate, up, down, a, b, *grads, int(ctx.rounded), x.numel() // inputs,
            inputs, hidden,
        )  # fmt: skip
        return None, *grads, grad
