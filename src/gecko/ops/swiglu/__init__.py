"""SwiGLU, the gate of the feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gecko.ops.dtypes import check_shape
from gecko.ops.kernels import kernels_of, kernels_run_on, native_runs_on

_FEW = 2**17
"""Numbers whose passes, in the cache, cost less than the call of the C kernel."""


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b of two tensors of one shape and dtype.

    Raises:
        ValueError: the shapes differ.
    """
    check_shape("b", b, tuple(a.shape))
    if kernels_run_on(a):
        from gecko.ops.swiglu.triton import swiglu_kernels

        return swiglu_kernels(a, b)
    if a.numel() > _FEW and native_runs_on(a, b):
        return kernels_of("swiglu", "native").swiglu_native(a, b)
    return F.silu(a) * b
