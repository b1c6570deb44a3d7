"""Linear layers by the faster of PyTorch's two libraries of products.

For float32 on a CPU PyTorch takes MKL. On AMD processors that have AVX-512 MKL does not use it, and oneDNN, which
PyTorch brings for other dtypes and for what its compiler fuses, takes half as long for the same numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.kernels import is_plain_float32
from gecko.processor import processor_field

_FEWEST_MULTIPLICATIONS = 2**20
"""With fewer, what oneDNN does before it multiplies takes longer than it saves."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, as ``F.linear``: x (…, inputs), weight (outputs, inputs), bias (outputs,)."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if x.numel() * len(weight) < _FEWEST_MULTIPLICATIONS or not _onednn_runs_on(*given):
        return F.linear(x, weight, bias)
    y: Tensor = (_OneDNNLinear.apply if torch.is_grad_enabled() else _onednn)(x, weight, bias)
    return y


def _onednn_runs_on(*given: Tensor) -> bool:
    return not torch.is_autocast_enabled("cpu") and is_plain_float32(*given) and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Whether MKL leaves registers of this processor unused that oneDNN takes."""
    there = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return there and processor_field("vendor_id") == "AuthenticAMD"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN does not look at its stride
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if ctx.needs_input_grad[0] else None)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else linear(grad, weight.t()),
            None if x is None else linear(rows.t(), x.reshape(-1, x.shape[-1]).t()),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )
