"""Triton kernels for the gradients of CEMA's coefficients: one pass forwards in time, with the derivatives of states.

Let g be the gradient of the outputs and h̃ = ∂h / ∂ log q, so h̃ ← q (h̃ + h) along with h ← q h + p x. The pass sums
    a = Σ_t g_t h_t    and    b = Σ_t g_t h̃_t.
The gradient of γ is the conjugate of a, and the gradient of log q is the conjugate of γ b. For inputs within the chunk
of step t, the pass sums only the correlations c[s, t] = Σ x_s g_t. The last kernel adds them to a and b, multiplied by
powers of q.

The coefficient tensors are small, so launch overhead dominates the work before and after this pass: one kernel
computes the tables from the coefficients, and one kernel computes the gradients from the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.cema.triton_forward import (
    add_product,
    complex_product,
    entering,
    into_state,
    last_item,
    load_borders,
    load_channels,
    load_pair,
    load_state,
    places,
    power,
    power_for_items,
    rough_product,
    rounded_factor,
    state_factor,
    store_pair,
)
from gecko.ops.timestep_norm.triton_tiles import at_step

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _advance(h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, late_real, late_imag, q_real, q_imag,
             precision: tl.constexpr):  # fmt: skip
    """Return h and h̃ after one more chunk of inputs (channels, items, chunk)."""
    h_real, h_imag = complex_product(h_real, h_imag, q_real, q_imag)
    d_real, d_imag = add_product(h_real, h_imag, q_real, q_imag, d_real, d_imag)
    h_real = rough_product(b_x, g_real, h_real, precision)
    h_imag = rough_product(b_x, g_imag, h_imag, precision)
    d_real = rough_product(b_x, late_real, d_real, precision)
    d_imag = rough_product(b_x, late_imag, d_imag, precision)
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _added(
    p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, late_real, late_imag, step_real, step_imag,
    precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Return h and h̃ after each item, starting from zero."""
    h_real = tl.zeros((b_d, items, b_n), tl.float32)
    h_imag = tl.zeros((b_d, items, b_n), tl.float32)
    d_real = tl.zeros((b_d, items, b_n), tl.float32)
    d_imag = tl.zeros((b_d, items, b_n), tl.float32)
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, False, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        h_real, h_imag, d_real, d_imag = _advance(
            h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, late_real, late_imag, step_real, step_imag, precision
        )  # fmt: skip
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _entering(
    kind, chunks, h_real, h_imag, d_real, d_imag, unit_real, unit_imag, c_real, c_imag, e_real, e_imag,
    items: tl.constexpr,
):  # fmt: skip
    """Return h and h̃ before each item of a tile, from ``_added`` for the item before each and from those after
    the tile before (c, e).

    With the decay a of a unit, h ← a h + u and h̃ ← a h̃ + chunks · a h + ũ. The scan of h gives a h, the difference of
    two known numbers, and so the inputs of the scan of h̃."""
    u_real, u_imag = h_real, h_imag
    h_real, h_imag = entering(kind, h_real, h_imag, unit_real, unit_imag, c_real, c_imag, items)
    d_real += chunks * (h_real - u_real)
    d_imag += chunks * (h_imag - u_imag)
    d_real, d_imag = entering(kind, d_real, d_imag, unit_real, unit_imag, e_real, e_imag, items)
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _add_states(by_real, by_imag, b_g, z_real, z_imag, precision: tl.constexpr):
    """Add Σ g z over items, for g (channels, chunk, items) and states z (channels, items, modes) before a chunk."""
    # 11 bits of a state are too few for float16, and unlike the tables of a chunk it cannot be rounded only once.
    mode: tl.constexpr = "tf32x3" if precision == "tf32" else precision
    by_real = rough_product(b_g, state_factor(z_real, mode), by_real, mode)
    return by_real, rough_product(b_g, state_factor(z_imag, mode), by_imag, mode)


@triton.jit
def _out_of_states(w_real, w_imag, by_real, by_imag):
    """Return Σ_t w_t s_t, (channels, modes), of w and s (channels, steps, modes): w_t is the power of q at step t of a
    chunk, s_t the sum over items and chunks of g_t z, of the output's gradient and the state before the chunk."""
    real, imag = complex_product(w_real, w_imag, by_real, by_imag)
    return tl.sum(real, 1), tl.sum(imag, 1)


