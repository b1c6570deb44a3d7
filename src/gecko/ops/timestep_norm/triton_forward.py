"""Triton kernels of the timestep norm, and device functions shared with its gradients (``triton_backward.py``).

Time is axis 0, groups are axis 1, and the features of a group are axis 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def join_decayed(a_before, b_before, m_before, v_before, a, b, m, v):
    """Compose two consecutive ranges of steps m ← a m + …, v ← b v + …."""
    return a_before * a, b_before * b, a * m_before + m, b * v_before + v


@triton.jit
def _join_pooled(k_before, n_before, m_before, v_before, k, n, m, v):
    """Combine count, mean and variance of two consecutive ranges of steps. k is 0 if a document starts in the second,
    else 1."""
    n_before = k * n_before
    total = n_before + n
    share = n_before / tl.maximum(total, 1.0)
    step = m_before - m
    return k_before * k, total, m + share * step, v + share * (v_before - v + (1 - share) * step * step)


@triton.jit
def _one_minus_exp(z):
    """Return 1 − exp(z) for z ≤ 0, without cancellation near 0."""
    near = tl.maximum(z, -0.5)
    series = near * (1 + near / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5 * (1 + near / 6 * (1 + near / 7))))))
    return tl.where(z > -0.5, -series, 1 - tl.exp(z))


@triton.jit
def program_place(tiles, groups: tl.constexpr, together: tl.constexpr):
    """Return the row, the tile and the groups of this program. Consecutive programs have consecutive groups."""
    across = (groups + together - 1) // together
    program = tl.program_id(0).to(tl.int64)
    i_group = (program % across) * together + tl.arange(0, together)
    return program // across // tiles, program // across % tiles, i_group


@triton.jit
def tile_offsets(i_row, i_t, i_group, length, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    return ((i_row * length + i_t) * features)[:, None, None] + feature_offsets(i_group, size, width)[None]


@triton.jit
def feature_offsets(i_group, size: tl.constexpr, width: tl.constexpr):
    return i_group[:, None] * size + tl.arange(0, width)[None]


@triton.jit
def feature_mask(i_group, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    return (i_group < groups)[:, None] & (tl.arange(0, width) < size)[None]


@triton.jit
def held_places(i_t, i_group, length, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    return (i_t < length)[:, None, None] & feature_mask(i_group, groups, size, width)[None]


@triton.jit
def load_begins(p_begin, i_row, i_t, length):
    if p_begin is None:
        i_begin = tl.full(i_t.shape, -1, tl.int64)
    else:
        i_begin = tl.load(p_begin + i_row * length + i_t, mask=i_t < length, other=-1).to(tl.int64)
    return i_begin


@triton.jit
def counts_up_to(p_count, i_row, i_t, i_begin):
    """Return the number of steps of the document up to and including each step."""
    return tl.where(i_begin < 0, tl.load(p_count + i_row) + i_t, i_t - i_begin) + 1


@triton.jit
def group_moments(b_x, m_x, size: tl.constexpr):
    b_mu = tl.sum(b_x, 2) / size
    b_centered = tl.where(m_x, b_x - b_mu[:, :, None], 0.0)
    return b_mu, tl.sum(b_centered * b_centered, 2) / size


@triton.jit
def _scan(b_mu, b_sigma2, m_first, m_t, beta_mean, beta_variance, added_mean, added_variance,
          cumulative: tl.constexpr):  # fmt: skip
    """Scan the steps of the tile: return the combined arguments of the join up to each step. Steps past the end are
    identities."""
    b_held = tl.where(m_t, 1.0, 0.0)[:, None] + tl.zeros_like(b_mu)
    b_goes_on = tl.where(m_first & m_t, 0.0, 1.0)[:, None] + tl.zeros_like(b_mu)
    if cumulative:
        b_all = tl.associative_scan((b_goes_on, b_held, b_mu * b_held, b_sigma2 * b_held), 0, _join_pooled)
    else:
        b_a = tl.where(m_t[:, None], beta_mean, 1.0) * b_goes_on
        b_b = tl.where(m_t[:, None], beta_variance, 1.0) * b_goes_on
        b_m, b_v = added_mean * b_mu * b_held, added_variance * b_sigma2 * b_held
        b_all = tl.associative_scan((b_a, b_b, b_m, b_v), 0, join_decayed)
    return b_all


@triton.jit
def load_before_tile(p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles,
                 groups: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Return mean, variance and number of steps of the current document before the tile."""
    m_group, first = i_group < groups, i_tile == 0
    state = i_row * groups + i_group
    carry = ((i_row * (tiles - 1) + i_tile - 1) * 2) * groups + i_group
    b_m = tl.load(p_mean + state, mask=m_group & first, other=0.0)
    b_m += tl.load(p_carry + carry, mask=m_group & (i_tile > 0), other=0.0)
    b_v = tl.load(p_variance + state, mask=m_group & first, other=0.0)
    b_v += tl.load(p_carry + carry + groups, mask=m_group & (i_tile > 0), other=0.0)
    begin = i_tile * steps
    count = tl.load(p_count + i_row) + begin
    if p_begin is not None:
        started = tl.load(p_begin + i_row * length + begin - 1, mask=begin > 0, other=-1)
        count = tl.where(started < 0, count, begin - started)
    return b_m, b_v, count.to(tl.float32)


