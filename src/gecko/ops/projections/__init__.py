"""Linear layers that share one input. A residual can be added to the last output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gecko.ops.backends.cpu import linear, packed_weights_run_on
from gecko.ops.backends.dispatch import gpu_functions_run_on, kernels_of
from gecko.ops.common import check_shape, from_linear


def projections(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], onto: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Compute x W_iᵀ + b_i for each layer i, and add ``onto`` to the last one.

    Args:
        x: (…, inputs), any float dtype; weights: (outputs_i, inputs) each; biases: (outputs_i,) each, or None.
        onto: tensor of the shape of the last output.

    Returns:
        (…, outputs_i) each, in the dtype of a linear layer: that of autocast, or that of x if C kernels round operands
        themselves. The last output has the dtype of ``onto`` if that is wider.

    Raises:
        ValueError: the shapes are inconsistent.
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
    if gpu_functions_run_on(x, *weights, *biases):
        from gecko.ops.projections.gpu import projections_gpu

        several = list(projections_gpu(x, weights, biases))
    else:
        several = [from_linear(linear(x, *layer), x) for layer in zip(weights, biases, strict=True)]
    if onto is not None:
        several[-1] = onto + several[-1]
    return tuple(several)
