"""Linear layers that share one input. A residual can be added to the last output.

The C kernels add biases and residuals while a product is in registers, and compute the gradients of input, weight and
bias together. On a GPU under autocast, one launch converts everything; backward adds up the gradients of the input
inside the products, and sums those of weights and biases in the dtype of the parameters, not rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, linear, packed_weights_run_on, save, saved
from gecko.ops.backends.dispatch import gpu_functions_run_on, products_are_rounded
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import check_shape, float32_product, from_linear, full_precision, linear_dtype


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], onto: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Compute x W_iᵀ + b_i for each layer i, and add ``onto`` to the last one.

    Args:
        x: (…, inputs), any float dtype; weights: (outputs_i, inputs) each; biases: (outputs_i,) each, or None.
        onto: tensor of the shape of the last output.

    Returns:
        (…, outputs_i) each, in the dtype of a linear layer: that of autocast, or that of x if C kernels round operands
        themselves. The last output has the dtype of ``onto`` if that is wider.
    """
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_shape(f"weights[{i}]", weight, (len(weight), x.shape[-1]))
        check_shape(f"biases[{i}]", bias, (len(weight),))
    check_shape("onto", onto, (*x.shape[:-1], len(weights[-1])))
    if packed_weights_run_on(x, weights, (*biases, onto)):
        return ProjectionsCPU.run(products_are_rounded(), x, onto, *weights, *biases)
    if gpu_functions_run_on(x, *weights, *biases):
        dtype = linear_dtype(x) if torch.is_autocast_enabled(x.device.type) else None
        several = list(ProjectionsGPU.apply(dtype, x, *weights, *biases))
    else:
        several = [from_linear(linear(x, *layer), x) for layer in zip(weights, biases, strict=True)]
    if onto is not None:
        several[-1] = onto + several[-1]
    return tuple(several)


def _divided(layers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a tuple with one entry per weight, then one per bias, into the two halves."""
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


class ProjectionsCPU(CFunction):
    """Arguments after ``onto`` are all weights, then all biases. If ``rounded``, factors of products are bfloat16."""

    @staticmethod
    def forward(ctx: Any, rounded: bool, x: Tensor, onto: Tensor | None, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = _divided(layers)
        trained = any(ctx.needs_input_grad[3 : 3 + len(weights)])
        save(ctx, x if trained else None, *weights)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.rounded, inputs = x.shape, rounded, x.shape[-1]
        outputs = tuple(x.new_empty(*x.shape[:-1], len(weight)) for weight in weights)
        for y, weight, bias in zip(outputs, weights, biases, strict=True):
            sizes = int(rounded), x.numel() // inputs, inputs, len(weight)
            call("projections_forward", x, weight, bias, onto if y is outputs[-1] else None, y, *sizes)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = saved(ctx)
        _, needed, needs_onto, *layers = ctx.needs_input_grad
        grad_x = weights[0].new_empty(ctx.shape) if needed and any(grad is not None for grad in grads) else None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        adds = False
        for grad, weight, needs_weight, needs_bias in zip(grads, weights, *_divided(tuple(layers)), strict=True):
            outputs, inputs = weight.shape
            of_weights.append(torch.empty_like(weight) if needs_weight and grad is not None else None)
            of_biases.append(weight.new_empty(outputs) if needs_bias and grad is not None else None)
            if grad is not None:  # the first one writes grad_x, the others add to it
                sizes = int(adds), int(ctx.rounded), grad.numel() // outputs, inputs, outputs
                call("projections_backward", grad, x, weight, grad_x, of_weights[-1], of_biases[-1], *sizes)
                adds = True
        return None, grad_x, grads[-1] if needs_onto else None, *of_weights, *of_biases


class ProjectionsGPU(FirstOrder):
    """``dtype`` is that of autocast; without it tensors are taken as they are. Arguments after x are all weights, then
    all biases."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        count = len(layers) // 2
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, *(None if t is None else t.dtype for t in layers))
        with full_precision(x):
            given = x, *layers  # those of other dtypes are converted together
            others = [t for t in given if t is not None and dtype not in (None, t.dtype)]
            made = [torch.empty_like(t, dtype=dtype) for t in others]
            if made:
                torch._foreach_copy_(made, others)
            found = iter(made)
            cast: list[Any] = [next(found) if t is not None and dtype not in (None, t.dtype) else t for t in given]
            x, *cast = cast
            _, needs_x, *needed = ctx.needs_input_grad
            kept = cast[:count] if needs_x else [None] * count
            ctx.save_for_backward(x if any(needed[:count]) else None, *kept)
            ctx.set_materialize_grads(False)
            steps, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
            outputs = (F.linear(steps, *layer) for layer in zip(cast[:count], cast[count:], strict=True))
            # A view could not be written to, as it would be made inside of the function.
            return tuple(torch.ops.aten._unsafe_view(y, (*shape, y.shape[-1])) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dtype_x, *dtypes = ctx.dtypes
        count, needed = len(weights), ctx.needs_input_grad[2:]
        grad_x: Tensor | None = None
        of_layers: list[Tensor | None] = [None] * (2 * count)
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if grad is None:
                continue
            steps = grad.reshape(-1, grad.shape[-1])
            with full_precision(grad):
                if weight is not None:
                    grad_x = torch.mm(steps, weight) if grad_x is None else grad_x.addmm_(steps, weight)
                if needed[i]:
                    of_layers[i] = _product(steps.t(), x.reshape(-1, x.shape[-1]), dtypes[i])
                if needed[count + i]:
                    of_layers[count + i] = steps.sum(0, dtype=dtypes[count + i])
        return None, None if grad_x is None else grad_x.view(ctx.shape).to(dtype_x), *of_layers


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return float32_product(a, b) if dtype == torch.float32 else torch.mm(a, b).to(dtype)
