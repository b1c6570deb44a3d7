"""Projections by C kernels, which add biases and residuals while a product is in registers.

Backward reads each output gradient once, and computes the gradients of input, weight and bias together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import call, refuse_second_derivatives, save, saved
from gecko.ops.backends.dispatch import products_are_rounded


def projections_cpu(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], onto: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute ``projections`` in float32."""
    layers = [t if t is None else t.contiguous() for t in (onto, *weights, *biases)]
    form = ProjectionsCPU.apply if torch.is_grad_enabled() else _forward
    outputs: tuple[Tensor, ...] = form(products_are_rounded(), x.contiguous(), *layers)
    return outputs


def _forward(rounded: bool, x: Tensor, onto: Tensor | None, *layers: Tensor | None) -> tuple[Tensor, ...]:
    weights, biases = _divided(layers)
    return tuple(
        _project(rounded, x, weight, bias, onto if i == len(weights) - 1 else None)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))
    )


def _divided(layers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a tuple with one entry per weight, then one per bias, into the two halves."""
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


def _project(rounded: bool, x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    outputs, inputs = weight.shape
    y = x.new_empty(*x.shape[:-1], outputs)
    call("projections_forward", x, weight, bias, onto, y, int(rounded), x.numel() // inputs, inputs, outputs)
    return y


class ProjectionsCPU(torch.autograd.Function):
    """Arguments after ``onto`` are all weights, then all biases. If ``rounded``, factors of products are bfloat16."""

    @staticmethod
    def forward(ctx: Any, rounded: bool, x: Tensor, onto: Tensor | None, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, _ = _divided(layers)
        trained = any(ctx.needs_input_grad[3 : 3 + len(weights)])
        save(ctx, x if trained else None, *weights)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.rounded = x.shape, rounded
        return _forward(rounded, x, onto, *layers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, *weights = saved(ctx)
        given = [None if grad is None else grad.contiguous() for grad in grads]
        _, needed, needs_onto, *layers = ctx.needs_input_grad
        grad_x = weights[0].new_empty(ctx.shape) if needed and any(grad is not None for grad in given) else None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        adds = False
        for grad, weight, *wanted in zip(given, weights, *_divided(tuple(layers)), strict=True):
            modes = ctx.rounded, adds, *wanted
            of_weight, of_bias = (None, None) if grad is None else _propagate(grad, x, weight, grad_x, *modes)
            adds = adds or grad is not None
            of_weights.append(of_weight)
            of_biases.append(of_bias)
        return None, grad_x, given[-1] if needs_onto else None, *of_weights, *of_biases


def _propagate(
    grad: Tensor, x: Tensor | None, weight: Tensor, grad_x: Tensor | None, rounded: bool, adds: bool,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of weight and bias. Write that of x to ``grad_x``, or add it if ``adds``."""
    outputs, inputs = weight.shape
    of_weight = torch.empty_like(weight) if needs_weight else None
    of_bias = weight.new_empty(outputs) if needs_bias else None
    call(
        "projections_backward", grad, x, weight, grad_x, of_weight, of_bias, int(adds), int(rounded),
        grad.numel() // outputs, inputs, outputs,
    )  # fmt: skip
    return of_weight, of_bias
