"""Triton kernels for the gradients of the timestep norm, in the same tiles as the forward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.timestep_norm.triton_forward import (
    bias_corrections,
    counts_up_to,
    feature_mask,
    feature_offsets,
    group_moments,
    held_places,
    join_decayed,
    load_before_tile,
    load_begins,
    program_place,
    row_of,
    running_statistics,
    tile_offsets,
)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _join_pooled_gradients(k_after, r_after, q_after, m_after, k, r, q, m):
    """Combine two consecutive ranges of steps: r = Σ (g_mean − 2 (mean_t − m) g_variance) / n, q = Σ g_variance / n. m
    is the mean at the first step of a range. k is 0 if the later range starts another document, else 1."""
    return k_after * k, r + k * (r_after - 2 * (m_after - m) * q_after), q + k * q_after, m


@triton.jit
def _gradient_tile(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
                   p_grad_mean_after, p_grad_variance_after, i_row, i_tile, i_group, length, tiles, eps,
                   beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                   features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
                   steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Return the gradients of the running statistics, summed backwards in time over the tile, and their inputs."""
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = held_places(i_t, i_group, length, groups, size, width)
    offsets = tile_offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_grad = tl.load(p_grad_y + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = group_moments(b_x, m_x, size)
    i_begin = load_begins(p_begin, i_row, i_t, length)
    b_m_before, b_v_before, count_before = load_before_tile(
        p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles, groups, steps
    )
    b_m, b_v = running_statistics(
        b_mu, b_sigma2, b_m_before, b_v_before, count_before, i_begin == i_t, i_t < length,
        beta_mean, beta_variance, added_mean, added_variance, cumulative,
    )  # fmt: skip
    count = counts_up_to(p_count, i_row, i_t, i_begin).to(tl.float32)
    by_mean, by_variance = bias_corrections(count, log_mean, log_variance, cumulative)
    b_rstd = tl.rsqrt(b_v / by_variance[:, None] + eps)
    b_deviation = tl.where(m_x, b_x - (b_m / by_mean[:, None])[:, :, None], 0.0)
    b_scaled = b_grad
    if p_weight is not None:
        m_feature = feature_mask(i_group, groups, size, width)
        b_weight = tl.load(p_weight + feature_offsets(i_group, size, width), mask=m_feature, other=0.0).to(tl.float32)
        b_scaled = b_grad * (1 + b_weight)[None]
    b_grad_m = -b_rstd * tl.sum(b_scaled, 2) / by_mean[:, None]
    b_grad_v = -0.5 * b_rstd * b_rstd * b_rstd * tl.sum(b_scaled * b_deviation, 2) / by_variance[:, None]

    m_last, state = (i_t == length - 1)[:, None] & (i_group < groups)[None], (i_row * groups + i_group)[None]
    b_grad_m += tl.load(p_grad_mean_after + state, mask=m_last, other=0.0)
    b_grad_v += tl.load(p_grad_variance_after + state, mask=m_last, other=0.0)
    m_goes_on = load_begins(p_begin, i_row, i_t + 1, length) <= i_t
    b_goes_on = tl.where(m_goes_on, 1.0, 0.0)[:, None] + tl.zeros_like(b_m)
    if cumulative:
        b_r, b_q = b_grad_m / count[:, None], b_grad_v / count[:, None]
        b_a, b_r, b_q, b_origin = tl.associative_scan((b_goes_on, b_r, b_q, b_m), 0, _join_pooled_gradients, True)
        b_b = b_a
    else:
        b_a, b_b = beta_mean * b_goes_on, beta_variance * b_goes_on
        b_a, b_b, b_r, b_q = tl.associative_scan((b_a, b_b, b_grad_m, b_grad_v), 0, join_decayed, True)
        b_origin = b_m
    return b_x, b_grad, b_scaled, b_deviation, b_rstd, b_mu, b_a, b_b, b_r, b_q, b_origin


@triton.jit(do_not_specialize=["length", "tiles"])
def gradient_summaries(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
                        p_grad_mean_after, p_grad_variance_after, p_later, length, tiles, eps,
                        beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                        features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
                        together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Store the sums at the first step of every tile except the first to p_later (B, tiles − 1, 3, G)."""
    i_row, i_before, i_group = program_place(tl.program_id(0).to(tl.int64), tiles - 1, groups, together)
    i_tile = i_before + 1
    _, _, _, _, _, _, _, _, b_r, b_q, b_origin = _gradient_tile(
        p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
        p_grad_mean_after, p_grad_variance_after, i_row, i_tile, i_group, length, tiles, eps,
        beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
        features, groups, size, width, steps, cumulative,
    )  # fmt: skip
    i_step = tl.arange(0, steps)
    out = p_later + ((i_row * (tiles - 1) + i_before) * 3) * groups + i_group
    tl.store(out, row_of(b_r, i_step, 0), mask=i_group < groups)
    tl.store(out + groups, row_of(b_q, i_step, 0), mask=i_group < groups)
    tl.store(out + 2 * groups, row_of(b_origin, i_step, 0), mask=i_group < groups)


@triton.jit(do_not_specialize=["length", "tiles"])
def gradient_carries(p_begin, p_later, length, tiles,
                      beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                      groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
                      columns: tl.constexpr, tiles_at_once: tl.constexpr):  # fmt: skip
    """Replace the sums at the first step of each tile by those over all later steps of the document."""
    i_row, _zero, i_group = program_place(tl.program_id(0).to(tl.int64), 1, groups, columns)
    m_group = i_group < groups
    zeros = tl.zeros([tiles_at_once, columns], tl.float32)
    b_r_after = tl.zeros([columns], tl.float32)
    b_q_after, b_origin_after = b_r_after, b_r_after
    for done in range(0, tiles - 1, tiles_at_once):
        first = tiles - 1 - done - tiles_at_once
        i_before = first + tl.arange(0, tiles_at_once).to(tl.int64)
        held = i_before >= 0
        i_tile = i_before + 1
        # No tile follows the last one, and no document starts after the end of the row.
        i_begin = load_begins(p_begin, i_row, tl.where(held, (i_tile + 1) * steps, length), length)
        goes_on = i_begin <= i_tile * steps
        b_goes_on = tl.where(goes_on, 1.0, 0.0)[:, None] + zeros
        p_tile = p_later + ((i_row * (tiles - 1) + i_before) * 3 * groups)[:, None] + i_group[None]
        m_tile = held[:, None] & m_group[None]
        b_r, b_q = tl.load(p_tile, mask=m_tile, other=0.0), tl.load(p_tile + groups, mask=m_tile, other=0.0)
        b_origin = tl.load(p_tile + 2 * groups, mask=m_tile, other=0.0)
        if cumulative:
            b_a, b_r, b_q, b_origin = tl.associative_scan(
                (b_goes_on, b_r, b_q, b_origin), 0, _join_pooled_gradients, True
            )
            _, b_r, b_q, _ = _join_pooled_gradients(
                b_a, b_r_after[None], b_q_after[None], b_origin_after[None], b_a, b_r, b_q, b_origin
            )
        else:
            b_a, b_b = tl.exp(steps * log_mean) * b_goes_on, tl.exp(steps * log_variance) * b_goes_on
            b_a, b_b, b_r, b_q = tl.associative_scan((b_a, b_b, b_r, b_q), 0, join_decayed, True)
            b_r, b_q = b_r + b_a * b_r_after[None], b_q + b_b * b_q_after[None]
        tl.store(p_tile, b_r, mask=m_tile)
        tl.store(p_tile + groups, b_q, mask=m_tile)
        b_r_after, b_q_after = row_of(b_r, i_before, first), row_of(b_q, i_before, first)
        b_origin_after = row_of(b_origin, i_before, first)


@triton.jit(do_not_specialize=["length", "tiles"])
def gradients(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
               p_grad_mean_after, p_grad_variance_after, p_later, length, tiles, eps,
               p_grad_x, p_scale_parts, p_shift_parts, p_grad_mean, p_grad_variance,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Compute the gradient of x, the gradients of weight and bias per tile (p_…_parts, (B · tiles, D)), and, in the
    first tile of a row, the gradients of the state."""
    i_row, i_tile, i_group = program_place(tl.program_id(0).to(tl.int64), tiles, groups, together)
    b_x, b_grad, b_scaled, b_deviation, b_rstd, b_mu, b_a, b_b, b_r, b_q, b_origin = _gradient_tile(
        p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
        p_grad_mean_after, p_grad_variance_after, i_row, i_tile, i_group, length, tiles, eps,
        beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
        features, groups, size, width, steps, cumulative,
    )  # fmt: skip
    m_group = i_group < groups
    later = p_later + ((i_row * (tiles - 1) + i_tile) * 3) * groups + i_group
    m_later = m_group & (i_tile < tiles - 1)
    b_r_after = tl.load(later, mask=m_later, other=0.0)[None]
    b_q_after = tl.load(later + groups, mask=m_later, other=0.0)[None]
    if cumulative:
        b_origin_after = tl.load(later + 2 * groups, mask=m_later, other=0.0)[None]
        _, b_r, b_q, _ = _join_pooled_gradients(b_a, b_r_after, b_q_after, b_origin_after, b_a, b_r, b_q, b_origin)
        b_grad_mu, b_grad_sigma2 = b_r + 2 * (b_mu - b_origin) * b_q, b_q
    else:
        b_r, b_q = b_r + b_a * b_r_after, b_q + b_b * b_q_after
        b_grad_mu, b_grad_sigma2 = added_mean * b_r, added_variance * b_q

    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = held_places(i_t, i_group, length, groups, size, width)
    offsets = tile_offsets(i_row, i_t, i_group, length, features, size, width)
    b_grad_x = b_scaled * b_rstd[:, :, None] + (b_grad_mu / size)[:, :, None]
    b_grad_x += (b_x - b_mu[:, :, None]) * (b_grad_sigma2 * (2.0 / size))[:, :, None]
    tl.store(p_grad_x + offsets, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_x)

    parts = (i_row * tiles + i_tile) * features + feature_offsets(i_group, size, width)
    m_feature = feature_mask(i_group, groups, size, width)
    tl.store(p_scale_parts + parts, tl.sum(b_grad * b_deviation * b_rstd[:, :, None], 0), mask=m_feature)
    tl.store(p_shift_parts + parts, tl.sum(b_grad, 0), mask=m_feature)

    state, m_state = i_row * groups + i_group, m_group & (i_tile == 0)
    continues = load_begins(p_begin, i_row, tl.zeros([1], tl.int64), length) < 0
    b_continues = tl.where(continues, 1.0, 0.0)
    b_r_first, b_q_first = row_of(b_r, i_t, 0) * b_continues, row_of(b_q, i_t, 0) * b_continues
    if cumulative:
        count = tl.load(p_count + i_row).to(tl.float32)
        b_mean = tl.load(p_mean + state, mask=m_state, other=0.0)
        b_r_first += 2 * (b_mean - row_of(b_origin, i_t, 0)) * b_q_first
        b_r_first, b_q_first = b_r_first * count, b_q_first * count
    else:
        b_r_first, b_q_first = b_r_first * beta_mean, b_q_first * beta_variance
    tl.store(p_grad_mean + state, b_r_first, mask=m_state)
    tl.store(p_grad_variance + state, b_q_first, mask=m_state)
