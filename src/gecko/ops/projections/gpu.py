"""Projections on a GPU, with hand-written gradients.

Weights and biases are converted to the dtype of the products by one launch. Backward adds up the gradients of the input
inside the products, and sums those of weights and biases in the dtype of the parameters: no launch adds or converts
them, and they are not rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import refuse_second_derivatives
from gecko.ops.common import float32_product, full_precision, linear_dtype


def projections_gpu(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Compute ``projections`` without a residual in the dtype of a linear layer."""
    outputs: tuple[Tensor, ...] = ProjectionsGPU.apply(linear_dtype(x), x, *weights, *biases)
    return outputs


class ProjectionsGPU(torch.autograd.Function):
    """Arguments after x are all weights, then all biases."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        ctx.dtypes = x.dtype, *(None if t is None else t.dtype for t in layers)
        with full_precision(x):
            x, *cast = _converted((x, *layers), dtype)
            weights, biases = cast[: len(cast) // 2], cast[len(cast) // 2 :]
            ctx.save_for_backward(x, *weights)
            ctx.set_materialize_grads(False)
            return tuple(F.linear(x, *layer) for layer in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("projections on a GPU")
        x, *weights = ctx.saved_tensors
        _, needs_x, *needed = ctx.needs_input_grad
        dtype_x, *dtypes = ctx.dtypes
        count, rows = len(weights), x.flatten(0, -2)
        grad_x: Tensor | None = None
        of_layers: list[Tensor | None] = [None] * (2 * count)
        with full_precision(x):
            for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
                if grad is None:
                    continue
                steps = grad.flatten(0, -2)
                if needs_x:
                    grad_x = torch.mm(steps, weight) if grad_x is None else grad_x.addmm_(steps, weight)
                if needed[i]:
                    of_layers[i] = _weight_gradient(steps, rows, dtypes[i])
                if needed[count + i]:
                    of_layers[count + i] = steps.sum(0, dtype=dtypes[count + i])
        return None, None if grad_x is None else grad_x.view(x.shape).to(dtype_x), *of_layers


def _weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return float32_product(grad.t(), x)
    return torch.mm(grad.t(), x).to(dtype)


def _converted(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> list[Any]:
    """Return ``tensors`` in ``dtype``, converted together."""
    others = [x for x in tensors if x is not None and x.dtype != dtype]
    made = [torch.empty_like(x, dtype=dtype) for x in others]
    if made:
        torch._foreach_copy_(made, others)
    found = iter(made)
    return [x if x is None or x.dtype == dtype else next(found) for x in tensors]
