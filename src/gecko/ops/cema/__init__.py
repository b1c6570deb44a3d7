"""Complex exponential moving average (CEMA), paper Eq. 1.

The C kernels run the recurrence step by step: no tables, no transposes and one pass over x.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import CFunction, call, save, saved
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.cema.chunked import CEMACoefficients, cema_chunked, cema_step
from gecko.ops.cema.varlen_tiles import FEWEST, MOST_MODES
from gecko.ops.common import check_shape, compute_dtype, full_precision, layout_of_call, run_by_length
from gecko.segments import Pending, Segments

__all__ = [
    "CEMACoefficients", "cema", "cema_chunked", "cema_reference", "cema_state_before", "cema_step", "empty_cema_state",
]  # fmt: skip

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
    """
    batch, length, channels = x.shape
    modes = coefficients.input.shape[1]
    check_shape("coefficients.input", coefficients.input, (channels, modes))
    dtype = compute_dtype(x)
    check_shape("state", state, (batch, channels, modes, 2))
    segments = layout_of_call(segments, batch, length, x.device)
    check_shape("skip", skip, (channels,))
    floats = coefficients.input, coefficients.log_damping, coefficients.angle, coefficients.output, state
    with full_precision(x):
        # A call of one token is always "eager" here.
        fits_triton, fits_cpu = length >= FEWEST and modes <= MOST_MODES, length > 1 and modes <= MOST_CPU_MODES
        backend = choose_backend(x, *floats, skip, triton=fits_triton, cpu=fits_cpu)
        padded = segments.ends is not None and (backend != "cpu" or torch.is_grad_enabled())
        if backend == "triton" and not padded:
            from gecko.ops.cema.triton import cema_triton

            return cema_triton(x, coefficients, state, segments, skip)
        state = empty_cema_state(batch, channels, modes, dtype, x.device) if state is None else state
        if padded:
            return run_by_length(partial(cema, coefficients=coefficients, skip=skip), (x,), state, segments)
        if backend == "cpu":
            factor = torch.view_as_real(coefficients.decay())
            check_shape("coefficients' decay", factor, (channels, modes, 2))
            check_shape("coefficients.output", coefficients.output, (channels, modes, 2))
            omega = x.new_zeros(channels) if skip is None else skip
            given = coefficients.input, factor, coefficients.output, omega, state
            return CEMACPU.run(x, *given, segments.start_flags, segments.ends)
        if length > 1:
            y, state = cema_chunked(x.to(dtype), coefficients, state, segments, skip)
            return y.to(x.dtype), state
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (x, state, *floats[:4]))
        if choose_backend(x, triton=not differentiated, cpu=False) == "triton":
            from gecko.ops.cema.triton_forward import cema_step_triton

            y, state = cema_step_triton(x, coefficients, state, segments)
        else:
            y, state = cema_step(x.to(dtype), coefficients, state, segments)
    y = y.to(x.dtype)
    return (y if skip is None else torch.addcmul(y, x, skip.to(x.dtype))), state


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


def cema_state_before(
    x: Tensor, coefficients: Callable[[], CEMACoefficients], state: Tensor | None, segments: Segments
) -> Pending[Tensor | None]:
    """Return the state before the tokens x (B, T, D), (B, D, N, 2). A rank sends what x adds to later ranks.

    ``state`` is that before the call; on ranks after the first it is None. Only ranks need ``coefficients``.
    """
    exchange = segments.exchange
    if exchange is None:
        return lambda: state
    filters = coefficients()

    def receive() -> Tensor:
        """Decay the state of each earlier rank over the tokens of the ranks between."""
        (ends,) = arriving()
        between = x.shape[1] * torch.arange(len(ends), device=ends.device).view(-1, 1, 1)
        kept = torch.view_as_complex(ends) * filters.decay(between).unsqueeze(1)
        earlier = torch.view_as_real((kept * (exchange.counts > 0)[..., None, None]).sum(0))
        return earlier if state is None else state + earlier

    _, end = cema(x, filters, state, segments=segments)
    arriving = exchange.send((), [end])
    return receive


_LANES, _TILE, _TOGETHER = 16, 64, 4
"""Same as in cpu.c."""
_GROUPS = 8
"""Number of groups of rows. Each group sums its coefficient gradients separately. The number is constant so that the
sums do not depend on the number of threads."""


class CEMACPU(CFunction):
    """CEMA of x, p (D, N), q and γ (D, N, 2), ω, the state, the document starts and the lengths of padded rows."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, p, q, gamma, skip, state, starts, _ = given
        (batch, length, channels), kept = x.shape, None
        if any(ctx.needs_input_grad):  # the states before every tile
            modes = -(-p.shape[1] // _TOGETHER) * _TOGETHER
            kept = x.new_empty(batch, -(-channels // _LANES), -(-length // _TILE), modes, 2, _LANES)
        save(ctx, x, p, q, gamma, skip, starts, kept)
        y, final = torch.empty_like(x), torch.empty_like(state)
        call("cema_forward", *given, y, kept, final, *x.shape, p.shape[1])
        return y, final

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        x, p, q, gamma, skip, starts, kept = saved(ctx)
        groups = min(len(x), _GROUPS)
        grad_x, grad_state = torch.empty_like(x), x.new_empty(len(x), *q.shape)
        sums = [t.new_empty(groups, *t.shape) for t in (p, q, gamma, skip)]
        call(
            "cema_backward", x, p, q, gamma, skip, starts, kept, grad, grad_final, grad_x, *sums,
            grad_state, groups, *x.shape, p.shape[1],
        )  # fmt: skip
        return grad_x, *(t.sum(0) for t in sums), grad_state, None, None