@triton.jit
def running_statistics(b_mu, b_sigma2, b_m_before, b_v_before, count_before, m_first, m_t,
                beta_mean, beta_variance, added_mean, added_variance, cumulative: tl.constexpr):  # fmt: skip
    """Return the running mean and variance at every step of the tile, without bias correction."""
    b_a, b_b, b_m, b_v = _scan(
        b_mu, b_sigma2, m_first, m_t, beta_mean, beta_variance, added_mean, added_variance, cumulative
    )
    if cumulative:
        before = b_a * 0 + count_before
        _, _, b_m, b_v = _join_pooled(b_a, before, b_m_before[None], b_v_before[None], b_a, b_b, b_m, b_v)
    else:
        b_m, b_v = b_m + b_a * b_m_before[None], b_v + b_b * b_v_before[None]
    return b_m, b_v


@triton.jit
def bias_corrections(b_count, log_mean, log_variance, cumulative: tl.constexpr):
    """Return the divisors of the running mean and variance: 1 − βⁿ, or 1 for cumulative statistics."""
    if cumulative:
        by_mean = tl.full(b_count.shape, 1.0, tl.float32)
        by_variance = by_mean
    else:
        by_mean, by_variance = _one_minus_exp(b_count * log_mean), _one_minus_exp(b_count * log_variance)
    return by_mean, by_variance


@triton.jit
def row_of(b_x, i_t, i):
    """Return the row of b_x (steps, groups) at step i."""
    return tl.sum(tl.where((i_t == i)[:, None], b_x, 0.0), 0)


