"""The gated feed-forward, added onto its residual."""

from __future__ import annotations

from torch import Tensor

from gecko.ops.dtypes import check_shape
from gecko.ops.kernels import kernels_of
from gecko.ops.panels import panels_run_on
from gecko.ops.projections import projections
from gecko.ops.swiglu import swiglu


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
    if panels_run_on(x, (gate, up, down), (onto,)):
        y: Tensor = kernels_of("feed_forward", "native").feed_forward_native(x, gate, up, down, onto)
        return y
    (y,) = projections(swiglu(*projections(x, (gate, up), (None, None))), (down,), (None,), onto)
    return y
