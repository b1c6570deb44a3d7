"""Linear layers that read one input, and what they are added onto."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gecko.ops.backends.cpu import linear, packed_weights_run_on
from gecko.ops.backends.dispatch import kernels_of
from gecko.ops.common import check_shape, from_linear


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], onto: Tensor | None = None
) -> tuple[Tensor, ...]:
    """x W_iᵀ + b_i for each layer i, the last one's plus ``onto``.

    Args:
        x: (…, inputs), any float dtype; weights: (outputs_i, inputs) each; biases: (outputs_i,) each, or None.
        onto: the shape of the last output.

    Returns:
        (…, outputs_i) each, in the dtype of a linear layer (under autocast its own, or that of x where kernels round by
        themselves); the last one's in that of ``onto``, if it is wider.

    Raises:
        ValueError: the shapes do not fit.
    """
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        check_shape(f"weights[{i}]", weight, (len(weight), x.shape[-1]))
        if bias is not None:
            check_shape(f"biases[{i}]", bias, (len(weight),))
    if onto is not None:
        check_shape("onto", onto, (*x.shape[:-1], len(weights[-1])))
    if packed_weights_run_on(x, weights, (*biases, onto)):
        outputs: tuple[Tensor, ...] = kernels_of("projections", "cpu").projections_cpu(x, weights, biases, onto)
        return outputs
    several = [from_linear(linear(x, weight, bias), x) for weight, bias in zip(weights, biases, strict=True)]
    if onto is not None:
        several[-1] = onto + several[-1]
    return tuple(several)
