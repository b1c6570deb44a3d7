"""Complex exponential moving average (CEMA), paper Eq. 1."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.cema.chunked import cema_chunked, cema_step
from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.ops.cema.reference import cema_reference
from gecko.ops.dtypes import check_shape, compute_dtype, full_precision
from gecko.segments import Segments

__all__ = ["CEMACoefficients", "cema", "cema_chunked", "cema_reference", "cema_step", "empty_cema_state"]


def cema(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor | None = None, *, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = q h_{t-1} + p x_t, y_t = Re Σ_k γ_k h_t; h = 0 before a document's first step (paper Eq. 1).

    Args:
        x: (B, T, D), any float dtype; the arithmetic is float32 or wider.
        coefficients: per channel, float32 or float64.
        state: h before the first step, (B, D, N, 2) as (real, imaginary); None is zero.
        segments: documents of the call; None is one document that continues.

    Returns:
        y (B, T, D) in the dtype of x, and h after the last step, (B, D, N, 2).

    Raises:
        ValueError: the shapes do not fit each other.
    """
    batch, length, channels = x.shape
    modes = coefficients.input.shape[1]
    check_shape("coefficients.input", coefficients.input, (channels, modes))
    dtype = compute_dtype(x)
    state = empty_cema_state(batch, channels, modes, dtype, x.device) if state is None else state
    check_shape("state", state, (batch, channels, modes, 2))
    segments = segments or Segments.build(batch, length, device=x.device)
    form = cema_step if length == 1 else cema_chunked
    with full_precision(x):
        y, state = form(x.to(dtype), coefficients, state, segments)
    return y.to(x.dtype), state


def empty_cema_state(
    batch: int, channels: int, modes: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """h before anything was read."""
    return torch.zeros(batch, channels, modes, 2, dtype=dtype, device=device)
