"""Projections on a GPU, with hand-written gradients.

Under autocast, input, weights and biases are converted by one launch. Backward adds up the gradients of the input
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
    dtype = linear_dtype(x) if torch.is_autocast_enabled(x.device.type) else None
    outputs: tuple[Tensor, ...] = ProjectionsGPU.apply(dtype, x, *weights, *biases)
    return outputs


class ProjectionsGPU(torch.autograd.Function):
    """``dtype`` is that of autocast; without it tensors are taken as they are. Arguments after x are all weights, then
    all biases."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        count = len(layers) // 2
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, *(None if t is None else t.dtype for t in layers))
        with full_precision(x):
            x, *cast = _converted((x, *layers), dtype)
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
        refuse_second_derivatives("projections on a GPU")
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


def _converted(tensors: Sequence[Tensor | None], dtype: torch.dtype | None) -> list[Any]:
    """Return ``tensors`` in ``dtype``, converted together."""
    others = [t for t in tensors if t is not None and dtype not in (None, t.dtype)]
    made = [torch.empty_like(t, dtype=dtype) for t in others]
    if made:
        torch._foreach_copy_(made, others)
    found = iter(made)
    return [next(found) if t is not None and dtype not in (None, t.dtype) else t for t in tensors]