@triton.jit(do_not_specialize=["unit"])
def gradients_kernel(
    p_x, p_grad, p_in, p_decay, p_before, p_sums, p_derivatives, p_correlation, p_after,
    p_first, p_begin, p_end, p_kind, p_tiles, channels, modes, unit,
    precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Compute Σ g h and Σ g h̃ without the inputs of each chunk, their correlations, and the last h̃, of one row.

    A state before a chunk reaches its step t multiplied by q^(t + 1), which is the same in all chunks. So the products
    g_t h are summed over items and chunks for each t, by tensor cores, and multiplied by powers at the end. Within the
    kernel, h̃ is in units of a chunk: these are powers of two, and then h̃ + h needs no product.

    p_x, p_grad: (tokens, channels). p_in, p_decay: (channels, modes, 2). p_before: (rows, channels, modes, 2), and
    p_sums, p_derivatives, p_after too. p_correlation: (rows, channels, chunk, chunk), by s and t.
    """
    row = tl.program_id(0).to(tl.int64)
    # Programs for the same channels are adjacent, because they read the same tokens.
    mode_blocks = tl.cdiv(modes, b_n)
    i_d = tl.program_id(1) // mode_blocks * b_d + tl.arange(0, b_d)
    i_n = tl.program_id(1) % mode_blocks * b_n + tl.arange(0, b_n)
    m_mode = (i_d < channels)[:, None] & (i_n < modes)[None, :]
    i_mode = i_d[:, None] * modes + i_n[None, :]
    q_real, q_imag = load_pair(p_decay, i_mode, m_mode)
    in_real, in_imag = load_pair(p_in, i_mode, m_mode)
    i_t = tl.arange(0, chunk)
    g_real, g_imag = into_state(in_real, in_imag, q_real, q_imag, chunk - 1 - i_t)
    late = (chunk - 1 - i_t).to(tl.float32)[None, :, None] / chunk
    late_real, late_imag = rounded_factor(g_real * late, precision), rounded_factor(g_imag * late, precision)
    g_real, g_imag = rounded_factor(g_real, precision), rounded_factor(g_imag, precision)
    step_real, step_imag = power_for_items(q_real, q_imag, chunk, 6)
    unit_real, unit_imag = power_for_items(q_real, q_imag, unit, 10)

    state = 2 * row * channels * modes
    c_real, c_imag = load_state(p_before, state, i_mode, m_mode)
    e_real = tl.zeros((b_d, b_n), tl.float32)
    e_imag = tl.zeros((b_d, b_n), tl.float32)
    by_h_real = tl.zeros((b_d, chunk, b_n), tl.float32)
    by_h_imag = tl.zeros((b_d, chunk, b_n), tl.float32)
    by_d_real = tl.zeros((b_d, chunk, b_n), tl.float32)
    by_d_imag = tl.zeros((b_d, chunk, b_n), tl.float32)
    correlation = tl.zeros((b_d, chunk, chunk), tl.float32)
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item - 1)
        h_real, h_imag, d_real, d_imag = _added(
            p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, late_real, late_imag, step_real,
            step_imag, precision, chunk, items, b_d, b_n,
        )  # fmt: skip
        h_real, h_imag, d_real, d_imag = _entering(
            tl.load(p_kind + i_item), unit // chunk, h_real, h_imag, d_real, d_imag, unit_real, unit_imag, c_real,
            c_imag, e_real, e_imag, items,
        )  # fmt: skip
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item)
        for step in range(unit // chunk):
            offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, False, chunk)
            b_g = tl.permute(load_channels(p_grad, offsets, mask, precision), (0, 2, 1))
            b_x = load_channels(p_x, offsets, mask, precision)
            by_h_real, by_h_imag = _add_states(by_h_real, by_h_imag, b_g, h_real, h_imag, precision)
            by_d_real, by_d_imag = _add_states(by_d_real, by_d_imag, b_g, d_real, d_imag, precision)
            correlation = rough_product(b_g, b_x, correlation, precision)
            h_real, h_imag, d_real, d_imag = _advance(
                h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, late_real, late_imag, step_real, step_imag,
                precision,
            )  # fmt: skip
        c_real, c_imag = last_item(h_real, items), last_item(h_imag, items)
        e_real, e_imag = last_item(d_real, items), last_item(d_imag, items)
    store_pair(p_after + state, i_mode, chunk * e_real, chunk * e_imag, m_mode)
    i_s = (row * channels + i_d)[:, None, None] * (chunk * chunk) + i_t[None, :, None] + i_t[None, None, :] * chunk
    own = (i_d < channels) & (tl.program_id(1) % mode_blocks == 0)
    tl.store(p_correlation + i_s, correlation, mask=own[:, None, None])
    # Loaded again, so that the compiler keeps no powers of q in registers from the first tables until here.
    q_real, q_imag = load_pair(p_decay, i_mode, m_mode)
    w_real, w_imag = power(q_real[:, None, :], q_imag[:, None, :], (i_t + 1)[None, :, None], 6)
    sum_real, sum_imag = _out_of_states(w_real, w_imag, by_h_real, by_h_imag)
    store_pair(p_sums + state, i_mode, sum_real, sum_imag, m_mode)
    steps = (i_t + 1).to(tl.float32)[None, :, None]
    by_d_real, by_d_imag = chunk * by_d_real + steps * by_h_real, chunk * by_d_imag + steps * by_h_imag
    der_real, der_imag = _out_of_states(w_real, w_imag, by_d_real, by_d_imag)
    store_pair(p_derivatives + state, i_mode, der_real, der_imag, m_mode)


@triton.jit
def _modes_of(channels, modes, b_d: tl.constexpr, b_n: tl.constexpr):
    """Return the channels of this program and their mask, and the offsets (channels, modes) and their mask."""
    i_d = tl.program_id(0) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    m_d = i_d < channels
    return i_d, m_d, i_d[:, None] * modes + i_n[None, :], m_d[:, None] & (i_n < modes)[None, :]


@triton.jit
def _cosine_and_sine(angle):
    """Return cos and sin of moderate angles, within 1e-8 in float64. Those of the GPU's library keep an array for huge
    angles in memory."""
    turns = tl.floor(angle * 0.3183098861837907 + 0.5)
    r = angle - turns * 3.141592653589793
    sign = 1 - 2 * (turns - 2 * tl.floor(turns * 0.5))
    r2 = r * r
    cosine = 1 - r2 / 2 * (1 - r2 / 12 * (1 - r2 / 30 * (1 - r2 / 56 * (1 - r2 / 90 * (1 - r2 / 132)))))
    sine = r * (1 - r2 / 6 * (1 - r2 / 20 * (1 - r2 / 42 * (1 - r2 / 72 * (1 - r2 / 110 * (1 - r2 / 156))))))
    return sign * cosine, sign * sine


@triton.jit
def response_kernel(
    p_in, p_log, p_angle, p_out, p_skip, p_response, p_decay, p_pair, channels, modes, chunk: tl.constexpr,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Store k[j] = Re Σ γ p q^j (plus ω if j = 0) for the lags j of one chunk, (channels, chunk), and q and p as
    complex numbers. p_skip is None if ω is zero."""
    i_d, m_d, i_k, m_k = _modes_of(channels, modes, b_d, b_n)
    b_p = tl.load(p_in + i_k, mask=m_k, other=0.0)
    # In float64, as errors of q grow with its powers.
    size = tl.exp(tl.load(p_log + i_k, mask=m_k, other=0.0).to(tl.float64))
    cosine, sine = _cosine_and_sine(tl.load(p_angle + i_k, mask=m_k, other=0.0).to(tl.float64))
    q_real, q_imag = (size * cosine).to(tl.float32), (size * sine).to(tl.float32)
    store_pair(p_pair, i_k, b_p, tl.zeros_like(b_p), m_k)
    store_pair(p_decay, i_k, q_real, q_imag, m_k)
    gamma_real, gamma_imag = load_pair(p_out, i_k, m_k)
    power_real, power_imag = tl.full(b_p.shape, 1.0, tl.float32), tl.zeros_like(b_p)
    for lag in range(0, chunk):
        b_k = tl.sum(b_p * (gamma_real * power_real - gamma_imag * power_imag), 1)
        if p_skip is not None:
            b_k += tl.load(p_skip + i_d, mask=m_d & (lag == 0), other=0.0)
        tl.store(p_response + i_d * chunk + lag, b_k, mask=m_d)
        power_real, power_imag = complex_product(power_real, power_imag, q_real, q_imag)


@triton.jit
def _add_correlations(
    p_correlation, sum_real, sum_imag, by_real, by_imag, b_skip, p_real, p_imag, q_real, q_imag, i_d, m_d,
    chunk: tl.constexpr, lags: tl.constexpr,
):  # fmt: skip
    """Add the inputs of the chunk of each step to the sums of one row: p q^lag times the correlation at each lag.

    ``lags`` of them are loaded at once, so that enough bytes are in flight; a thread holds all lags of its places."""
    i_lag, i_s = tl.arange(0, lags)[:, None, None], tl.arange(0, chunk)[None, None, :]
    i_d = i_d[None, :, None] * (chunk * chunk)
    for first in range(0, chunk, lags):
        m_pair = m_d[None, :, None] & (i_s + i_lag + first < chunk)
        b_pair = tl.load(p_correlation + i_d + i_s * (chunk + 1) + i_lag + first, mask=m_pair, other=0.0)
        b_lags = tl.sum(b_pair, 2)
        for i in tl.static_range(lags):
            b_lag = at_step(b_lags, i)
            b_skip += tl.where(first + i == 0, b_lag, 0.0)
            real, imag = p_real * b_lag[:, None], p_imag * b_lag[:, None]
            sum_real, sum_imag = sum_real + real, sum_imag + imag
            by_real, by_imag = by_real + (first + i) * real, by_imag + (first + i) * imag
            p_real, p_imag = complex_product(p_real, p_imag, q_real, q_imag)
    return sum_real, sum_imag, by_real, by_imag, b_skip


@triton.jit(do_not_specialize=["batch"])
def coefficient_gradients_kernel(
    p_in, p_out, p_decay, p_correlation, p_sums, p_derivatives, p_last, p_after, p_grad_after, p_before, p_grad_before,
    p_grad_in, p_grad_log, p_grad_angle, p_grad_out, p_grad_skip, batch, channels, modes, chunk: tl.constexpr,
    b_d: tl.constexpr, b_n: tl.constexpr, lags: tl.constexpr,
):  # fmt: skip
    """Compute gradients from sums over time (rows, channels, modes) and correlations (rows, channels, chunk, chunk).

    As Σ g y + <h, dh> after the last step is linear in p and the state before, p dp is that sum less <h, dh> before.
    p_before and p_grad_after are None if there is no state before and no gradient of the one after."""
    i_d, m_d, i_k, m_k = _modes_of(channels, modes, b_d, b_n)
    b_p = tl.load(p_in + 2 * i_k, mask=m_k, other=1.0)
    q_real, q_imag = load_pair(p_decay, i_k, m_k)
    zero, b_skip = tl.zeros((b_d, b_n), tl.float32), tl.zeros((b_d,), tl.float32)
    sum_real, sum_imag, by_real, by_imag, end_real, end_imag, linear = zero, zero, zero, zero, zero, zero, zero
    i_at, row_size = i_k.to(tl.int64), tl.full((), chunk * chunk, tl.int64) * channels
    for _ in range(0, batch):
        real, imag = load_pair(p_sums, i_at, m_k)
        sum_real, sum_imag = sum_real + real, sum_imag + imag
        real, imag = load_pair(p_derivatives, i_at, m_k)
        by_real, by_imag = by_real + real, by_imag + imag
        sum_real, sum_imag, by_real, by_imag, b_skip = _add_correlations(
            p_correlation, sum_real, sum_imag, by_real, by_imag, b_skip, b_p, zero, q_real, q_imag, i_d, m_d, chunk,
            lags,
        )  # fmt: skip
        if p_grad_after is not None:
            given_real, given_imag = load_pair(p_grad_after, i_at, m_k)
            real, imag = load_pair(p_last, i_at, m_k)
            end_real, end_imag = add_product(end_real, end_imag, real, -imag, given_real, given_imag)
            real, imag = load_pair(p_after, i_at, m_k)
            linear += given_real * real + given_imag * imag
        if p_before is not None:
            given_real, given_imag = load_pair(p_grad_before, i_at, m_k)
            real, imag = load_pair(p_before, i_at, m_k)
            linear -= given_real * real + given_imag * imag
        i_at += channels * modes
        p_correlation += row_size
    gamma_real, gamma_imag = load_pair(p_out, i_k, m_k)
    by_real, by_imag = complex_product(gamma_real, gamma_imag, by_real, by_imag)
    tl.store(p_grad_skip + i_d, b_skip, mask=m_d)
    tl.store(p_grad_log + i_k, by_real + end_real, mask=m_k)
    tl.store(p_grad_angle + i_k, end_imag - by_imag, mask=m_k)
    tl.store(p_grad_in + i_k, (linear + gamma_real * sum_real - gamma_imag * sum_imag) / b_p, mask=m_k)
    store_pair(p_grad_out, i_k, sum_real, -sum_imag, m_k)