@triton.jit(do_not_specialize=["length", "tiles"])
def summaries(p_x, p_begin, p_carry, length, tiles,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Store the mean and variance of each tile, from its own steps alone, to p_carry (B, tiles − 1, 2, G)."""
    i_row, i_tile, i_group = program_place(tiles - 1, groups, together)
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = held_places(i_t, i_group, length, groups, size, width)
    offsets = tile_offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = group_moments(b_x, m_x, size)
    m_first = load_begins(p_begin, i_row, i_t, length) == i_t
    _, _, b_m, b_v = _scan(
        b_mu, b_sigma2, m_first, i_t < length, beta_mean, beta_variance, added_mean, added_variance, cumulative
    )
    last = i_tile * steps + steps - 1
    out = p_carry + ((i_row * (tiles - 1) + i_tile) * 2) * groups + i_group
    tl.store(out, row_of(b_m, i_t, last), mask=i_group < groups)
    tl.store(out + groups, row_of(b_v, i_t, last), mask=i_group < groups)


@triton.jit(do_not_specialize=["length", "tiles"])
def carries(p_count, p_mean, p_variance, p_begin, p_carry, length, tiles,
             beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
             groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
             columns: tl.constexpr, tiles_at_once: tl.constexpr):  # fmt: skip
    """Replace the statistics of each tile alone in p_carry by the running statistics after the tile."""
    i_row, _zero, i_group = program_place(1, groups, columns)
    m_group = i_group < groups
    b_m_before = tl.load(p_mean + i_row * groups + i_group, mask=m_group, other=0.0)
    b_v_before = tl.load(p_variance + i_row * groups + i_group, mask=m_group, other=0.0)
    count = tl.load(p_count + i_row)
    zeros = tl.zeros([tiles_at_once, columns], tl.float32)
    for first in range(0, tiles - 1, tiles_at_once):
        i_tile = first + tl.arange(0, tiles_at_once).to(tl.int64)
        held = i_tile < tiles - 1
        # A document that started in the tile, or at its first step, does not depend on earlier tiles.
        i_begin = load_begins(p_begin, i_row, tl.where(held, i_tile * steps + steps - 1, length), length)
        goes_on = (i_begin < i_tile * steps) | (held == 0)
        b_goes_on = tl.where(goes_on, 1.0, 0.0)[:, None] + zeros
        b_held = tl.where(held, 1.0, 0.0)[:, None] + zeros
        p_tile = p_carry + ((i_row * (tiles - 1) + i_tile) * 2 * groups)[:, None] + i_group[None]
        m_tile = held[:, None] & m_group[None]
        b_m, b_v = tl.load(p_tile, mask=m_tile, other=0.0), tl.load(p_tile + groups, mask=m_tile, other=0.0)
        if cumulative:
            # Steps of the last document in the tile: all of them if it started before.
            b_n = tl.where(goes_on, steps, i_tile * steps + steps - i_begin).to(tl.float32)[:, None] * b_held
            b_a, b_b, b_m, b_v = tl.associative_scan((b_goes_on, b_n, b_m, b_v), 0, _join_pooled)
            i_last = tl.zeros([1], tl.int64) + tl.maximum(first * steps - 1, 0)
            i_begun = tl.where(first > 0, load_begins(p_begin, i_row, i_last, length), -1)
            count_before = tl.where(i_begun < 0, count + first * steps, first * steps - i_begun)
            before = tl.zeros_like(b_a) + count_before.to(tl.float32)[:, None]
            _, _, b_m, b_v = _join_pooled(b_a, before, b_m_before[None], b_v_before[None], b_a, b_b, b_m, b_v)
        else:
            b_a = tl.where(held, tl.exp(steps * log_mean), 1.0)[:, None] * b_goes_on
            b_b = tl.where(held, tl.exp(steps * log_variance), 1.0)[:, None] * b_goes_on
            b_a, b_b, b_m, b_v = tl.associative_scan((b_a, b_b, b_m, b_v), 0, join_decayed)
            b_m, b_v = b_m + b_a * b_m_before[None], b_v + b_b * b_v_before[None]
        tl.store(p_tile, b_m, mask=m_tile)
        tl.store(p_tile + groups, b_v, mask=m_tile)
        b_m_before = row_of(b_m, i_tile, first + tiles_at_once - 1)
        b_v_before = row_of(b_v, i_tile, first + tiles_at_once - 1)


@triton.jit(do_not_specialize=["length", "tiles"])
def normalise_tiles(p_x, p_begin, p_carry, length, tiles, p_count, p_mean, p_variance, p_weight, p_bias, p_y,
               p_count_after, p_mean_after, p_variance_after, eps,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Compute y of each tile. The last tile of a row stores the state."""
    i_row, i_tile, i_group = program_place(tiles, groups, together)
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = held_places(i_t, i_group, length, groups, size, width)
    offsets = tile_offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = group_moments(b_x, m_x, size)
    i_begin = load_begins(p_begin, i_row, i_t, length)
    b_m_before, b_v_before, count_before = load_before_tile(
        p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles, groups, steps
    )
    b_m, b_v = running_statistics(
        b_mu, b_sigma2, b_m_before, b_v_before, count_before, i_begin == i_t, i_t < length,
        beta_mean, beta_variance, added_mean, added_variance, cumulative,
    )  # fmt: skip
    count = counts_up_to(p_count, i_row, i_t, i_begin)
    by_mean, by_variance = bias_corrections(count.to(tl.float32), log_mean, log_variance, cumulative)
    b_rstd = tl.rsqrt(b_v / by_variance[:, None] + eps)
    b_y = (b_x - (b_m / by_mean[:, None])[:, :, None]) * b_rstd[:, :, None]
    i_feature = feature_offsets(i_group, size, width)
    m_feature = feature_mask(i_group, groups, size, width)
    if p_weight is not None:
        b_y *= 1 + tl.load(p_weight + i_feature, mask=m_feature, other=0.0).to(tl.float32)[None]
    if p_bias is not None:
        b_y += tl.load(p_bias + i_feature, mask=m_feature, other=0.0).to(tl.float32)[None]
    tl.store(p_y + offsets, b_y.to(p_y.dtype.element_ty), mask=m_x)
    m_last = (i_group < groups) & (i_tile == tiles - 1)
    tl.store(p_mean_after + i_row * groups + i_group, row_of(b_m, i_t, length - 1), mask=m_last)
    tl.store(p_variance_after + i_row * groups + i_group, row_of(b_v, i_t, length - 1), mask=m_last)
    tl.store(p_count_after + i_row + i_t * 0, count, mask=(i_t == length - 1) & (tl.min(i_group, 0) == 0))
