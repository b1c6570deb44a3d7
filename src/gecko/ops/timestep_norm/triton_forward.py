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
def one_minus_exp(z):
    """Return 1 − exp(z) for z ≤ 0, without cancellation near 0."""
    near = tl.maximum(z, -0.5)
    series = near * (1 + near / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5 * (1 + near / 6 * (1 + near / 7))))))
    return tl.where(z > -0.5, -series, 1 - tl.exp(z))


@triton.jit
def program_place(program, tiles, groups: tl.constexpr, together: tl.constexpr):
    """Return the row, the tile and the groups of a program. Consecutive programs have consecutive groups."""
    across = (groups + together - 1) // together
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
def steps_before_tile(p_begin, i_row, i_tile, count, length, steps: tl.constexpr):
    """Return the number of steps of the current document before the tile; ``count`` of them before the call."""
    begin = i_tile * steps
    count += begin
    if p_begin is not None:
        started = tl.load(p_begin + i_row * length + begin - 1, mask=begin > 0, other=-1)
        count = tl.where(started < 0, count, begin - started)
    return count.to(tl.float32)


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
    return b_m, b_v, steps_before_tile(p_begin, i_row, i_tile, tl.load(p_count + i_row), length, steps)


@triton.jit
def follow(b_a, b_b, b_m, b_v, b_m_before, b_v_before, count_before, cumulative: tl.constexpr):
    """Return mean and variance at each step of a tile, from its ``_scan`` and from the statistics before it."""
    if cumulative:
        before = b_a * 0 + count_before
        _, _, b_m, b_v = _join_pooled(b_a, before, b_m_before[None], b_v_before[None], b_a, b_b, b_m, b_v)
    else:
        b_m, b_v = b_m + b_a * b_m_before[None], b_v + b_b * b_v_before[None]
    return b_m, b_v


@triton.jit
def running_statistics(b_mu, b_sigma2, b_m_before, b_v_before, count_before, m_first, m_t,
                beta_mean, beta_variance, added_mean, added_variance, cumulative: tl.constexpr):  # fmt: skip
    """Return the running mean and variance at every step of the tile, without bias correction."""
    b_a, b_b, b_m, b_v = _scan(
        b_mu, b_sigma2, m_first, m_t, beta_mean, beta_variance, added_mean, added_variance, cumulative
    )
    return follow(b_a, b_b, b_m, b_v, b_m_before, b_v_before, count_before, cumulative)


@triton.jit
def bias_corrections(b_count, log_mean, log_variance, cumulative: tl.constexpr):
    """Return the divisors of the running mean and variance: 1 − βⁿ, or 1 for cumulative statistics."""
    if cumulative:
        by_mean = tl.full(b_count.shape, 1.0, tl.float32)
        by_variance = by_mean
    else:
        by_mean, by_variance = one_minus_exp(b_count * log_mean), one_minus_exp(b_count * log_variance)
    return by_mean, by_variance


@triton.jit
def row_of(b_x, i_t, i):
    """Return the row of b_x (steps, groups) at step i."""
    return tl.sum(tl.where((i_t == i)[:, None], b_x, 0.0), 0)


