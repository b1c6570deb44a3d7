"""Triton kernel for the gradients of the timestep norm, in the tiles of the forward pass and in reverse order.

The statistics before a tile are those that the forward pass saved. The gradients of the running statistics are sums
over all later steps of the document, so programs pass them on from the last tile to the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.timestep_norm.triton_tiles import (
    at_step,
    before_spans,
    feature_mask,
    feature_offsets,
    follow,
    held,
    join_decayed,
    load_affine,
    load_begins,
    load_goes_on,
    load_tile,
    moments_of_tile,
    moved,
    normal_factors,
    places_of_spans,
    program_place,
    publish,
    published,
    running_statistics,
    scan_of_spans,
    steps_before,
    take_number,
    times,
)

# ruff: noqa: RUF005 -- Triton compiles no starred elements of tuples
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment


@triton.jit
def _join_pooled_gradients(k_after, r_after, q_after, m_after, k, r, q, m):
    """Combine two ranges of steps, the later one first: r = Σ (g_mean − 2 (mean_t − m) g_variance) / n and
    q = Σ g_variance / n. m is the mean at the first step of a range. k is 0 if the later range starts another document,
    else 1."""
    return k_after * k, r + k * (r_after - 2 * (m_after - m) * q_after), q + k * q_after, m


@triton.jit
def _load_before_tile(p_mean, p_variance, p_carry, i_row, i_tile, i_group, tiles, m_tile, groups: tl.constexpr):
    """Return mean and variance of the current document before the tile, from the state or from the forward pass."""
    m_first, m_later = m_tile & (i_tile == 0), m_tile & (i_tile > 0)
    state = i_row * groups + i_group
    carry = (i_row * (tiles - 1) + i_tile - 1) * 2 * groups + i_group
    b_m = tl.load(p_mean + state, mask=m_first, other=0.0) + tl.load(p_carry + carry, mask=m_later, other=0.0)
    b_v = tl.load(p_variance + state, mask=m_first, other=0.0)
    return b_m, b_v + tl.load(p_carry + carry + groups, mask=m_later, other=0.0)


@triton.jit
def _after_spans(b_has_next, b_r, b_q, b_m, beta_mean, beta_variance, span: tl.constexpr, cumulative: tl.constexpr):
    """Return the combined arguments of the join, in reverse time, over each span, (spans, groups). b_has_next is 1
    where the document of a step has the next one."""
    b_r_sum = tl.zeros_like(b_r[0])
    b_q_sum, b_a, b_b, b_origin = b_r_sum, b_r_sum + 1.0, b_r_sum + 1.0, b_m[span - 1]
    for i in tl.static_range(span - 1, -1, -1):
        b_k = b_has_next[i]
        if cumulative:
            b_a, b_r_sum, b_q_sum, b_origin = _join_pooled_gradients(
                b_a, b_r_sum, b_q_sum, b_origin, b_k, b_r[i], b_q[i], b_m[i]
            )
        else:
            b_a, b_b, b_r_sum, b_q_sum = join_decayed(
                b_a, b_b, b_r_sum, b_q_sum, beta_mean * b_k, beta_variance * b_k, b_r[i], b_q[i]
            )
    return b_a, b_b, b_r_sum, b_q_sum, b_origin


@triton.jit
def _scan_of_later_spans(b_has_next, b_r, b_q, b_m, beta_mean, beta_variance, span: tl.constexpr,
                         cumulative: tl.constexpr):  # fmt: skip
    """Return the combined arguments of the join from the first step of each span to the tile's last step; the last span
    comes first."""
    b_a, b_b, b_r, b_q, b_origin = _after_spans(b_has_next, b_r, b_q, b_m, beta_mean, beta_variance, span, cumulative)
    i_back = tl.arange(0, b_r.shape[0]) * -1 + b_r.shape[0] - 1
    b_a, b_r, b_q = moved(b_a, i_back), moved(b_r, i_back), moved(b_q, i_back)
    if cumulative:
        b_all = (b_a, b_r, b_q, moved(b_origin, i_back))
        b_a, b_r, b_q, b_origin = tl.associative_scan(b_all, 0, _join_pooled_gradients)
        b_b = b_a
    else:
        b_a, b_b, b_r, b_q = tl.associative_scan((b_a, moved(b_b, i_back), b_r, b_q), 0, join_decayed)
    return b_a, b_b, b_r, b_q, b_origin


@triton.jit
def _join_later(b_a, b_b, b_r, b_q, b_origin, b_r_after, b_q_after, b_origin_after, cumulative: tl.constexpr):
    """Add what is after the tile (groups) to the result of ``_scan_of_later_spans``."""
    if cumulative:
        _, b_r, b_q, _ = _join_pooled_gradients(
            b_a, b_r_after[None], b_q_after[None], b_origin_after[None], b_a, b_r, b_q, b_origin
        )
    else:
        b_r, b_q = b_r + b_a * b_r_after[None], b_q + b_b * b_q_after[None]
    return b_r, b_q


@triton.jit
def _later_sums(p_words, p_begin, p_mean, p_variance, p_carry, i_row, i_tile, i_group, b_origin, length, tiles,
                log_mean, log_variance, groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
                in_block: tl.constexpr):  # fmt: skip
    """Return the sums after a tile relative to b_origin, the mean after it: those of each tile alone up to the end of
    its block, and those from the next block on. Each is relative to the mean before its tile."""
    m_group = i_group < groups
    i_back = tiles - 1 - i_tile
    first = i_back // in_block * in_block
    b_r, b_q, b_r_block, b_q_block = published(p_words, i_row, i_back, first, i_group, m_group, tiles, groups, in_block)
    i_later, after = tiles - 1 - first - tl.arange(0, in_block), tiles - first
    next_step = (i_tile + 1) * steps
    # Tiles before the first one of the next document count.
    m_later = (i_later > i_tile) & (load_begins(p_begin, i_row, i_later * steps, length) <= next_step)
    goes_on = load_begins(p_begin, i_row, after * steps, length) <= next_step
    if cumulative:
        b_mean, _ = _load_before_tile(
            p_mean, p_variance, p_carry, i_row, i_later[:, None], i_group[None], tiles,
            m_later[:, None] & m_group[None], groups,
        )  # fmt: skip
        b_mean_block, _ = _load_before_tile(
            p_mean, p_variance, p_carry, i_row, after, i_group, tiles, m_group & (first > 0), groups
        )
        b_r = b_r + 2 * (b_origin[None] - b_mean) * b_q
        b_r_block += 2 * (b_origin - b_mean_block) * b_q_block
        a = tl.where(m_later, 1.0, 0.0)
        a_block = tl.where(goes_on, 1.0, 0.0)
        b, b_block = a, a_block
    else:
        since, since_block = ((i_later - i_tile - 1) * steps).to(tl.float32), ((i_back - first) * steps).to(tl.float32)
        a, b = tl.where(m_later, tl.exp(since * log_mean), 0.0), tl.where(m_later, tl.exp(since * log_variance), 0.0)
        a_block = tl.where(goes_on, tl.exp(since_block * log_mean), 0.0)
        b_block = tl.where(goes_on, tl.exp(since_block * log_variance), 0.0)
    return tl.sum(a[:, None] * b_r, 0) + a_block * b_r_block, tl.sum(b[:, None] * b_q, 0) + b_block * b_q_block


@triton.jit
def _statistics(b_mu, b_sigma2, p_begin, i_row, first, count, b_m_before, b_v_before, length,
                beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance, span: tl.constexpr,
                spans: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return the results of ``running_statistics`` and the running mean after the tile (groups)."""
    b_goes_on = load_goes_on(p_begin, i_row, first, length, b_mu[0], span)
    b_a, b_b, b_m_end, b_v_end = scan_of_spans(
        b_goes_on, b_mu, b_sigma2, beta_mean, beta_variance, added_mean, added_variance, span, cumulative
    )
    before = steps_before(p_begin, i_row, first, count, length)
    b_m_end, b_v_end = follow(b_a, b_b, b_m_end, b_v_end, before, b_m_before, b_v_before, cumulative)
    b_m, b_v, by_mean, by_variance = running_statistics(
        b_goes_on, b_mu, b_sigma2, steps_before(p_begin, i_row, times(first, 0, span, spans), count, length),
        before_spans(b_m_end, b_m_before), before_spans(b_v_end, b_v_before), beta_mean, beta_variance, added_mean,
        added_variance, log_mean, log_variance, span, cumulative,
    )  # fmt: skip
    return b_m, b_v, by_mean, by_variance, at_step(b_m_end, spans - 1)


