"""Triton backend of the coefficients of CEMA, ``CEMACoefficients.from_parameters``, forward and backward.

They are few numbers: PyTorch's operations take ten launches forward and eleven backward in every layer, these kernels
one each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


def _launch(kernel: Any, alpha: Tensor, tensors: dict[str, Tensor | None]) -> None:
    channels, modes = alpha.shape
    width = tile(modes, 1)
    sizes = {"channels": channels, "modes": modes, "b_d": max(1, 256 // width), "b_n": width}
    grid = (blocks(channels, sizes["b_d"]),)
    Launch(kernel, grid, {**tensors, **sizes, "turn": 2 * math.pi / modes}, warps=4).run()


@custom_op("cema_coefficients_backward")
def _coefficients_backward(
    by_input: Tensor | None, by_log: Tensor | None, by_angle: Tensor | None, alpha: Tensor, delta: Tensor, theta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of alpha, delta and theta."""
    grads = [None if x is None else x.contiguous() for x in (by_input, by_log, by_angle)]
    given = [x.contiguous() for x in (alpha, delta, theta)]
    by_alpha, by_delta, by_theta = map(torch.empty_like, given)
    names = (
        "p_by_in", "p_by_log", "p_by_angle", "p_alpha", "p_delta", "p_theta", "p_grad_alpha", "p_grad_delta",
        "p_grad_theta",
    )  # fmt: skip
    _launch(_gradients_kernel, given[0], dict(zip(names, (*grads, *given, by_alpha, by_delta, by_theta), strict=True)))
    return by_alpha, by_delta, by_theta


@custom_op("cema_coefficients", _coefficients_backward, of=[0, 1, 2], zeros=False)
def coefficients_triton(alpha: Tensor, delta: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, log |q| and arg q, (D, N) float32 each."""
    alpha, delta, theta = (x.contiguous() for x in (alpha, delta, theta))
    p, log_damping, angle = (torch.empty_like(alpha, dtype=torch.float32) for _ in range(3))
    _launch(_coefficients_kernel, alpha, {
        "p_alpha": alpha, "p_delta": delta, "p_theta": theta, "p_in": p, "p_log": log_damping, "p_angle": angle,
    })  # fmt: skip
    return p, log_damping, angle


@triton.jit
def _sigmoids(p_alpha, p_delta, p_theta, channels, modes, b_d: tl.constexpr, b_n: tl.constexpr):
    """Return σ(α), σ(δ) (channels, modes) and σ(θ) (channels,) of a program, and offsets and masks of both shapes.

    They are float64: a token's phase is its index times the angle, and so is its error. In float32 the exponential and
    the quotient of a GPU add several roundings to the angle's own.
    """
    i_d, i_n = tl.program_id(0) * b_d + tl.arange(0, b_d), tl.arange(0, b_n)
    m_d, i_k = i_d < channels, i_d[:, None] * modes + i_n[None, :]
    m_k = m_d[:, None] & (i_n < modes)[None, :]
    b_p = 1 / (1 + tl.exp(-tl.load(p_alpha + i_k, mask=m_k, other=0.0).to(tl.float64)))
    b_s = 1 / (1 + tl.exp(-tl.load(p_delta + i_k, mask=m_k, other=0.0).to(tl.float64)))
    b_t = 1 / (1 + tl.exp(-tl.load(p_theta + i_d, mask=m_d, other=0.0).to(tl.float64)))
    return b_p, b_s, b_t, i_d, m_d, i_k, m_k, (i_n + 1)[None, :]


@triton.jit
def _coefficients_kernel(p_alpha, p_delta, p_theta, p_in, p_log, p_angle, channels, modes, turn: tl.constexpr,
                         b_d: tl.constexpr, b_n: tl.constexpr):  # fmt: skip
    b_p, b_s, b_t, _, _, i_k, m_k, b_mode = _sigmoids(p_alpha, p_delta, p_theta, channels, modes, b_d, b_n)
    tl.store(p_in + i_k, b_p.to(tl.float32), mask=m_k)
    # log(1 − x) loses the digits of a small x: the quotient with the rounded 1 − x has them.
    b_x = b_p * b_s
    b_rest = 1 - b_x
    b_kept = tl.where(b_rest == 1, 1.0, 1 - b_rest)
    b_log = tl.where(b_rest == 1, -b_x, tl.log(b_rest) * (b_x / b_kept))
    tl.store(p_log + i_k, b_log.to(tl.float32), mask=m_k)
    tl.store(p_angle + i_k, (turn * b_t[:, None] * b_mode).to(tl.float32), mask=m_k)


@triton.jit
def _gradients_kernel(p_by_in, p_by_log, p_by_angle, p_alpha, p_delta, p_theta, p_grad_alpha, p_grad_delta,
                      p_grad_theta, channels, modes, turn: tl.constexpr, b_d: tl.constexpr,
                      b_n: tl.constexpr):  # fmt: skip
    b_p, b_s, b_t, i_d, m_d, i_k, m_k, b_mode = _sigmoids(p_alpha, p_delta, p_theta, channels, modes, b_d, b_n)
    b_p, b_s, b_t = b_p.to(tl.float32), b_s.to(tl.float32), b_t.to(tl.float32)
    b_by_in, b_by_log, b_by_angle = tl.zeros_like(b_p), tl.zeros_like(b_p), tl.zeros_like(b_p)
    if p_by_in is not None:
        b_by_in += tl.load(p_by_in + i_k, mask=m_k, other=0.0)
    if p_by_log is not None:
        b_by_log += tl.load(p_by_log + i_k, mask=m_k, other=0.0) / (b_p * b_s - 1)
    if p_by_angle is not None:
        b_by_angle += tl.load(p_by_angle + i_k, mask=m_k, other=0.0)
    b_alpha, b_delta = (b_by_in + b_by_log * b_s) * b_p * (1 - b_p), b_by_log * b_p * b_s * (1 - b_s)
    tl.store(p_grad_alpha + i_k, b_alpha.to(p_grad_alpha.dtype.element_ty), mask=m_k)
    tl.store(p_grad_delta + i_k, b_delta.to(p_grad_delta.dtype.element_ty), mask=m_k)
    b_theta = turn * tl.sum(b_by_angle * b_mode, 1) * b_t * (1 - b_t)
    tl.store(p_grad_theta + i_d, b_theta.to(p_grad_theta.dtype.element_ty), mask=m_d)
