"""Device functions shared by the forward and the backward kernel of the timestep norm.

A tile is ``spans`` spans of ``span`` steps. The steps at one place of all spans are a tensor (spans, groups, features),
and a tile is a tuple of ``span`` of them. So one thread holds all steps of its spans, whichever layout Triton chooses:
going through a span takes a few instructions per step, and only one number per span is exchanged between threads.

The programs of a launch exchange two numbers per tile and group, in the order of tiles: ``i_tile`` counts in the
direction of the scan. Tiles form blocks of ``in_block``. A program stores the numbers of its tile alone; the last one
of a block also stores those after the block.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: RUF005 -- Triton compiles no starred elements of tuples
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment


@triton.jit
def join_decayed(a_before, b_before, m_before, v_before, a, b, m, v):
    """Compose two consecutive ranges of steps m ← a m + …, v ← b v + …."""
    return a_before * a, b_before * b, a * m_before + m, b * v_before + v


@triton.jit
def join_pooled(k_before, n_before, m_before, v_before, k, n, m, v):
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
    i_group = (program % across).to(tl.int32) * together + tl.arange(0, together)
    return program // across // tiles, (program // across % tiles).to(tl.int32), i_group


@triton.jit
def times(first, i: tl.constexpr, span: tl.constexpr, spans: tl.constexpr):
    """Return step ``i`` of each span of the tile that starts at step ``first``."""
    return first + tl.arange(0, spans) * span + i


@triton.jit
def feature_offsets(i_group, size: tl.constexpr, width: tl.constexpr):
    return i_group[:, None] * size + tl.arange(0, width)[None]


@triton.jit
def feature_mask(i_group, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    return (i_group < groups)[:, None] & (tl.arange(0, width) < size)[None]


@triton.jit
def places_of_spans(i_group, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr, span: tl.constexpr,
                    spans: tl.constexpr):  # fmt: skip
    """Return the offsets (spans, groups, features) of the first steps of spans from the first step of the tile."""
    return (tl.arange(0, spans) * (span * features))[:, None, None] + feature_offsets(i_group, size, width)[None]


@triton.jit
def held(left, i: tl.constexpr, m_feature, span: tl.constexpr, spans: tl.constexpr):
    """Return which numbers of step ``i`` of each span exist, if the tile has ``left`` steps."""
    return (times(0, i, span, spans) < left)[:, None, None] & m_feature[None]


@triton.jit
def load_tile(p_x, i_x, left, m_feature, features: tl.constexpr, span: tl.constexpr, spans: tl.constexpr):
    """Return the tile at ``p_x``; numbers that do not exist are 0."""
    b_x = ()
    for i in tl.static_range(span):
        m_x = held(left, i, m_feature, span, spans)
        b_x = b_x + (tl.load(p_x + i_x + i * features, mask=m_x, other=0.0).to(tl.float32),)
    return b_x


@triton.jit
def load_affine(p_x, i_group, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    """Return the weights or biases of the tile's features, (1, groups, features)."""
    m_feature = feature_mask(i_group, groups, size, width)
    return tl.load(p_x + feature_offsets(i_group, size, width), mask=m_feature, other=0.0).to(tl.float32)[None]


@triton.jit
def load_begins(p_begin, i_row, i_t, length):
    """Return the step at which the document of step ``i_t`` begins, −1 if before the call or outside of it."""
    if p_begin is None:
        i_begin = i_t * 0 - 1
    else:
        i_begin = tl.load(p_begin + i_row * length + i_t, mask=(i_t >= 0) & (i_t < length), other=-1)
    return i_begin


@triton.jit
def steps_before(p_begin, i_row, i_t, count, length):
    """Return how many steps of its document precede ``i_t``, if that goes on; ``count`` of them before the call."""
    i_begin = load_begins(p_begin, i_row, i_t - 1, length)
    return (tl.where(i_begin < 0, count, -i_begin.to(tl.int64)) + i_t).to(tl.float32)


@triton.jit
def centered_moments(b_x, size: tl.constexpr):
    """Return x minus its mean over the features of a group, the last axis, and mean and variance over them. Features
    past ``size`` are 0 in both."""
    axis: tl.constexpr = len(b_x.shape) - 1
    b_mu = tl.sum(b_x, axis) * (1.0 / size)
    b_centered = b_x - tl.expand_dims(b_mu, axis)
    if b_x.shape[axis] != size:
        i_feature = tl.arange(0, b_x.shape[axis])
        for _ in tl.static_range(axis):
            i_feature = tl.expand_dims(i_feature, 0)
        b_centered = tl.where(i_feature < size, b_centered, 0.0)
    return b_centered, b_mu, tl.sum(b_centered * b_centered, axis) * (1.0 / size)


@triton.jit
def moments_of_tile(b_x, size: tl.constexpr, span: tl.constexpr):
    """Return ``centered_moments`` of each step of the tile."""
    b_centered, b_mu, b_sigma2 = (), (), ()
    for i in tl.static_range(span):
        centered, mu, sigma2 = centered_moments(b_x[i], size)
        b_centered, b_mu, b_sigma2 = b_centered + (centered,), b_mu + (mu,), b_sigma2 + (sigma2,)
    return b_centered, b_mu, b_sigma2


