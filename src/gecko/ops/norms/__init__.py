"""Norms over the features of one step. Weights are offsets from 1, so a weight of 0 is the identity.

In C, forward reads x once, and backward reads x and the gradient of y once. Layer norm with a single group runs in
PyTorch there, whose kernel is as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, parts, save, saved
from gecko.ops.backends.dispatch import Backend, choose_backend
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import check_affine, check_shape, compute_dtype


def group_rms_norm(
    x: Tensor, weight: Tensor | None, groups: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute x / √(mean(x²) + ε) · (1 + weight), with the mean over each of ``groups`` equal slices of the features.

    Args:
        x: (…, D); weight: (D,) or None. Statistics are float32 or wider.
        dtype: dtype of the result; None: that of x.
    """
    dtype = x.dtype if dtype is None else dtype
    match _backend(x, weight, None, groups, dtype):
        case "triton":
            from gecko.ops.norms.triton import group_norm

            return group_norm(x, weight, None, groups, eps, False, dtype)
        case "cpu":
            return GroupNormCPU.run(x, weight, None, groups, float(eps), 0)
    wide = x.to(compute_dtype(x)).unflatten(-1, (groups, -1))
    y = (_RMSNormalise.apply(wide, eps) if torch.is_grad_enabled() else rms_normalise(wide, eps)[0]).flatten(-2)
    return (y if weight is None else y * (1 + weight.to(wide.dtype))).to(dtype)


def rms_normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / √(mean(x²) + ε) over the last dimension, and the factor 1 / √(mean(x²) + ε)."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    rstd = torch.rsqrt(square + eps)
    return x * rstd, rstd


def rms_normalise_grad(grad: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of x, given the gradient of y = x · rstd."""
    along = (grad * y).mean(-1, keepdim=True)
    return torch.addcmul(grad, y, along, value=-1).mul_(rstd)


class _RMSNormalise(FirstOrder):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, rstd = rms_normalise(x, eps)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rms_normalise_grad(grad, *ctx.saved_tensors), None


def group_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute (x − mean) / √(var + ε) · (1 + weight) + bias, with mean and biased variance over each group of features.

    Args:
        x: (…, D); weight, bias: (D,), or both None. Statistics are float32 or wider.
        dtype: dtype of the result; None: that of x.

    Raises:
        ValueError: only one of weight and bias is given, or one has another shape.
    """
    check_affine(weight, bias, x.shape[-1])
    dtype = x.dtype if dtype is None else dtype
    match _backend(x, weight, bias, groups, dtype, cpu=groups > 1):
        case "triton":
            from gecko.ops.norms.triton import group_norm

            return group_norm(x, weight, bias, groups, eps, True, dtype)
        case "cpu":
            return GroupNormCPU.run(x, weight, bias, groups, float(eps), 1)
    wide = x.to(compute_dtype(x))
    scale = None if weight is None else 1 + weight.to(wide.dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    if groups == 1:
        return F.layer_norm(wide, (x.shape[-1],), scale, bias, eps).to(dtype)
    y = F.layer_norm(wide.unflatten(-1, (groups, -1)), (x.shape[-1] // groups,), eps=eps).flatten(-2)
    return (y if scale is None or bias is None else torch.addcmul(bias, y, scale)).to(dtype)


def norm_adds(*terms: Tensor) -> bool:
    """Return whether ``norm_of_sum`` adds these terms in the pass that normalises their sum."""
    same = all(term.device == terms[0].device for term in terms)
    return same and all(choose_backend(term, cpu=False) == "triton" for term in terms)


def norm_of_sum(
    terms: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, centered: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``group_layer_norm`` or, unless ``centered``, ``group_rms_norm`` of the sum of ``terms``, and the sum.

    Args:
        terms: (…, D) each, of one shape. The sum has the widest of their dtypes.
        dtype: dtype of the norm; None: that of the sum.

    Raises:
        ValueError: the shapes are inconsistent, or ``groups`` does not divide D.
    """
    for term in terms[1:]:
        check_shape("every term", term, tuple(terms[0].shape))
    check_affine(weight, bias if centered else weight, terms[0].shape[-1])
    surplus = max(1, len(terms) - 2)  # the kernel adds two branches
    x, branches = reduce(add, terms[:surplus]), terms[surplus:]
    if branches and norm_adds(x, *branches) and _backend(x, weight, None, groups, x.dtype, cpu=False) == "triton":
        from gecko.ops.norms.triton import group_norm_of_sum

        return group_norm_of_sum(x, branches, weight, bias if centered else None, groups, eps, centered, dtype)
    x = reduce(add, branches, x)
    if centered:
        return group_layer_norm(x, weight, bias, groups, eps, dtype), x
    return group_rms_norm(x, weight, groups, eps, dtype), x


class GroupNormCPU(CFunction):
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept = saved(ctx)
        features, (steps, groups) = x.shape[-1], kept.shape[1:]
        grad_x, affine = torch.empty_like(x), x.new_empty(2, parts(steps, 16), features)
        sizes = affine.shape[1], steps, groups, features // groups
        call("norms_backward", x, weight, kept, grad, grad_x, *affine, ctx.centered, *sizes)
        by_weight, by_bias = affine.sum(1).unbind()
        return grad_x, None if weight is None else by_weight, None if bias is None else by_bias, None, None, None


def _backend(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, dtype: torch.dtype, cpu: bool = True
) -> Backend:
    fits = x.shape[-1] % groups == 0 and all(t is None or t.shape == x.shape[-1:] for t in (weight, bias))
    return choose_backend(x, weight, bias, triton=fits, cpu=cpu and fits and dtype == torch.float32)
