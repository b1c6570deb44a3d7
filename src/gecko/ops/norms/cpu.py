"""Group RMS norm and layer norm by C kernels. Forward reads x once; backward reads x and the gradient of y once.

Layer norm with a single group runs in PyTorch, whose kernel is as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.backends.cpu import call, save, saved

_STEPS, _PARTS = 16, 64
"""Minimum steps per part, and maximum number of parts. Each part sums the gradients of weight and bias separately. The
numbers are constant so that the sums do not depend on the number of threads."""


def group_norm_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, centered: bool
) -> Tensor:
    """Compute the RMS norm, or layer norm if ``centered``, over each group of the features of x (…, D), float32."""
    tensors = (t if t is None else t.contiguous() for t in (x, weight, bias))
    y: Tensor = GroupNormCPU.apply(*tensors, groups, float(eps), int(centered))
    return y


class GroupNormCPU(torch.autograd.Function):
    """Save x, and the rstd and (if centered) mean of every slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        weight, bias, groups, eps, ctx.centered = given
        y, features = torch.empty_like(x), x.shape[-1]
        steps = x.numel() // features
        kept = x.new_empty(1 + ctx.centered, steps, groups)
        call("norms_forward", x, weight, bias, y, kept, eps, ctx.centered, steps, groups, features // groups)
        save(ctx, x, weight, bias, kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept = saved(ctx)
        features, (steps, groups) = x.shape[-1], kept.shape[1:]
        parts = min(_PARTS, -(-steps // _STEPS))
        grad_x, affine = torch.empty_like(x), x.new_empty(2, parts, features)
        call(
            "norms_backward", x, weight, kept, grad.contiguous(), grad_x, *affine, ctx.centered, parts, steps, groups,
            features // groups,
        )  # fmt: skip
        grad_weight, grad_bias = affine.sum(1).unbind()
        return (
            grad_x, None if weight is None else grad_weight, None if bias is None else grad_bias, None, None, None
        )  # fmt: skip
