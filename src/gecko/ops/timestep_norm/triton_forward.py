"""Triton kernel of the timestep norm: statistics, their scan over time, and the result, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.backends.triton_axis import at_step
from gecko.ops.timestep_norm.triton_look_back import publish, published, take_number
from gecko.ops.timestep_norm.triton_tiles import (
    before_spans,
    feature_mask,
    follow,
    held,
    join_pooled,
    load_affine,
    load_begins,
    load_goes_on,
    load_tile,
    moments_of_tile,
    normal_factors,
    places_of_spans,
    program_place,
    running_statistics,
    scan_of_spans,
    steps_before,
    times,
)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment


@triton.jit
def _after_tiles(p_begin, i_row, first, end, b_m, b_v, b_m_block, b_v_block, count, length,
                 log_mean, log_variance, steps: tl.constexpr, cumulative: tl.constexpr,
                 in_block: tl.constexpr):  # fmt: skip
    """Return the running mean and variance, (groups), at the last step before tile ``end``.
    They join b_m and b_v (in_block, groups), each of one tile alone from tile ``first`` on, to those before ``first``,
    b_m_block and b_v_block (groups). ``count``: steps of the row's first document before the call."""
    i_tile = first + tl.arange(0, in_block)
    i_begin = load_begins(p_begin, i_row, end * steps - 1, length)
    # The document before tile ``end`` has steps in the tiles that end after it begins.
    m_tile = (i_tile < end) & (i_begin < (i_tile + 1) * steps)
    goes_on = i_begin < first * steps
    if cumulative:
        b_n = tl.where(m_tile, tl.minimum(steps, (i_tile + 1) * steps - i_begin), 0).to(tl.float32)[:, None]
        n_block = (tl.where(i_begin < 0, count, -i_begin.to(tl.int64)) + first * steps).to(tl.float32)
        n_block = tl.where(goes_on, n_block, 0.0)
        total = tl.maximum(tl.sum(b_n) + n_block, 1.0)
        b_mean = (tl.sum(b_n * b_m, 0) + n_block * b_m_block) / total
        step, step_block = b_m - b_mean[None], b_m_block - b_mean
        b_variance = tl.sum(b_n * (b_v + step * step), 0) + n_block * (b_v_block + step_block * step_block)
        b_variance = b_variance / total
    else:
        later = ((end - 1 - i_tile) * steps).to(tl.float32)
        a, b = tl.where(m_tile, tl.exp(later * log_mean), 0.0), tl.where(m_tile, tl.exp(later * log_variance), 0.0)
        since = ((end - first) * steps).to(tl.float32)
        a_block = tl.where(goes_on, tl.exp(since * log_mean), 0.0)
        b_block = tl.where(goes_on, tl.exp(since * log_variance), 0.0)
        b_mean = tl.sum(a[:, None] * b_m, 0) + a_block * b_m_block
        b_variance = tl.sum(b[:, None] * b_v, 0) + b_block * b_v_block
    return b_mean, b_variance


