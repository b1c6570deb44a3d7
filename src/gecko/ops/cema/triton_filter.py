# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernel of CEMA's filter, forwards in time for outputs and backwards for the gradient of inputs.

Forwards, with z the state before a step:     z ← q z + in x_t,   y_t = Re Σ out z.
Backwards, with z what later steps hand over: y_t = Re Σ out (z + in x_t),   z ← q (z + in x_t).
One program takes a few channels of one row from end to end, sixteen items at a time (``gecko.ops.cema.items``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.cema.triton_tiles import (
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
    store_pair,
)


@triton.jit
def _follow(a_real, a_imag, u_real, u_imag, b_real, b_imag, v_real, v_imag):
    """z → a z + u, and after it z → b z + v, as one such step."""
    decay_real, decay_imag = complex_product(b_real, b_imag, a_real, a_imag)
    real, imag = complex_product(b_real, b_imag, u_real, u_imag)
    return decay_real, decay_imag, real + v_real, imag + v_imag


@triton.jit
def _out_of_state(out_real, out_imag, q_real, q_imag, exponents):
    """out q^exponent, conjugated, (channels, modes, steps): its product with a state is the real part of both's."""
    real, imag = power(q_real[:, :, None], q_imag[:, :, None], exponents[None, None, :], 5)
    real, imag = complex_product(out_real[:, :, None], out_imag[:, :, None], real, imag)
    return real, -imag


@triton.jit
def _load_responses(p_response, i_d, channels, chunk: tl.constexpr):
    """From each input of a chunk to each output, (channels, chunk, chunk)."""
    i_t = tl.arange(0, chunk)
    i_lag = i_t[None, :] - i_t[:, None]
    mask = (i_d < channels)[:, None, None] & (i_lag >= 0)[None, :, :]
    return tl.load(p_response + i_d[:, None, None] * chunk + i_lag[None, :, :], mask=mask, other=0.0)


@triton.jit
def _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision: tl.constexpr):
    """z after one more chunk of inputs (channels, items, chunk)."""
    z_real, z_imag = complex_product(z_real, z_imag, step_real, step_imag)
    z_real = tl.dot(b_x, g_real, z_real, input_precision=precision)
    return z_real, tl.dot(b_x, g_imag, z_imag, input_precision=precision)


@triton.jit
def _added(
    p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, reverse: tl.constexpr,
    precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """z after each item, from nothing before it."""
    z_real = tl.zeros((b_d, items, b_n), tl.float32)
    z_imag = tl.zeros((b_d, items, b_n), tl.float32)
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask)
        z_real, z_imag = _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision)
    return z_real, z_imag


@triton.jit
def _entering(kind, z_real, z_imag, unit_real, unit_imag, c_real, c_imag):
    """z before each item of a tile, from what the item before each ``_added``, and z before the tile (c)."""
    continues = (kind == 1)[None, :, None]
    a_real = tl.where(continues, unit_real, tl.where((kind == 2)[None, :, None], 1.0, 0.0))
    a_imag = tl.where(continues, unit_imag, 0.0)
    z_real = tl.where(continues, z_real, 0.0)
    z_imag = tl.where(continues, z_imag, 0.0)
    a_real, a_imag, z_real, z_imag = tl.associative_scan((a_real, a_imag, z_real, z_imag), 1, _follow)
    return add_product(z_real, z_imag, a_real, a_imag, c_real[:, None, :], c_imag[:, None, :])


@triton.jit
def _write_outputs(
    p_x, p_y, i_first, i_begin, i_end, i_d, channels, unit, z_real, z_imag, b_response, w_real, w_imag, g_real, g_imag,
    step_real, step_imag, reverse: tl.constexpr, precision: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """y of a tile's items, and z after each, from z before each."""
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask)
        b_y = tl.dot(b_x, b_response, input_precision=precision)
        b_y = tl.dot(z_real, w_real, b_y, input_precision=precision)
        b_y = tl.dot(z_imag, w_imag, b_y, input_precision=precision)
        tl.store(p_y + offsets, tl.permute(b_y, (1, 2, 0)).to(p_y.dtype.element_ty), mask=mask)
        z_real, z_imag = _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision)
    return z_real, z_imag


@triton.jit(do_not_specialize=["unit"])
def filter_kernel(
    p_x, p_y, p_response, p_in, p_out, p_decay, p_before, p_after, p_first, p_begin, p_end, p_kind, p_tiles,
    channels, modes, unit,
    reverse: tl.constexpr, precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """y and the last z of one row, from the z before it.

    p_x, p_y: (tokens, channels). p_response: (channels, chunk). p_in, p_out, p_decay: (channels, modes, 2).
    p_before, p_after: (rows, channels, modes, 2). p_first … p_kind: (tiles · items,). p_tiles: (rows + 1,).
    """
    row = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(1) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    m_mode = (i_d < channels)[:, None] & (i_n < modes)[None, :]
    i_mode = i_d[:, None] * modes + i_n[None, :]
    q_real, q_imag = load_pair(p_decay, i_mode, m_mode)
    in_real, in_imag = load_pair(p_in, i_mode, m_mode)
    out_real, out_imag = load_pair(p_out, i_mode, m_mode)

    # The matrices of a chunk: into the state (g), out of it (w), and from input to output.
    i_t = tl.arange(0, chunk)
    late: tl.constexpr = 1 if reverse else 0
    g_real, g_imag = into_state(in_real, in_imag, q_real, q_imag, chunk - 1 + late - i_t)
    w_real, w_imag = _out_of_state(out_real, out_imag, q_real, q_imag, i_t + 1 - late)
    b_response = _load_responses(p_response, i_d, channels, chunk)
    step_real, step_imag = power_for_items(q_real, q_imag, chunk, 5)
    unit_real, unit_imag = power_for_items(q_real, q_imag, unit, 9)

    i_state = row * channels * modes + i_mode
    c_real, c_imag = load_pair(p_before, i_state, m_mode)
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        # What the item before each adds: so moved by one, the states that enter all of them are one scan. (That of a
        # row's first item is another row's, or none: such an item continues nothing.)
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item - 1)
        z_real, z_imag = _added(
            p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, reverse, precision,
            chunk, items, b_d, b_n,
        )  # fmt: skip
        z_real, z_imag = _entering(tl.load(p_kind + i_item), z_real, z_imag, unit_real, unit_imag, c_real, c_imag)
        c_real = last_item(z_real, items)
        c_imag = last_item(z_imag, items)
        # The inputs once more, from the cache, now that the state before each item is known.
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item)
        z_real, z_imag = _write_outputs(
            p_x, p_y, i_first, i_begin, i_end, i_d, channels, unit, z_real, z_imag, b_response, w_real, w_imag, g_real,
            g_imag, step_real, step_imag, reverse, precision, chunk,
        )  # fmt: skip
        if tile == tl.load(p_tiles + row + 1) - 1:
            store_pair(p_after, i_state, last_item(z_real, items), last_item(z_imag, items), m_mode)
