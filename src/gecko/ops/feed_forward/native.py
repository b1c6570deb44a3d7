"""The gated feed-forward by the C kernels: what is as wide as its hidden features stays in a core's cache, but for the
two projections that backward needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gecko.ops.kernels import products_are_rounded
from gecko.ops.native import call, refuse_second_derivatives


def feed_forward_native(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
    """Same contract as ``feed_forward``, for float32."""
    given = [t.contiguous() for t in (x, gate, up, down, onto)]
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    form: Callable[..., Tensor] = NativeFeedForward.apply if differentiated else _forward
    return form(products_are_rounded(), *given)


def _forward(
    rounded: bool, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor,
    kept: tuple[Tensor | None, ...] = (None, None),
) -> Tensor:  # fmt: skip
    hidden, inputs = gate.shape
    y = torch.empty_like(x)
    call("feed_forward_forward", x, gate, up, down, onto, *kept, y, int(rounded), x.numel() // inputs, inputs, hidden)
    return y


class NativeFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: bool, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
        ctx.rounded = rounded
        kept = tuple(x.new_empty(*x.shape[:-1], len(gate)) for _ in range(2))
        ctx.save_for_backward(x, gate, up, down, *kept)
        return _forward(rounded, x, gate, up, down, onto, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, gate, up, down, a, b = ctx.saved_tensors
        hidden, inputs = gate.shape
        trained = any(ctx.needs_input_grad[2:5])
        grads = [torch.empty_like(x), *(torch.empty_like(t) if trained else None for t in (gate, up, down))]
        grad = grad.contiguous()
        call(
            "feed_forward_backward", grad, x, gate, up, down, a, b, *grads, int(ctx.rounded), x.numel() // inputs,
            inputs, hidden,
        )  # fmt: skip
        return None, *grads, grad