@triton.jit
def _after_tile(p_begin, i_row, first, b_m, b_v, b_m_before, b_v_before, count_before, length, log_mean, log_variance,
                steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return mean and variance after the tile from those of the tile alone and those before it, (groups)."""
    end = first + steps
    i_begin = load_begins(p_begin, i_row, end - 1, length)
    goes_on = i_begin < first
    if cumulative:
        b_k, n = tl.where(goes_on, 1.0, 0.0) + b_m * 0, tl.where(goes_on, steps, end - i_begin).to(tl.float32)
        _, _, b_m, b_v = join_pooled(b_k, b_k * 0 + count_before, b_m_before, b_v_before, b_k, n, b_m, b_v)
    else:
        b_m += tl.where(goes_on, tl.exp(steps * log_mean), 0.0) * b_m_before
        b_v += tl.where(goes_on, tl.exp(steps * log_variance), 0.0) * b_v_before
    return b_m, b_v


@triton.jit
def _before_tile(p_words, p_mean, p_variance, p_begin, i_row, i_tile, i_group, count, length, tiles,
                 log_mean, log_variance, groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
                 in_block: tl.constexpr):  # fmt: skip
    """Return mean and variance before a tile, always summed in the same order: those after the block of tiles before,
    and those of each tile alone since."""
    m_group, first = i_group < groups, i_tile // in_block * in_block
    state = i_row * groups + i_group
    b_m = tl.load(p_mean + state, mask=m_group & (first == 0), other=0.0)
    b_v = tl.load(p_variance + state, mask=m_group & (first == 0), other=0.0)
    if p_words is not None:
        b_m_tile, b_v_tile, b_m_block, b_v_block = published(
            p_words, i_row, i_tile, first, i_group, m_group, tiles, groups, in_block
        )
        b_m, b_v = _after_tiles(
            p_begin, i_row, first, i_tile, b_m_tile, b_v_tile, b_m + b_m_block, b_v + b_v_block, count, length,
            log_mean, log_variance, steps, cumulative, in_block,
        )  # fmt: skip
    return b_m, b_v


@triton.jit(do_not_specialize=["length", "tiles"])
def normalise_tiles(p_x, p_begin, p_carry, p_words, length, tiles, p_count, p_mean, p_variance, p_weight, p_bias, p_y,
               p_count_after, p_mean_after, p_variance_after, eps,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, span: tl.constexpr, spans: tl.constexpr, cumulative: tl.constexpr,
               in_block: tl.constexpr):  # fmt: skip
    """Compute y of each tile. The last tile of a row stores the state; each other one passes its statistics on.

    p_words: (1 + B · (tiles + blocks) · G · 2,) int64 zeros, or None if a row has one tile. p_carry: statistics before
    each tile except the first, (B, tiles − 1, 2, G)."""
    steps: tl.constexpr = span * spans
    i_row, i_tile, i_group = program_place(take_number(p_words), tiles, groups, together)
    m_group, first = i_group < groups, i_tile * steps
    begin, left = (i_row * length + first) * features, length - first
    m_feature = feature_mask(i_group, groups, size, width)
    i_x = places_of_spans(i_group, features, size, width, span, spans)
    b_x = load_tile(p_x + begin, i_x, left, m_feature, features, span, spans)
    b_centered, b_mu, b_sigma2 = moments_of_tile(b_x, size, span)
    b_goes_on = load_goes_on(p_begin, i_row, first, length, b_mu[0], span)
    b_a, b_b, b_m_end, b_v_end = scan_of_spans(
        b_goes_on, b_mu, b_sigma2, beta_mean, beta_variance, added_mean, added_variance, span, cumulative
    )
    later = i_tile < tiles - 1
    b_tile = at_step(tl.join(b_m_end, b_v_end), spans - 1)
    if p_words is not None:
        publish(p_words, i_row, i_tile, i_group, b_tile, m_group & later, tiles, groups, in_block)
    count = tl.load(p_count + i_row)
    b_m_before, b_v_before = _before_tile(
        p_words, p_mean, p_variance, p_begin, i_row, i_tile, i_group, count, length, tiles, log_mean, log_variance,
        groups, steps, cumulative, in_block,
    )  # fmt: skip
    before = steps_before(p_begin, i_row, first, count, length)
    if p_words is not None:
        b_m_tile, b_v_tile = tl.split(b_tile)
        b_m_tile, b_v_tile = _after_tile(
            p_begin, i_row, first, b_m_tile, b_v_tile, b_m_before, b_v_before, before, length, log_mean, log_variance,
            steps, cumulative,
        )  # fmt: skip
        publish(
            p_words, i_row, tiles + i_tile // in_block, i_group, tl.join(b_m_tile, b_v_tile),
            m_group & later & (i_tile % in_block == in_block - 1), tiles, groups, in_block,
        )  # fmt: skip
        carry = ((i_row * (tiles - 1) + i_tile - 1) * 2) * groups + i_group
        tl.store(p_carry + carry, b_m_before, mask=m_group & (i_tile > 0))
        tl.store(p_carry + carry + groups, b_v_before, mask=m_group & (i_tile > 0))
    b_m_end, b_v_end = follow(b_a, b_b, b_m_end, b_v_end, before, b_m_before, b_v_before, cumulative)
    b_m, b_v, by_mean, by_variance = running_statistics(
        b_goes_on, b_mu, b_sigma2, steps_before(p_begin, i_row, times(first, 0, span, spans), count, length),
        before_spans(b_m_end, b_m_before), before_spans(b_v_end, b_v_before), beta_mean, beta_variance, added_mean,
        added_variance, log_mean, log_variance, span, cumulative,
    )  # fmt: skip
    b_scale = tl.full([1, together, width], 1.0, tl.float32)
    if p_weight is not None:
        b_scale = 1 + load_affine(p_weight, i_group, groups, size, width)
    b_shift = tl.zeros_like(b_scale)
    if p_bias is not None:
        b_shift = load_affine(p_bias, i_group, groups, size, width)
    for i in tl.static_range(span):
        b_inverse, _, b_rstd = normal_factors(b_v[i], by_mean[i], by_variance[i], eps, cumulative)
        # x − μ is at hand, and is exact where means are large.
        b_offset = (b_mu[i] - b_m[i] * b_inverse) * b_rstd
        b_y = (b_centered[i] * b_rstd[:, :, None] + b_offset[:, :, None]) * b_scale + b_shift
        m_x = held(left, i, m_feature, span, spans)
        tl.store(p_y + begin + i_x + i * features, b_y.to(p_y.dtype.element_ty), mask=m_x)
    if i_tile == tiles - 1:
        i_state = (i_row * groups + i_group)[None] + tl.zeros([spans, 1], tl.int64)
        for i in tl.static_range(span):
            m_state = (times(first, i, span, spans) == length - 1)[:, None] & m_group[None]
            tl.store(p_mean_after + i_state, b_m[i], mask=m_state)
            tl.store(p_variance_after + i_state, b_v[i], mask=m_state)
        i_begin = load_begins(p_begin, i_row, length - 1, length)
        count_after = tl.where(i_begin < 0, count, -i_begin.to(tl.int64)) + length
        tl.store(p_count_after + i_row + i_group * 0, count_after, mask=i_group == 0)
