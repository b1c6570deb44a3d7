"""SwiGLU, and the gated feed-forward that is added to its residual."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import packed_weights_run_on
from gecko.ops.backends.dispatch import choose_backend, kernels_of
from gecko.ops.common import check_shape
from gecko.ops.projections import projections

_FEW = 2**17
"""Numbers whose passes, in the cache, cost less than the call of the C kernel."""


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b of two tensors of one shape and dtype.

    Raises:
        ValueError: the shapes differ.
    """
    check_shape("b", b, tuple(a.shape))
    match choose_backend(a, b, cpu=a.numel() > _FEW):
        case "triton":
            from gecko.ops.feed_forward.triton import swiglu_triton

            return swiglu_triton(a, b)
        case "cpu":
            return kernels_of("feed_forward", "cpu").swiglu_cpu(a, b)
        case "eager":
            return F.silu(a) * b


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
    """onto + (silu(x gateᵀ) · x upᵀ) downᵀ.

    Args:
        x: (…, D), any float dtype; gate, up: (F, D); down: (D, F).
        onto: the shape of x.

    Returns:
        (…, D), in the dtype of a linear layer (under autocast its own, or that of x where kernels round by themselves),
        or of ``onto`` if it is wider.

    Raises:
        ValueError: the shapes do not fit.
    """
    hidden, features = len(gate), x.shape[-1]
    check_shape("gate", gate, (hidden, features))
    check_shape("up", up, (hidden, features))
    check_shape("down", down, (features, hidden))
    check_shape("onto", onto, tuple(x.shape))
    if packed_weights_run_on(x, (gate, up, down), (onto,)):
        y: Tensor = kernels_of("feed_forward", "cpu").feed_forward_cpu(x, gate, up, down, onto)
        return y
    (y,) = projections(swiglu(*projections(x, (gate, up), (None, None))), (down,), (None,), onto)
    return y