@triton.jit
def _words(p_words, i_row, i_tile, i_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Return the places of two words per group, (…, groups, 2): of each tile, then of each block of tiles."""
    slots = tiles + (tiles + in_block - 1) // in_block
    places = ((i_row * slots + i_tile)[:, None] * groups + i_group[None])[:, :, None] * 2 + tl.arange(0, 2)[None, None]
    return p_words + 1 + places


@triton.jit
def _publish(p_words, i_row, i_slot, i_group, b_m, b_v, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Store mean and variance so that other programs see each number together with the bit that says it is there."""
    p_word = _words(p_words, i_row, tl.zeros([1], tl.int64) + i_slot, i_group, tiles, groups, in_block)
    b_bits = tl.join(b_m[None], b_v[None]).to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(
        p_word, (b_bits << 32) | 1, mask=tl.broadcast_to(m_group[None, :, None], b_bits.shape), sem="relaxed"
    )


@triton.jit
def _numbers(b_word):
    """Return mean and variance of published words (…, groups, 2)."""
    return tl.split((b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _published(p_words, i_row, i_tile, first, i_group, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Wait until the statistics of each tile alone from tile ``first`` to the one before ``i_tile``, and those after
    the block of tiles before, are there. Return these words, zero for other tiles (in_block, groups, 2), and (1, …).

    Words are read by an atomic addition of 0, past all caches. Each has its number and its bit in one store, so no
    order of memory accesses matters. Programs of a smaller number do not wait for this one, so the wait ends."""
    i_slot = first + tl.arange(0, in_block).to(tl.int64)
    p_tile = _words(p_words, i_row, i_slot, i_group, tiles, groups, in_block)
    i_block = tl.zeros([1], tl.int64) + tiles + first // in_block - 1
    p_block = _words(p_words, i_row, i_block, i_group, tiles, groups, in_block)
    m_tile = tl.broadcast_to((i_slot < i_tile)[:, None, None] & m_group[None, :, None], p_tile.shape)
    m_block = tl.broadcast_to((i_block >= tiles)[:, None, None] & m_group[None, :, None], p_block.shape)
    b_none, b_zero = tl.zeros(p_tile.shape, tl.int64), tl.zeros(p_block.shape, tl.int64)
    b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
    b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    while (tl.min(b_tile & 1) & tl.min(b_block & 1)) == 0:
        b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
        b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    return b_tile, b_block


@triton.jit
def _after_tiles(p_begin, i_row, i_end, first, b_m, b_v, b_m_before, b_v_before, count, length,
                 log_mean, log_variance, steps: tl.constexpr, cumulative: tl.constexpr,
                 in_block: tl.constexpr):  # fmt: skip
    """Return mean and variance after the tiles from ``first`` to the one before ``i_end``, from those of each tile
    alone (in_block, groups) and those before them. ``count``: steps of the document before the call."""
    zeros = tl.zeros_like(b_m)
    i_tile = first + tl.arange(0, in_block).to(tl.int64)
    held = i_tile < i_end
    # A document that started in the tile, or at its first step, does not depend on earlier tiles.
    i_begin = load_begins(p_begin, i_row, tl.where(held, i_tile * steps + steps - 1, length), length)
    goes_on = (i_begin < i_tile * steps) | (held == 0)
    b_goes_on = tl.where(goes_on, 1.0, 0.0)[:, None] + zeros
    if cumulative:
        # Steps of the last document in the tile: all of them if it started before.
        b_held = tl.where(held, 1.0, 0.0)[:, None] + zeros
        b_n = tl.where(goes_on, steps, i_tile * steps + steps - i_begin).to(tl.float32)[:, None] * b_held
        b_a, b_n, b_m, b_v = tl.associative_scan((b_goes_on, b_n, b_m, b_v), 0, _join_pooled)
        i_last = tl.zeros([1], tl.int64) + tl.maximum(first * steps - 1, 0)
        i_begun = tl.where(first > 0, load_begins(p_begin, i_row, i_last, length), -1)
        count_before = tl.where(i_begun < 0, count + first * steps, first * steps - i_begun)
        before = zeros + count_before.to(tl.float32)[:, None]
        _, _, b_m, b_v = _join_pooled(b_a, before, b_m_before, b_v_before, b_a, b_n, b_m, b_v)
    else:
        b_a = tl.where(held, tl.exp(steps * log_mean), 1.0)[:, None] * b_goes_on
        b_b = tl.where(held, tl.exp(steps * log_variance), 1.0)[:, None] * b_goes_on
        b_a, b_b, b_m, b_v = tl.associative_scan((b_a, b_b, b_m, b_v), 0, join_decayed)
        b_m, b_v = b_m + b_a * b_m_before, b_v + b_b * b_v_before
    i_final = first + in_block - 1
    return row_of(b_m, i_tile, i_final), row_of(b_v, i_tile, i_final)


@triton.jit
def _before_tile(p_words, p_mean, p_variance, p_begin, i_row, i_tile, i_group, count, length, tiles,
                 log_mean, log_variance, groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
                 in_block: tl.constexpr):  # fmt: skip
    """Return mean and variance before a tile, always summed in the same order: those after the block of tiles before,
    and those of each tile alone since."""
    m_group, first = i_group < groups, i_tile // in_block * in_block
    state = i_row * groups + i_group
    b_m = tl.load(p_mean + state, mask=m_group & (first == 0), other=0.0)[None]
    b_v = tl.load(p_variance + state, mask=m_group & (first == 0), other=0.0)[None]
    if p_words is None:
        b_m, b_v = tl.sum(b_m, 0), tl.sum(b_v, 0)
    else:
        b_tile, b_block = _published(p_words, i_row, i_tile, first, i_group, m_group, tiles, groups, in_block)
        b_m_block, b_v_block = _numbers(b_block)
        b_m_tile, b_v_tile = _numbers(b_tile)
        b_m, b_v = _after_tiles(
            p_begin, i_row, i_tile, first, b_m_tile, b_v_tile, b_m + b_m_block, b_v + b_v_block, count, length,
            log_mean, log_variance, steps, cumulative, in_block,
        )  # fmt: skip
    return b_m, b_v


@triton.jit(do_not_specialize=["length", "tiles"])
def normalise_tiles(p_x, p_begin, p_carry, p_words, length, tiles, p_count, p_mean, p_variance, p_weight, p_bias, p_y,
               p_count_after, p_mean_after, p_variance_after, eps,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
               in_block: tl.constexpr):  # fmt: skip
    """Compute y of each tile. The last tile of a row stores the state; each other one passes its statistics on.

    p_words: (1 + B · (tiles + blocks) · G · 2,) int64 zeros, or None if a row has one tile. p_carry: statistics before
    each tile except the first, (B, tiles − 1, 2, G)."""
    program = tl.program_id(0).to(tl.int64)
    if p_words is not None:
        program = tl.atomic_add(p_words, 1, sem="relaxed")  # programs may start in any order
    i_row, i_tile, i_group = program_place(program, tiles, groups, together)
    m_group = i_group < groups
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = held_places(i_t, i_group, length, groups, size, width)
    offsets = tile_offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = group_moments(b_x, m_x, size)
    i_begin = load_begins(p_begin, i_row, i_t, length)
    b_a, b_b, b_m, b_v = _scan(
        b_mu, b_sigma2, i_begin == i_t, i_t < length, beta_mean, beta_variance, added_mean, added_variance, cumulative
    )
    i_last, later = i_tile * steps + steps - 1, i_tile < tiles - 1
    if p_words is not None:
        _publish(
            p_words, i_row, i_tile, i_group, row_of(b_m, i_t, i_last), row_of(b_v, i_t, i_last), m_group & later, tiles,
            groups, in_block,
        )  # fmt: skip
    count_before = tl.load(p_count + i_row)
    b_m_before, b_v_before = _before_tile(
        p_words, p_mean, p_variance, p_begin, i_row, i_tile, i_group, count_before, length, tiles, log_mean,
        log_variance, groups, steps, cumulative, in_block,
    )  # fmt: skip
    steps_before = steps_before_tile(p_begin, i_row, i_tile, count_before, length, steps)
    b_m, b_v = follow(b_a, b_b, b_m, b_v, b_m_before, b_v_before, steps_before, cumulative)
    if p_words is not None:
        ends = later & (i_tile % in_block == in_block - 1)
        _publish(
            p_words, i_row, tiles + i_tile // in_block, i_group, row_of(b_m, i_t, i_last), row_of(b_v, i_t, i_last),
            m_group & ends, tiles, groups, in_block,
        )  # fmt: skip
        carry = ((i_row * (tiles - 1) + i_tile - 1) * 2) * groups + i_group
        tl.store(p_carry + carry, b_m_before, mask=m_group & (i_tile > 0))
        tl.store(p_carry + carry + groups, b_v_before, mask=m_group & (i_tile > 0))
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
