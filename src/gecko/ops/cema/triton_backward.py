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
    into_state,
    last_item,
    load_borders,
    load_channels,
    load_pair,
    places,
    power,
    power_for_items,
    rounded,
    store_pair,
)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _follow(
    a_real, a_imag, da_real, da_imag, u_real, u_imag, du_real, du_imag,
    b_real, b_imag, db_real, db_imag, v_real, v_imag, dv_real, dv_imag,
):  # fmt: skip
    """Compose z → a z + u and then z → b z + v into one step, with the derivatives with respect to log q."""
    decay_real, decay_imag = complex_product(b_real, b_imag, a_real, a_imag)
    one_real, one_imag = complex_product(db_real, db_imag, a_real, a_imag)
    two_real, two_imag = complex_product(b_real, b_imag, da_real, da_imag)
    real, imag = complex_product(b_real, b_imag, u_real, u_imag)
    three_real, three_imag = complex_product(db_real, db_imag, u_real, u_imag)
    four_real, four_imag = complex_product(b_real, b_imag, du_real, du_imag)
    return (
        decay_real, decay_imag, one_real + two_real, one_imag + two_imag,
        real + v_real, imag + v_imag, three_real + four_real + dv_real, three_imag + four_imag + dv_imag,
    )  # fmt: skip


