"""SwiGLU, and the gated feed-forward with its residual."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu import packed_weights_run_on
from gecko.ops.backends.dispatch import choose_backend, kernels_of
from gecko.ops.common import check_shape
from gecko.ops.projections import projections

_FEW = 2**17
"""Up to this many numbers, PyTorch's operations stay in the cache and take less time than a call of the C kernel."""


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) · b for two tensors of one shape and dtype.

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
    """Compute onto + (silu(x gateᵀ) · x upᵀ) downᵀ.

    Args:
        x: (…, D), any float dtype; gate, up: (F, D); down: (D, F).
        onto: tensor of the shape of x.

    Returns:
        (…, D), in the dtype of a linear layer (see ``projections``), or of ``onto`` if it is wider.

    Raises:
        ValueError: the shapes are inconsistent.
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
