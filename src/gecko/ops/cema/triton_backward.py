"""Triton kernels for the gradients of CEMA's coefficients: one pass forwards in time, with the derivatives of states.

Let g be the gradient of the outputs and h̃ = ∂h / ∂ log q, so h̃ ← q (h̃ + h) along with h ← q h + p x. The pass sums
    a = Σ_t g_t h_t    and    b = Σ_t g_t h̃_t.
The gradient of γ is the conjugate of a, and the gradient of log q is the conjugate of γ b. For inputs within the chunk
of step t, the pass sums only the correlations c[s, t] = Σ x_s g_t. The last kernel adds them to a and b, multiplied by
powers of q.

Launches dominate the work on coefficients: one kernel computes the tables from them, and one the gradients from the
sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.cema.triton_forward import (
    add_product,
    added,
    complex_product,
    entering,
    into_state,
    last_item,
    load_borders,
    load_channels,
    load_pair,
    load_state,
    over_steps,
    places,
    power,
    rough_product,
    rounded_factor,
    state_factor,
    store_pair,
    zeros_pair,
)
from gecko.ops.timestep_norm.triton_tiles import at_step

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _advance(h, d, b_x, g, late, q, precision: tl.constexpr):
    """Return h and h̃ after one more chunk of inputs (channels, items, chunk)."""
    h = complex_product(h, q)
    d = add_product(h, q, d)
    h = rough_product(b_x, g[0], h[0], precision), rough_product(b_x, g[1], h[1], precision)
    return h, (rough_product(b_x, late[0], d[0], precision), rough_product(b_x, late[1], d[1], precision))


@triton.jit
def _added(
    p_x, borders, i_d, channels, unit, g, late, of_chunk, precision: tl.constexpr, chunk: tl.constexpr,
    items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Return h and h̃ after each item, starting from zero."""
    h, d = zeros_pair((b_d, items, b_n)), zeros_pair((b_d, items, b_n))
    for step in range(unit // chunk):
        offsets, mask = places(borders, step, unit, i_d, channels, False, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        h, d = _advance(h, d, b_x, g, late, of_chunk, precision)
    return h, d


@triton.jit
def _entering(kind, chunks, u, d, of_unit, c, e, items: tl.constexpr):
    """Return h and h̃ before each item of a tile, from ``_added`` for the item before each (u, d) and from those after
    the tile before (c, e).

    With the decay a of a unit, h ← a h + u and h̃ ← a h̃ + chunks · a h + ũ. The scan of h gives a h, the difference of
    two known numbers, and so the inputs of the scan of h̃."""
    h = entering(kind, u, of_unit, c, items)
    d = d[0] + chunks * (h[0] - u[0]), d[1] + chunks * (h[1] - u[1])
    return h, entering(kind, d, of_unit, e, items)


@triton.jit
def _add_states(by, b_g, z, precision: tl.constexpr):
    """Add Σ g z over items, for g (channels, chunk, items) and states z (channels, items, modes) before a chunk."""
    # 11 bits of a state are too few for float16, and unlike the tables of a chunk it cannot be rounded only once.
    mode: tl.constexpr = "tf32x3" if precision == "tf32" else precision
    real = rough_product(b_g, state_factor(z[0], mode), by[0], mode)
    return real, rough_product(b_g, state_factor(z[1], mode), by[1], mode)


@triton.jit
def _out_of_states(w, by):
    """Return Σ_t w_t s_t, (channels, modes), of w and s (channels, steps, modes): w_t is the power of q at step t of a
    chunk, s_t the sum over items and chunks of g_t z, of the output's gradient and the state before the chunk."""
    z = complex_product(w, by)
    return tl.sum(z[0], 1), tl.sum(z[1], 1)


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
    q = load_pair(p_decay, i_mode, m_mode)
    inputs = load_pair(p_in, i_mode, m_mode)
    i_t = tl.arange(0, chunk)
    g = into_state(inputs, q, chunk - 1 - i_t)
    share = (chunk - 1 - i_t).to(tl.float32)[None, :, None] / chunk
    late = rounded_factor(g[0] * share, precision), rounded_factor(g[1] * share, precision)
    g = rounded_factor(g[0], precision), rounded_factor(g[1], precision)
    of_chunk, of_unit = over_steps(power(q, chunk, 6)), over_steps(power(q, unit, 10))

    state = 2 * row * channels * modes
    c, e = load_state(p_before, state, i_mode, m_mode), zeros_pair((b_d, b_n))
    by_h, by_d = zeros_pair((b_d, chunk, b_n)), zeros_pair((b_d, chunk, b_n))
    correlation = tl.zeros((b_d, chunk, chunk), tl.float32)
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        borders = load_borders(p_first, p_begin, p_end, i_item - 1)
        h, d = _added(p_x, borders, i_d, channels, unit, g, late, of_chunk, precision, chunk, items, b_d, b_n)
        h, d = _entering(tl.load(p_kind + i_item), unit // chunk, h, d, of_unit, c, e, items)
        borders = load_borders(p_first, p_begin, p_end, i_item)
        for step in range(unit // chunk):
            offsets, mask = places(borders, step, unit, i_d, channels, False, chunk)
            b_g = tl.permute(load_channels(p_grad, offsets, mask, precision), (0, 2, 1))
            b_x = load_channels(p_x, offsets, mask, precision)
            by_h = _add_states(by_h, b_g, h, precision)
            by_d = _add_states(by_d, b_g, d, precision)
            correlation = rough_product(b_g, b_x, correlation, precision)
            h, d = _advance(h, d, b_x, g, late, of_chunk, precision)
        c, e = last_item(h, items), last_item(d, items)
    store_pair(p_after + state, i_mode, (chunk * e[0], chunk * e[1]), m_mode)
    i_s = (row * channels + i_d)[:, None, None] * (chunk * chunk) + i_t[None, :, None] + i_t[None, None, :] * chunk
    own = (i_d < channels) & (tl.program_id(1) % mode_blocks == 0)
    tl.store(p_correlation + i_s, correlation, mask=own[:, None, None])
    # Loaded again, so that the compiler keeps no powers of q in registers from the first tables until here.
    q = load_pair(p_decay, i_mode, m_mode)
    w = power(over_steps(q), (i_t + 1)[None, :, None], 6)
    store_pair(p_sums + state, i_mode, _out_of_states(w, by_h), m_mode)
    steps = (i_t + 1).to(tl.float32)[None, :, None]
    by_d = chunk * by_d[0] + steps * by_h[0], chunk * by_d[1] + steps * by_h[1]
    store_pair(p_derivatives + state, i_mode, _out_of_states(w, by_d), m_mode)


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
    q = (size * cosine).to(tl.float32), (size * sine).to(tl.float32)
    store_pair(p_pair, i_k, (b_p, tl.zeros_like(b_p)), m_k)
    store_pair(p_decay, i_k, q, m_k)
    gamma = load_pair(p_out, i_k, m_k)
    z = tl.full(b_p.shape, 1.0, tl.float32), tl.zeros_like(b_p)
    for lag in range(0, chunk):
        b_k = tl.sum(b_p * (gamma[0] * z[0] - gamma[1] * z[1]), 1)
        if p_skip is not None:
            b_k += tl.load(p_skip + i_d, mask=m_d & (lag == 0), other=0.0)
        tl.store(p_response + i_d * chunk + lag, b_k, mask=m_d)
        z = complex_product(z, q)


@triton.jit
def _add_correlations(
    p_correlation, sums, by, b_skip, z, q, i_d, m_d, chunk: tl.constexpr, lags: tl.constexpr
):  # fmt: skip
    """Add the inputs of the chunk of each step to the sums of one row: z = p q^lag times the correlation at each lag.

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
            at = z[0] * b_lag[:, None], z[1] * b_lag[:, None]
            sums = added(sums, at)
            by = by[0] + (first + i) * at[0], by[1] + (first + i) * at[1]
            z = complex_product(z, q)
    return sums, by, b_skip


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
    q, zero = load_pair(p_decay, i_k, m_k), tl.zeros((b_d, b_n), tl.float32)
    b_skip, linear = tl.zeros((b_d,), tl.float32), zero
    sums, by, end = (zero, zero), (zero, zero), (zero, zero)
    i_at, row_size = i_k.to(tl.int64), tl.full((), chunk * chunk, tl.int64) * channels
    for _ in range(0, batch):
        sums = added(sums, load_pair(p_sums, i_at, m_k))
        by = added(by, load_pair(p_derivatives, i_at, m_k))
        sums, by, b_skip = _add_correlations(p_correlation, sums, by, b_skip, (b_p, zero), q, i_d, m_d, chunk, lags)
        if p_grad_after is not None:
            given = load_pair(p_grad_after, i_at, m_k)
            z = load_pair(p_last, i_at, m_k)
            end = add_product(end, (z[0], -z[1]), given)
            z = load_pair(p_after, i_at, m_k)
            linear += given[0] * z[0] + given[1] * z[1]
        if p_before is not None:
            given = load_pair(p_grad_before, i_at, m_k)
            z = load_pair(p_before, i_at, m_k)
            linear -= given[0] * z[0] + given[1] * z[1]
        i_at += channels * modes
        p_correlation += row_size
    gamma = load_pair(p_out, i_k, m_k)
    by = complex_product(gamma, by)
    tl.store(p_grad_skip + i_d, b_skip, mask=m_d)
    tl.store(p_grad_log + i_k, by[0] + end[0], mask=m_k)
    tl.store(p_grad_angle + i_k, end[1] - by[1], mask=m_k)
    tl.store(p_grad_in + i_k, (linear + gamma[0] * sums[0] - gamma[1] * sums[1]) / b_p, mask=m_k)
    store_pair(p_grad_out, i_k, (sums[0], -sums[1]), m_k)