@triton.jit
def _advance(h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, q_real, q_imag,
             precision: tl.constexpr, chunk: tl.constexpr):  # fmt: skip
    """Return h and h̃ after one more chunk of inputs (channels, items, chunk)."""
    d_real, d_imag = complex_product(d_real + chunk * h_real, d_imag + chunk * h_imag, q_real, q_imag)
    h_real, h_imag = complex_product(h_real, h_imag, q_real, q_imag)
    b_late = rounded(b_x * (chunk - 1 - tl.arange(0, chunk)).to(tl.float32)[None, None, :], precision)
    h_real = tl.dot(b_x, g_real, h_real, input_precision=precision)
    h_imag = tl.dot(b_x, g_imag, h_imag, input_precision=precision)
    d_real = tl.dot(b_late, g_real, d_real, input_precision=precision)
    d_imag = tl.dot(b_late, g_imag, d_imag, input_precision=precision)
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _added(
    p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, precision: tl.constexpr,
    chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Return h and h̃ after each item, starting from zero."""
    h_real = tl.zeros((b_d, items, b_n), tl.float32)
    h_imag = tl.zeros((b_d, items, b_n), tl.float32)
    d_real = tl.zeros((b_d, items, b_n), tl.float32)
    d_imag = tl.zeros((b_d, items, b_n), tl.float32)
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, False, chunk)
        b_x = load_channels(p_x, offsets, mask)
        h_real, h_imag, d_real, d_imag = _advance(
            h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, step_real, step_imag, precision, chunk
        )
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _entering(
    kind, unit, h_real, h_imag, d_real, d_imag, unit_real, unit_imag, c_real, c_imag, e_real, e_imag
):  # fmt: skip
    """Return h and h̃ before each item of a tile, from ``_added`` for the item before each and from those before the
    tile (c, e)."""
    continues = (kind == 1)[None, :, None]
    a_real = tl.where(continues, unit_real, tl.where((kind == 2)[None, :, None], 1.0, 0.0))
    a_imag = tl.where(continues, unit_imag, 0.0)
    da_real = tl.where(continues, unit * unit_real, 0.0)
    da_imag = tl.where(continues, unit * unit_imag, 0.0)
    h_real = tl.where(continues, h_real, 0.0)
    h_imag = tl.where(continues, h_imag, 0.0)
    d_real = tl.where(continues, d_real, 0.0)
    d_imag = tl.where(continues, d_imag, 0.0)
    a_real, a_imag, da_real, da_imag, h_real, h_imag, d_real, d_imag = tl.associative_scan(
        (a_real, a_imag, da_real, da_imag, h_real, h_imag, d_real, d_imag), 1, _follow
    )
    d_real, d_imag = add_product(d_real, d_imag, da_real, da_imag, c_real[:, None, :], c_imag[:, None, :])
    d_real, d_imag = add_product(d_real, d_imag, a_real, a_imag, e_real[:, None, :], e_imag[:, None, :])
    h_real, h_imag = add_product(h_real, h_imag, a_real, a_imag, c_real[:, None, :], c_imag[:, None, :])
    return h_real, h_imag, d_real, d_imag


@triton.jit
def _add_chunk(
    b_g, w_real, w_imag, h_real, h_imag, d_real, d_imag, sum_real, sum_imag, der_real, der_imag,
    precision: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Add one chunk to Σ g h and Σ g h̃ without its own inputs, from h and h̃ before the chunk."""
    v_real = tl.dot(b_g, w_real, input_precision=precision)
    v_imag = tl.dot(b_g, w_imag, input_precision=precision)
    sum_real, sum_imag = add_product(sum_real, sum_imag, v_real, v_imag, h_real, h_imag)
    der_real, der_imag = add_product(der_real, der_imag, v_real, v_imag, d_real, d_imag)
    b_late = rounded(b_g * (tl.arange(0, chunk) + 1).to(tl.float32)[None, None, :], precision)
    v_real = tl.dot(b_late, w_real, input_precision=precision)
    v_imag = tl.dot(b_late, w_imag, input_precision=precision)
    der_real, der_imag = add_product(der_real, der_imag, v_real, v_imag, h_real, h_imag)
    return sum_real, sum_imag, der_real, der_imag


@triton.jit(do_not_specialize=["unit"])
def gradients_kernel(
    p_x, p_grad, p_in, p_decay, p_before, p_sums, p_derivatives, p_correlation, p_after,
    p_first, p_begin, p_end, p_kind, p_tiles, channels, modes, unit,
    precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Compute Σ g h and Σ g h̃ without the inputs of each chunk, their correlations, and the last h̃, of one row.

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
    g_real, g_imag = into_state(in_real, in_imag, q_real, q_imag, chunk - 1 - i_t, precision)
    w_real, w_imag = power(q_real[:, None, :], q_imag[:, None, :], (i_t + 1)[None, :, None], 5)
    w_real, w_imag = rounded(w_real, precision), rounded(w_imag, precision)
    step_real, step_imag = power_for_items(q_real, q_imag, chunk, 5)
    unit_real, unit_imag = power_for_items(q_real, q_imag, unit, 9)

    i_state = row * channels * modes + i_mode
    c_real, c_imag = load_pair(p_before, i_state, m_mode)
    e_real = tl.zeros((b_d, b_n), tl.float32)
    e_imag = tl.zeros((b_d, b_n), tl.float32)
    sum_real = tl.zeros((b_d, items, b_n), tl.float32)
    sum_imag = tl.zeros((b_d, items, b_n), tl.float32)
    der_real = tl.zeros((b_d, items, b_n), tl.float32)
    der_imag = tl.zeros((b_d, items, b_n), tl.float32)
    correlation = tl.zeros((b_d, chunk, chunk), tl.float32)
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item - 1)
        h_real, h_imag, d_real, d_imag = _added(
            p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, precision, chunk,
            items, b_d, b_n,
        )  # fmt: skip
        h_real, h_imag, d_real, d_imag = _entering(
            tl.load(p_kind + i_item), unit, h_real, h_imag, d_real, d_imag, unit_real, unit_imag, c_real, c_imag,
            e_real, e_imag,
        )  # fmt: skip
        c_real = last_item(h_real, items)
        c_imag = last_item(h_imag, items)
        e_real = last_item(d_real, items)
        e_imag = last_item(d_imag, items)
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item)
        for step in range(unit // chunk):
            offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, False, chunk)
            b_g = load_channels(p_grad, offsets, mask)
            sum_real, sum_imag, der_real, der_imag = _add_chunk(
                b_g, w_real, w_imag, h_real, h_imag, d_real, d_imag, sum_real, sum_imag, der_real, der_imag, precision,
                chunk,
            )  # fmt: skip
            b_x = load_channels(p_x, offsets, mask)
            correlation = tl.dot(tl.permute(b_x, (0, 2, 1)), b_g, correlation, input_precision=precision)
            h_real, h_imag, d_real, d_imag = _advance(
                h_real, h_imag, d_real, d_imag, b_x, g_real, g_imag, step_real, step_imag, precision, chunk
            )
        if tile == tl.load(p_tiles + row + 1) - 1:
            store_pair(p_after, i_state, last_item(d_real, items), last_item(d_imag, items), m_mode)
    store_pair(p_sums, i_state, tl.sum(sum_real, 1), tl.sum(sum_imag, 1), m_mode)
    store_pair(p_derivatives, i_state, tl.sum(der_real, 1), tl.sum(der_imag, 1), m_mode)
    i_s = (row * channels + i_d)[:, None, None] * (chunk * chunk) + i_t[None, :, None] * chunk + i_t[None, None, :]
    own = (i_d < channels) & (tl.program_id(1) % mode_blocks == 0)
    tl.store(p_correlation + i_s, correlation, mask=own[:, None, None])


@triton.jit
def _modes_of(channels, modes, b_d: tl.constexpr, b_n: tl.constexpr):
    """Return the channels of this program and their mask, and the offsets (channels, modes) and their mask."""
    i_d = tl.program_id(0) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    m_d = i_d < channels
    return i_d, m_d, i_d[:, None] * modes + i_n[None, :], m_d[:, None] & (i_n < modes)[None, :]


@triton.jit
def response_kernel(
    p_in, p_out, p_decay, p_skip, p_response, p_pair, channels, modes, chunk: tl.constexpr, b_d: tl.constexpr,
    b_n: tl.constexpr,
):  # fmt: skip
    """Store k[j] = Re Σ γ p q^j (plus ω if j = 0) for the lags j of one chunk, (channels, chunk), and p as complex."""
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
    """Sum over rows: Σ g h and Σ g ∂h/∂log q of ``gradients_kernel``, the product of conj(∂h/∂log q) and dh after the
    last step, and <h, dh> after the last step minus <h, dh> before the first."""
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
    """Compute the gradients from sums over time (rows, channels, modes) and correlations (channels, chunk, chunk). As
    Σ g y + <h, dh> after the last step is linear in p and the state before, p dp is that sum less <h, dh> before."""
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
