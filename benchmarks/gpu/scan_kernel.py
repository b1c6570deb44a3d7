"""CEMA with ``tl.associative_scan``: the baseline for the kernels, which use matrix products.

Every program takes a block of channels and walks along time in blocks. Within a block, each of the N modes is an
associative scan of (decay, value) pairs of complex numbers. The backward pass for x is the same filter in reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS, CHANNELS, WARPS = 64, 8, 4


@triton.jit
def _combine(a_real, a_imag, x_real, x_imag, b_real, b_imag, y_real, y_imag):
    return (
        a_real * b_real - a_imag * b_imag,
        a_real * b_imag + a_imag * b_real,
        b_real * x_real - b_imag * x_imag + y_real,
        b_real * x_imag + b_imag * x_real + y_imag,
    )


@triton.jit(do_not_specialize=["length"])
def _scan(
    p_x, p_y, p_q, p_gain, p_state, length, channels,
    modes: tl.constexpr, steps: tl.constexpr, width: tl.constexpr, reverse: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_channel = tl.program_id(1) * width + tl.arange(0, width)
    m_channel = i_channel < channels
    i_step = tl.arange(0, steps)
    ones = tl.full([steps, width], 1.0, tl.float32)
    for first in range(0, length, steps):
        i_time = (first + i_step).to(tl.int64)
        m_x = (i_time < length)[:, None] & m_channel[None, :]
        i_at = length - 1 - i_time if reverse else i_time
        i_x = (i_row * length + i_at[:, None]) * channels + i_channel[None, :]
        b_x = tl.load(p_x + i_x, m_x, 0.0).to(tl.float32)
        b_y = tl.zeros([steps, width], tl.float32)
        for mode in range(modes):
            i_mode = i_channel * modes + mode
            q_real, q_imag = tl.load(p_q + 2 * i_mode, m_channel, 0.0), tl.load(p_q + 2 * i_mode + 1, m_channel, 0.0)
            g_real, g_imag = (
                tl.load(p_gain + 2 * i_mode, m_channel, 0.0), tl.load(p_gain + 2 * i_mode + 1, m_channel, 0.0),
            )  # fmt: skip
            i_state = 2 * ((i_row * channels + i_channel) * modes + mode)
            h_real, h_imag = tl.load(p_state + i_state, m_channel, 0.0), tl.load(p_state + i_state + 1, m_channel, 0.0)
            d_real, d_imag, s_real, s_imag = tl.associative_scan(
                (ones * q_real[None, :], ones * q_imag[None, :], b_x, 0.0 * b_x), 0, _combine
            )
            s_real += d_real * h_real[None, :] - d_imag * h_imag[None, :]
            s_imag += d_real * h_imag[None, :] + d_imag * h_real[None, :]
            b_y += g_real[None, :] * s_real - g_imag[None, :] * s_imag
            last = (i_step == steps - 1)[:, None]
            tl.store(p_state + i_state, tl.sum(tl.where(last, s_real, 0.0), 0), m_channel)
            tl.store(p_state + i_state + 1, tl.sum(tl.where(last, s_imag, 0.0), 0), m_channel)
        tl.store(p_y + i_x, b_y.to(p_y.dtype.element_ty), m_x)
        tl.debug_barrier()  # other threads read the states next than those that write them


def _run(x: Tensor, q: Tensor, gain: Tensor, reverse: bool) -> Tensor:
    batch, length, channels = x.shape
    y, state = torch.empty_like(x), torch.zeros(batch, channels, q.shape[1], 2, device=x.device)
    grid = (batch, triton.cdiv(channels, CHANNELS))
    pairs = [torch.view_as_real(part).contiguous() for part in (q, gain)]
    _scan[grid](
        x, y, *pairs, state, length, channels,
        modes=q.shape[1], steps=STEPS, width=CHANNELS, reverse=reverse, num_warps=WARPS,
    )  # fmt: skip
    return y


class _ScannedAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(q, gain)
        return _run(x, q, gain, reverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        q, gain = ctx.saved_tensors
        return _run(grad.contiguous(), q, gain, reverse=True), None, None


def scanned_average(x: Tensor, q: Tensor, gain: Tensor) -> Tensor:
    """Compute y_t = Re Σ_n gain_n h_t with h_t = q h_{t−1} + x_t, from zero; x (B, T, D), q and gain (D, N) complex."""
    return _ScannedAverage.apply(x, q, gain)
