# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What CEMA's kernels share: complex numbers as two tiles, powers of q, and the tiles of a tensor's items."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def complex_product(a_real, a_imag, b_real, b_imag):
    """a b."""
    return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real


@triton.jit
def power(q_real, q_imag, exponent, bits: tl.constexpr):
    """q^exponent for integers below 2^bits, by squaring: rounding grows with the bits, not with the angle."""
    real = tl.where(exponent % 2 == 1, q_real, 1.0)
    imag = tl.where(exponent % 2 == 1, q_imag, 0.0)
    for bit in tl.static_range(1, bits):
        q_real, q_imag = complex_product(q_real, q_imag, q_real, q_imag)
        more_real, more_imag = complex_product(real, imag, q_real, q_imag)
        taken = (exponent >> bit) % 2 == 1
        real = tl.where(taken, more_real, real)
        imag = tl.where(taken, more_imag, imag)
    return real, imag


@triton.jit
def add_product(real, imag, a_real, a_imag, b_real, b_imag):
    """real + i imag + a b."""
    more_real, more_imag = complex_product(a_real, a_imag, b_real, b_imag)
    return real + more_real, imag + more_imag


@triton.jit
def power_for_items(q_real, q_imag, exponent, bits: tl.constexpr):
    """q^exponent of (channels, modes), for tiles of (channels, items, modes)."""
    real, imag = power(q_real, q_imag, exponent, bits)
    return real[:, None, :], imag[:, None, :]


@triton.jit
def into_state(in_real, in_imag, q_real, q_imag, exponents):
    """in q^exponent, (channels, steps, modes): the matrix of a chunk's inputs into the state."""
    real, imag = power(q_real[:, None, :], q_imag[:, None, :], exponents[None, :, None], 5)
    return complex_product(in_real[:, None, :], in_imag[:, None, :], real, imag)


@triton.jit
def load_pair(p_pair, i_pair, mask):
    """Neighbours in memory, as (real, imaginary); zero outside the mask."""
    return tl.load(p_pair + 2 * i_pair, mask=mask, other=0.0), tl.load(p_pair + 2 * i_pair + 1, mask=mask, other=0.0)


@triton.jit
def store_pair(p_pair, i_pair, real, imag, mask):
    """The inverse of ``load_pair``."""
    tl.store(p_pair + 2 * i_pair, real, mask=mask)
    tl.store(p_pair + 2 * i_pair + 1, imag, mask=mask)


@triton.jit
def load_borders(p_first, p_begin, p_end, i_item):
    """Of items: the token that is step 0 of their unit, the first step held, and the one after the last. Of item −1,
    which is none, zeros."""
    there = i_item >= 0
    i_first = tl.load(p_first + i_item, mask=there, other=0)
    i_begin = tl.load(p_begin + i_item, mask=there, other=0)
    return i_first, i_begin, tl.load(p_end + i_item, mask=there, other=0)


@triton.jit
def places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse: tl.constexpr, chunk: tl.constexpr):
    """Offsets and mask (items, chunk, channels) of chunk ``step`` of every item; backwards, from the unit's end."""
    i_t = step * chunk + tl.arange(0, chunk)[None, :]
    i_t = unit - 1 - i_t if reverse else i_t
    held = (i_t >= i_begin[:, None]) & (i_t < i_end[:, None])
    offsets = (i_first[:, None] + i_t)[:, :, None] * channels + i_d[None, None, :]
    return offsets, held[:, :, None] & (i_d < channels)[None, None, :]


@triton.jit
def load_channels(p_x, offsets, mask):
    """(channels, items, chunk) in float32; zero outside the mask."""
    return tl.permute(tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32), (2, 0, 1))


@triton.jit
def last_item(b_h, items: tl.constexpr):
    """(channels, modes) of the last of (channels, items, modes)."""
    return tl.sum(tl.where((tl.arange(0, items) == items - 1)[None, :, None], b_h, 0.0), 1)