@triton.jit
def _gradients_of_moments(b_has_next, b_mu, b_r, b_q, b_m, b_a, b_b, b_r_end, b_q_end, b_origin, b_r_after, b_q_after,
                          b_m_after, beta_mean, beta_variance, added_mean, added_variance, span: tl.constexpr,
                          cumulative: tl.constexpr):  # fmt: skip
    """Return the gradients of mean and variance over the features of each group at each step, the last step first, from
    the sums after the tile (groups)."""
    b_r_end, b_q_end = _join_later(b_a, b_b, b_r_end, b_q_end, b_origin, b_r_after, b_q_after, b_m_after, cumulative)
    # b_…_end are in reverse order. The last span is followed by what is after the tile.
    i_span, spans = tl.arange(0, b_r_end.shape[0]), b_r_end.shape[0]
    i_from, m_outside = tl.maximum(i_span * -1 + spans - 2, 0), (i_span == spans - 1)[:, None]
    b_r_sum = tl.where(m_outside, b_r_after[None], moved(b_r_end, i_from))
    b_q_sum = tl.where(m_outside, b_q_after[None], moved(b_q_end, i_from))
    if cumulative:
        b_origin = tl.where(m_outside, b_m_after[None], moved(b_origin, i_from))
    b_grad_mu, b_grad_sigma2 = (), ()
    for i in tl.static_range(span - 1, -1, -1):
        b_k = b_has_next[i]
        if cumulative:
            _, b_r_sum, b_q_sum, b_origin = _join_pooled_gradients(
                b_k, b_r_sum, b_q_sum, b_origin, b_k, b_r[i], b_q[i], b_m[i]
            )
            b_grad_mu = b_grad_mu + (b_r_sum + 2 * (b_mu[i] - b_m[i]) * b_q_sum,)
            b_grad_sigma2 = b_grad_sigma2 + (b_q_sum,)
        else:
            b_r_sum, b_q_sum = b_r[i] + beta_mean * b_k * b_r_sum, b_q[i] + beta_variance * b_k * b_q_sum
            b_grad_mu, b_grad_sigma2 = b_grad_mu + (added_mean * b_r_sum,), b_grad_sigma2 + (added_variance * b_q_sum,)
    return b_grad_mu, b_grad_sigma2


