"""SwiGLU, the gate of the feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gecko.ops.dtypes import check_shape
from gecko.ops.kernels import kernels_run_on


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b of two tensors of one shape and dtype.

    Raises:
        ValueError: the shapes differ.
    """
    check_shape("b", b, tuple(a.shape))
    if kernels_run_on(a):
        from gecko.ops.swiglu.triton import swiglu_kernels

        return swiglu_kernels(a, b)
    return F.silu(a) * b
