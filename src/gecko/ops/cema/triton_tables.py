# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What surrounds the passes over tokens, from coefficients and to their gradients, a kernel each: of numbers as few as
coefficients the work is the launch, and PyTorch's operations would be a launch each."""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.cema.triton_tiles import add_product, complex_product, load_pair, power, store_pair


@triton.jit
def _modes_of(channels, modes, b_d: tl.constexpr, b_n: tl.constexpr):
    """Channels of this program and which there are; offsets (channels, modes) and which of these there are."""
    i_d = tl.program_id(0) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    m_d = i_d < channels
    return i_d, m_d, i_d[:, None] * modes + i_n[None, :], m_d[:, None] & (i_n < modes)[None, :]


@triton.jit
def response_kernel(
    p_in, p_out, p_decay, p_skip, p_response, p_pair, channels, modes, chunk: tl.constexpr, b_d: tl.constexpr,
    b_n: tl.constexpr,
):  # fmt: skip
    """k[j] = Re Σ γ p q^j + (ω where j = 0) for lags j of one chunk, (channels, chunk); and p as complex numbers."""
    i_d, m_d, i_k, m_k = _modes_of(channels, modes, b_d, b_n)
    b_p = tl.load(p_in + i_k, mask=m_k, other=0.0)
    store_pair(p_pair, i_k, b_p, tl.zeros_like(b_p), m_k)
    gamma_real, gamma_imag = load_pair(p_out, i_k, m_k)
    q_real, q_imag = load_pair(p_decay, i_k, m_k)
    b_skip = tl.load(p_skip + i_d, mask=m_d, other=0.0)
    for lag in range(0, chunk):
        real, imag = power(q_real, q_imag, tl.zeros((1, 1), tl.int32) + lag, 5)
        b_k = tl.sum(b_p * (gamma_real * real - gamma_imag * imag), 1)
        if lag == 0:
            b_k += b_skip
        tl.store(p_response + i_d * chunk + lag, b_k, mask=m_d)


@triton.jit
def _sums_of_rows(
    p_sums, p_derivatives, p_last, p_after, p_grad_after, p_before, p_grad_before, batch, size, i_k, m_k, zero
):
    """Over rows: Σ g h and Σ g ∂h/∂log q of whole chunks, conj(∂h/∂log q) · dh after the last step, and what the state
    after the last step has to do with its gradient less what that before the first has."""
    sum_real, sum_imag, by_real, by_imag, end_real, end_imag, linear = zero, zero, zero, zero, zero, zero, zero
    i_at = i_k.to(tl.int64)
    for _ in range(0, batch):
        real, imag = load_pair(p_sums, i_at, m_k)
        sum_real, sum_imag = sum_real + real, sum_imag + imag
        real, imag = load_pair(p_derivatives, i_at, m_k)
        by_real, by_imag = by_real + real, by_imag + imag
        given_real, given_imag = load_pair(p_grad_after, i_at, m_k)
        real, imag = load_pair(p_last, i_at, m_k)
        end_real, end_imag = add_product(end_real, end_imag, real, -imag, given_real, given_imag)
        real, imag = load_pair(p_after, i_at, m_k)
        linear += given_real * real + given_imag * imag
        given_real, given_imag = load_pair(p_grad_before, i_at, m_k)
        real, imag = load_pair(p_before, i_at, m_k)
        linear -= given_real * real + given_imag * imag
        i_at += size
    return sum_real, sum_imag, by_real, by_imag, end_real, end_imag, linear


@triton.jit(do_not_specialize=["batch"])
def coefficient_gradients_kernel(
    p_in, p_out, p_decay, p_correlation, p_sums, p_derivatives, p_last, p_after, p_grad_after, p_before, p_grad_before,
    p_grad_in, p_grad_log, p_grad_angle, p_grad_out, p_grad_skip, batch, channels, modes, chunk: tl.constexpr,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """From sums over time, (rows, channels, modes), and the correlation of inputs with gradients within chunks,
    (channels, chunk, chunk): Σ g y, and the same for the last state, is linear in p and in the state before, so what is
    not by that is by p."""
    i_d, m_d, i_k, m_k = _modes_of(channels, modes, b_d, b_n)
    b_p = tl.load(p_in + i_k, mask=m_k, other=1.0)
    q_real, q_imag = load_pair(p_decay, i_k, m_k)
    sum_real, sum_imag, by_real, by_imag, end_real, end_imag, linear = _sums_of_rows(
        p_sums, p_derivatives, p_last, p_after, p_grad_after, p_before, p_grad_before, batch, channels * modes, i_k,
        m_k, tl.zeros((b_d, b_n), tl.float32),
    )  # fmt: skip
    i_s = tl.arange(0, chunk)
    for lag in range(0, chunk):
        i_pair = i_d[:, None] * (chunk * chunk) + (i_s * (chunk + 1) + lag)[None, :]
        m_pair = m_d[:, None] & (i_s + lag < chunk)[None, :]
        b_lag = tl.sum(tl.load(p_correlation + i_pair, mask=m_pair, other=0.0), 1)
        if lag == 0:
            tl.store(p_grad_skip + i_d, b_lag, mask=m_d)
        real, imag = power(q_real, q_imag, tl.zeros((1, 1), tl.int32) + lag, 5)
        real, imag = b_p * real * b_lag[:, None], b_p * imag * b_lag[:, None]
        sum_real, sum_imag = sum_real + real, sum_imag + imag
        by_real, by_imag = by_real + lag * real, by_imag + lag * imag
    gamma_real, gamma_imag = load_pair(p_out, i_k, m_k)
    by_real, by_imag = complex_product(gamma_real, gamma_imag, by_real, by_imag)
    tl.store(p_grad_log + i_k, by_real + end_real, mask=m_k)
    tl.store(p_grad_angle + i_k, end_imag - by_imag, mask=m_k)
    tl.store(p_grad_in + i_k, (linear + gamma_real * sum_real - gamma_imag * sum_imag) / b_p, mask=m_k)
    store_pair(p_grad_out, i_k, sum_real, -sum_imag, m_k)
