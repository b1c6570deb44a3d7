"""Complex exponential moving average (CEMA), paper Eq. 1."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import Backend, choose_backend, kernels_of
from gecko.ops.cema.chunked import CEMACoefficients, cema_chunked, cema_step
from gecko.ops.cema.varlen_tiles import FEWEST, MOST_MODES
from gecko.ops.common import check_segments, check_shape, compute_dtype, full_precision, run_by_length
from gecko.segments import Segments

__all__ = ["CEMACoefficients", "cema", "cema_chunked", "cema_reference", "cema_step", "empty_cema_state"]


MOST_CPU_MODES = 256
"""Maximum number of modes per channel for the C kernels, which keep the states of all modes on the stack."""


def cema(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor | None = None, *,
    segments: Segments | None = None, skip: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute h_t = q h_{t-1} + p x_t and y_t = Re Σ_k γ_k h_t + ω x_t (paper Eq. 1). h is 0 before each document.

    Args:
        x: (B, T, D), any float dtype; the arithmetic is float32 or wider.
        coefficients: per channel, float32 or float64.
        state: h before the first step, (B, D, N, 2) as (real, imaginary); None is zero.
        segments: documents of the call; None: each row continues its document.
        skip: ω, (D,); None is zero.

    Returns:
        y (B, T, D) in the dtype of x, and h after the last step, (B, D, N, 2).

    Raises:
        ValueError: the shapes are inconsistent.
    """
    batch, length, channels = x.shape
    modes = coefficients.input.shape[1]
    check_shape("coefficients.input", coefficients.input, (channels, modes))
    dtype = compute_dtype(x)
    if state is not None:
        check_shape("state", state, (batch, channels, modes, 2))
    segments = segments or Segments.build(batch, length, device=x.device)
    check_segments(segments, batch, length)
    if skip is not None:
        check_shape("skip", skip, (channels,))
    with full_precision(x):
        backend = _backend(x, coefficients, state, skip)
        if segments.ends is not None and backend != "cpu":
            state = empty_cema_state(batch, channels, modes, dtype, x.device) if state is None else state
            return run_by_length(
                lambda inputs, state, segments: cema(inputs[0], coefficients, state, segments=segments, skip=skip),
                (x,), state, segments,
            )  # fmt: skip
        match backend:
            case "triton":
                return kernels_of("cema", "triton").cema_triton(x, coefficients, state, segments, skip)
            case "cpu":
                state = empty_cema_state(batch, channels, modes, dtype) if state is None else state
                return kernels_of("cema", "cpu").cema_cpu(x, coefficients, state, segments, skip)
        state = empty_cema_state(batch, channels, modes, dtype, x.device) if state is None else state
        if length > 1:
            y, state = cema_chunked(x.to(dtype), coefficients, state, segments, skip)
            return y.to(x.dtype), state
        y, state = _step(x, coefficients, state, segments)
    y = y.to(x.dtype)
    return (y if skip is None else torch.addcmul(y, x, skip.to(x.dtype))), state


def _backend(x: Tensor, coefficients: CEMACoefficients, state: Tensor | None, skip: Tensor | None) -> Backend:
    """Return the backend for a call of several tokens; a call of one token is always "eager" here."""
    length, modes = x.shape[1], coefficients.input.shape[1]
    return choose_backend(
        x, coefficients.input, coefficients.log_damping, coefficients.angle, coefficients.output, state, skip,
        triton=length >= FEWEST and modes <= MOST_MODES,
        cpu=length > 1 and modes <= MOST_CPU_MODES,
    )  # fmt: skip


def _step(x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    if choose_backend(x, triton=not _wants_gradients(x, coefficients, state), cpu=False) == "triton":
        return kernels_of("cema", "triton_forward").cema_step_triton(x, coefficients, state, segments)
    return cema_step(x.to(compute_dtype(x)), coefficients, state, segments)


def _wants_gradients(x: Tensor, coefficients: CEMACoefficients, state: Tensor) -> bool:
    return torch.is_grad_enabled() and any(
        tensor.requires_grad
        for tensor in (x, state, coefficients.input, coefficients.log_damping, coefficients.angle, coefficients.output)
    )


def empty_cema_state(
    batch: int, channels: int, modes: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the initial state, h = 0."""
    return torch.zeros(batch, channels, modes, 2, dtype=dtype, device=device)


def cema_reference(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Compute h_t = q h_{t-1} + p x_t and y_t = Re Σ_k γ_k h_t, with h = 0 before the first step of a document."""
    p, q, gamma = coefficients.input, coefficients.decay(), torch.view_as_complex(coefficients.output)
    h, outputs = torch.view_as_complex(state), []
    for t, x_t in enumerate(x.unbind(1)):
        if segments.starts is not None:
            starts = torch.from_numpy(segments.starts[:, t]).to(x.device)
            h = torch.where(starts[:, None, None], 0, h)
        h = q * h + p * x_t.unsqueeze(-1)
        outputs.append((gamma * h).real.sum(-1))
    return torch.stack(outputs, dim=1), torch.view_as_real(h)