@triton.jit
def _gradients_of_statistics(b_grad, b_centered, b_mu, b_m, b_v, by_mean, by_variance, p_grad_mean_after,
                             p_grad_variance_after, i_row, i_group, first, length, eps, groups: tl.constexpr,
                             span: tl.constexpr, spans: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return the gradients of the running mean and variance by the output of each step, those by the state after the
    last step included; and (mean of x − running mean) and 1 / √(variance + ε) at each step."""
    i_state = i_row * groups + i_group
    m_state = (i_group < groups) & (first + span * spans >= length)
    b_grad_mean_after, b_grad_variance_after = 0.0, 0.0
    if p_grad_mean_after is not None:
        b_grad_mean_after = tl.load(p_grad_mean_after + i_state, mask=m_state, other=0.0)[None]
    if p_grad_variance_after is not None:
        b_grad_variance_after = tl.load(p_grad_variance_after + i_state, mask=m_state, other=0.0)[None]
    b_r, b_q, b_offset, b_rstd = (), (), (), ()
    for i in tl.static_range(span):
        inverse, w, rstd = normal_factors(b_v[i], by_mean[i], by_variance[i], eps, cumulative)
        offset = b_mu[i] - b_m[i] * inverse
        total = tl.sum(b_grad[i], 2)
        r = -rstd * inverse * total
        q = -0.5 * rstd * rstd * w * (tl.sum(b_grad[i] * b_centered[i], 2) + offset * total)
        m_last = (times(first, i, span, spans) == length - 1)[:, None]
        r, q = r + tl.where(m_last, b_grad_mean_after, 0.0), q + tl.where(m_last, b_grad_variance_after, 0.0)
        if cumulative:
            r, q = r / by_mean[i], q / by_mean[i]
        b_r, b_q, b_offset, b_rstd = b_r + (r,), b_q + (q,), b_offset + (offset,), b_rstd + (rstd,)
    return b_r, b_q, b_offset, b_rstd


@triton.jit(do_not_specialize=["length", "tiles"])
def gradients(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_words, p_weight,
              p_grad_mean_after, p_grad_variance_after, p_grad_x, p_scale_parts, p_shift_parts, p_grad_mean,
              p_grad_variance, length, tiles, eps,
              beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
              features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
              together: tl.constexpr, span: tl.constexpr, spans: tl.constexpr, cumulative: tl.constexpr,
              in_block: tl.constexpr):  # fmt: skip
    """Compute the gradient of x, the gradients of weight and bias per tile (p_…_parts, (B · tiles, D)), and, in the
    first tile of a row, the gradients of the state. p_words: as in ``normalise_tiles``."""
    steps: tl.constexpr = span * spans
    i_row, i_back, i_group = program_place(take_number(p_words), tiles, groups, together)
    i_tile = tiles - 1 - i_back
    m_group, first = i_group < groups, i_tile * steps
    begin, left = (i_row * length + first) * features, length - first
    m_feature = feature_mask(i_group, groups, size, width)
    i_x = places_of_spans(i_group, features, size, width, span, spans)
    count = tl.load(p_count + i_row)
    b_m_before, b_v_before = _load_before_tile(
        p_mean, p_variance, p_carry, i_row, i_tile, i_group, tiles, m_group, groups
    )
    b_x = load_tile(p_x + begin, i_x, left, m_feature, features, span, spans)
    b_centered, b_mu, b_sigma2 = moments_of_tile(b_x, size, span)
    b_m, b_v, by_mean, by_variance, b_m_after = _statistics(
        b_mu, b_sigma2, p_begin, i_row, first, count, b_m_before, b_v_before, length, beta_mean, beta_variance,
        added_mean, added_variance, log_mean, log_variance, span, spans, cumulative,
    )  # fmt: skip
    b_scale = tl.full([1, together, width], 1.0, tl.float32)
    if p_weight is not None:
        b_scale = 1 + load_affine(p_weight, i_group, groups, size, width)
    b_grad = ()
    for i in tl.static_range(span):
        m_x = held(left, i, m_feature, span, spans)
        b_given = tl.load(p_grad_y + begin + i_x + i * features, mask=m_x, other=0.0).to(tl.float32)
        b_grad = b_grad + (b_given * b_scale,)
    b_r, b_q, b_offset, b_rstd = _gradients_of_statistics(
        b_grad, b_centered, b_mu, b_m, b_v, by_mean, by_variance, p_grad_mean_after, p_grad_variance_after, i_row,
        i_group, first, length, eps, groups, span, spans, cumulative,
    )  # fmt: skip
    b_has_next = load_goes_on(p_begin, i_row, first + 1, length, b_mu[0], span)
    b_a, b_b, b_r_end, b_q_end, b_origin = _scan_of_later_spans(
        b_has_next, b_r, b_q, b_m, beta_mean, beta_variance, span, cumulative
    )
    b_tile = at_step(tl.join(b_r_end, b_q_end), spans - 1)
    b_r_first, b_q_first = tl.split(b_tile)
    if cumulative:
        # Sums are passed on relative to the mean before the tile.
        b_r_first += 2 * (b_m_before - at_step(b_origin, spans - 1)) * b_q_first
        b_tile = tl.join(b_r_first, b_q_first)
    b_r_after, b_q_after = tl.zeros_like(b_m_before), tl.zeros_like(b_m_before)
    if p_words is not None:
        publish(p_words, i_row, i_back, i_group, b_tile, m_group & (i_tile > 0), tiles, groups, in_block)
        b_r_after, b_q_after = _later_sums(
            p_words, p_begin, p_mean, p_variance, p_carry, i_row, i_tile, i_group, b_m_after, length, tiles,
            log_mean, log_variance, groups, steps, cumulative, in_block,
        )  # fmt: skip
        goes_on = load_begins(p_begin, i_row, first + steps, length) <= first
        if cumulative:
            a, b = tl.where(goes_on, 1.0, 0.0), tl.where(goes_on, 1.0, 0.0)
            b_r_first += a * (b_r_after + 2 * (b_m_before - b_m_after) * b_q_after)
        else:
            a = tl.where(goes_on, tl.exp(steps * log_mean), 0.0)
            b = tl.where(goes_on, tl.exp(steps * log_variance), 0.0)
            b_r_first += a * b_r_after
        b_q_first += b * b_q_after
        publish(
            p_words, i_row, tiles + i_back // in_block, i_group, tl.join(b_r_first, b_q_first),
            m_group & (i_tile > 0) & (i_back % in_block == in_block - 1), tiles, groups, in_block,
        )  # fmt: skip
    if i_tile == 0:
        state = i_row * groups + i_group
        continues = tl.where(load_begins(p_begin, i_row, first, length) < 0, 1.0, 0.0)
        if cumulative:
            a, b = count.to(tl.float32), count.to(tl.float32)
        else:
            a, b = beta_mean, beta_variance
        tl.store(p_grad_mean + state, b_r_first * (continues * a), mask=m_group)
        tl.store(p_grad_variance + state, b_q_first * (continues * b), mask=m_group)
    b_grad_mu, b_grad_sigma2 = _gradients_of_moments(
        b_has_next, b_mu, b_r, b_q, b_m, b_a, b_b, b_r_end, b_q_end, b_origin, b_r_after, b_q_after, b_m_after,
        beta_mean, beta_variance, added_mean, added_variance, span, cumulative,
    )  # fmt: skip

    b_scale_part = tl.zeros([spans, together, width], tl.float32)
    b_shift_part = tl.zeros([spans, together, width], tl.float32)
    for i in tl.static_range(span):
        # Read from the cache again: both tiles do not fit into registers while the program waits.
        m_x, i_x_i = held(left, i, m_feature, span, spans), begin + i_x + i * features
        b_centered = tl.load(p_x + i_x_i, mask=m_x, other=0.0).to(tl.float32) - b_mu[i][:, :, None]
        b_given = tl.load(p_grad_y + i_x_i, mask=m_x, other=0.0).to(tl.float32)
        rstd = b_rstd[i][:, :, None]
        b_scale_part += b_given * (b_centered * rstd + (b_offset[i] * b_rstd[i])[:, :, None])
        b_shift_part += b_given
        b_grad_x = b_given * b_scale * rstd + (b_grad_mu[span - 1 - i] * (1.0 / size))[:, :, None]
        b_grad_x += b_centered * (b_grad_sigma2[span - 1 - i] * (2.0 / size))[:, :, None]
        tl.store(p_grad_x + i_x_i, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_x)
    parts = (i_row * tiles + i_tile) * features + feature_offsets(i_group, size, width)
    tl.store(p_scale_parts + parts, tl.sum(b_scale_part, 0), mask=m_feature)
    tl.store(p_shift_parts + parts, tl.sum(b_shift_part, 0), mask=m_feature)