@triton.jit
def moved(b_x, i_from):
    """Return b_x (spans, groups) with span ``i_from`` (spans) at each span."""
    return tl.gather(b_x, tl.broadcast_to(i_from[:, None], b_x.shape), 0)


@triton.jit
def load_goes_on(p_begin, i_row, first, length, b_like, span: tl.constexpr):
    """Return, for each step of a tile from ``first`` on, 1 if the document of the step before goes on, else 0, in the
    shape of b_like (spans, groups)."""
    b_goes_on = ()
    for i in tl.static_range(span):
        b_k = tl.zeros_like(b_like) + 1.0
        if p_begin is not None:
            i_t = times(first, i, span, b_like.shape[0])
            b_k = tl.where((load_begins(p_begin, i_row, i_t, length) < i_t)[:, None], b_k, 0.0)
        b_goes_on = b_goes_on + (b_k,)
    return b_goes_on


@triton.jit
def _ends_of_spans(b_goes_on, b_mu, b_sigma2, beta_mean, beta_variance, added_mean, added_variance,
                   span: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return the combined arguments of the join over each span, (spans, groups)."""
    b_m = tl.zeros_like(b_mu[0])
    b_v, b_a, b_b = b_m, b_m + 1.0, b_m + (0.0 if cumulative else 1.0)
    for i in tl.static_range(span):
        b_k = b_goes_on[i]
        if cumulative:
            b_a, b_b, b_m, b_v = join_pooled(b_a, b_b, b_m, b_v, b_k, 1.0, b_mu[i], b_sigma2[i])
        else:
            b_a, b_b, b_m, b_v = join_decayed(
                b_a, b_b, b_m, b_v, beta_mean * b_k, beta_variance * b_k, added_mean * b_mu[i],
                added_variance * b_sigma2[i],
            )  # fmt: skip
    return b_a, b_b, b_m, b_v


@triton.jit
def scan_of_spans(b_goes_on, b_mu, b_sigma2, beta_mean, beta_variance, added_mean, added_variance,
                  span: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return the combined arguments of the join from the tile's first step to the end of each span, (spans, groups)."""
    b_all = _ends_of_spans(
        b_goes_on, b_mu, b_sigma2, beta_mean, beta_variance, added_mean, added_variance, span, cumulative
    )
    return tl.associative_scan(b_all, 0, join_pooled if cumulative else join_decayed)


@triton.jit
def follow(b_a, b_b, b_m, b_v, count_before, b_m_before, b_v_before, cumulative: tl.constexpr):
    """Return mean and variance after the ranges of steps of ``scan_of_spans``, from those before the tile (groups)."""
    if cumulative:
        before = b_a * 0 + count_before
        _, _, b_m, b_v = join_pooled(b_a, before, b_m_before[None], b_v_before[None], b_a, b_b, b_m, b_v)
    else:
        b_m, b_v = b_m + b_a * b_m_before[None], b_v + b_b * b_v_before[None]
    return b_m, b_v


@triton.jit
def before_spans(b_end, b_before):
    """Return what is before each span from what is after it, (spans, groups), and what is before the tile (groups)."""
    i_span = tl.arange(0, b_end.shape[0])
    return tl.where((i_span == 0)[:, None], b_before[None], moved(b_end, tl.maximum(i_span - 1, 0)))


@triton.jit
def running_statistics(b_goes_on, b_mu, b_sigma2, count_before, b_m, b_v, beta_mean, beta_variance,
                       added_mean, added_variance, log_mean, log_variance, span: tl.constexpr,
                       cumulative: tl.constexpr):  # fmt: skip
    """Return mean and variance at each step, from those before each span (spans, groups); and two more: the divisors
    1 − βⁿ of both, or, for cumulative statistics, twice the count n.

    ``count_before``: steps before each span, (spans). 1 − βⁿ is a decayed sum of ones: no exponential per step."""
    b_means, b_variances, b_firsts, b_seconds = (), (), (), ()
    zeros = tl.zeros_like(b_m)
    if cumulative:
        b_c, b_d = count_before[:, None] + zeros, count_before[:, None] + zeros
    else:
        b_c = one_minus_exp(count_before * log_mean)[:, None] + zeros
        b_d = one_minus_exp(count_before * log_variance)[:, None] + zeros
    for i in tl.static_range(span):
        b_k = b_goes_on[i]
        if cumulative:
            _, b_c, b_m, b_v = join_pooled(b_k, b_c, b_m, b_v, b_k, 1.0, b_mu[i], b_sigma2[i])
            b_d = b_c
        else:
            b_a, b_b = beta_mean * b_k, beta_variance * b_k
            b_m, b_v = b_a * b_m + added_mean * b_mu[i], b_b * b_v + added_variance * b_sigma2[i]
            b_c, b_d = b_a * b_c + added_mean, b_b * b_d + added_variance
        b_means, b_variances = b_means + (b_m,), b_variances + (b_v,)
        b_firsts, b_seconds = b_firsts + (b_c,), b_seconds + (b_d,)
    return b_means, b_variances, b_firsts, b_seconds


@triton.jit
def normal_factors(b_v, by_mean, by_variance, eps, cumulative: tl.constexpr):
    """Return 1 / by_mean, w = 1 / √(by (v + by · ε)) with by = by_variance, and rstd = 1 / √(v / by + ε) = by · w.

    Both divisors are 1 for cumulative statistics, which have counts in their place."""
    if cumulative:
        b_inverse, b_w = tl.zeros_like(b_v) + 1.0, tl.rsqrt(b_v + eps)
        b_rstd = b_w
    else:
        b_inverse = 1 / by_mean
        b_w = tl.rsqrt(by_variance * (b_v + by_variance * eps))
        b_rstd = by_variance * b_w
    return b_inverse, b_w, b_rstd


@triton.jit
def _is_step(b_x, i):
    """Return where the first axis of b_x is at ``i``, with as many axes."""
    i_step = tl.arange(0, b_x.shape[0])
    for _ in tl.static_range(len(b_x.shape) - 1):
        i_step = tl.expand_dims(i_step, len(i_step.shape))
    return i_step == i


@triton.jit
def at_step(b_x, i):
    """Return b_x at ``i`` of its first axis. A sum of bits, as the compiler removes additions of the integer 0."""
    b_bits = tl.where(_is_step(b_x, i), b_x.to(tl.int32, bitcast=True), 0)
    return tl.sum(b_bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def take_number(p_words):
    """Return the number of this program in the order in which programs started."""
    program = tl.program_id(0).to(tl.int64)
    if p_words is not None:
        program = tl.atomic_add(p_words, 1, sem="relaxed")  # programs may start in any order
    return program


@triton.jit
def _words(p_words, i_row, i_slot, i_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Return the places of two words per group, (…, groups, 2): of each tile, then of each block of tiles."""
    slots = tiles + (tiles + in_block - 1) // in_block
    places = (i_slot[:, None] * groups + i_group[None])[:, :, None] * 2 + tl.arange(0, 2)[None, None]
    return p_words + 1 + i_row * slots * groups * 2 + places


@triton.jit
def publish(p_words, i_row, i_slot, i_group, b_pair, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Store two numbers per group (groups, 2) so that other programs see each together with the bit that says it is
    there. ``i_slot``: the tile, or ``tiles`` and the block."""
    p_word = _words(p_words, i_row, tl.zeros([1], tl.int32) + i_slot, i_group, tiles, groups, in_block)
    b_bits = b_pair.to(tl.int32, bitcast=True).to(tl.int64)[None]
    tl.atomic_xchg(
        p_word, (b_bits << 32) | 1, mask=tl.broadcast_to(m_group[None, :, None], b_bits.shape), sem="relaxed"
    )


@triton.jit
def _numbers(b_word):
    """Return the two numbers of each group from words (…, groups, 2), of which ``publish`` wrote one per number."""
    return tl.split((b_word >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def published(p_words, i_row, i_tile, first, i_group, m_group, tiles, groups: tl.constexpr, in_block: tl.constexpr):
    """Wait until the numbers of each tile alone from tile ``first`` to the one before ``i_tile``, and those after the
    block of tiles before, are there. Return both of each tile (in_block, groups), and of the block (groups); zero for
    others.

    Words are read by an atomic addition of 0, past all caches. Each has its number and its bit in one store, so no
    order of memory accesses matters. Programs of a smaller number do not wait for this one, so the wait ends."""
    i_slot = first + tl.arange(0, in_block)
    p_tile = _words(p_words, i_row, i_slot, i_group, tiles, groups, in_block)
    i_block = tl.zeros([1], tl.int32) + tiles + first // in_block - 1
    p_block = _words(p_words, i_row, i_block, i_group, tiles, groups, in_block)
    m_tile = tl.broadcast_to((i_slot < i_tile)[:, None, None] & m_group[None, :, None], p_tile.shape)
    m_block = tl.broadcast_to((i_block >= tiles)[:, None, None] & m_group[None, :, None], p_block.shape)
    b_none, b_zero = tl.zeros(p_tile.shape, tl.int64), tl.zeros(p_block.shape, tl.int64)
    b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
    b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    while (tl.min(b_tile & 1) & tl.min(b_block & 1)) == 0:
        b_tile = tl.where(m_tile, tl.atomic_add(p_tile, b_none, mask=m_tile, sem="relaxed"), 1)
        b_block = tl.where(m_block, tl.atomic_add(p_block, b_zero, mask=m_block, sem="relaxed"), 1)
    b_first, b_second = _numbers(b_tile)
    b_first_block, b_second_block = _numbers(b_block)
    return b_first, b_second, tl.sum(b_first_block, 0), tl.sum(b_second_block, 0)
