# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The timestep norm's kernels: what a program does with its tile.

Time runs along axis 0, groups along axis 1, the features of a group along axis 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _join_decayed(a_before, b_before, m_before, v_before, a, b, m, v):
    """Two stretches of m ← a m + …, v ← b v + … one after the other."""
    return a_before * a, b_before * b, a * m_before + m, b * v_before + v


@triton.jit
def _join_pooled(k_before, n_before, m_before, v_before, k, n, m, v):
    """Mean and variance of two samples together; k is 0 where the second begins a document."""
    n_before = k * n_before
    total = n_before + n
    share = n_before / tl.maximum(total, 1.0)
    step = m_before - m
    return k_before * k, total, m + share * step, v + share * (v_before - v + (1 - share) * step * step)


@triton.jit
def _join_pooled_gradients(k_after, r_after, q_after, m_after, k, r, q, m):
    """Σ (g_mean − 2 (mean_t − m) g_variance) / n and Σ g_variance / n over two stretches, m the mean at their first
    step; k is 0 where the later one is of another document."""
    return k_after * k, r + k * (r_after - 2 * (m_after - m) * q_after), q + k * q_after, m


@triton.jit
def _one_minus_exp(z):
    """1 − exp(z) for z ≤ 0, to the last digits near 0 too."""
    near = tl.maximum(z, -0.5)
    series = near * (1 + near / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5 * (1 + near / 6 * (1 + near / 7))))))
    return tl.where(z > -0.5, -series, 1 - tl.exp(z))


@triton.jit
def _place(tiles, groups: tl.constexpr, together: tl.constexpr):
    """Row, tile and groups of this program; groups follow each other first."""
    across = (groups + together - 1) // together
    program = tl.program_id(0).to(tl.int64)
    i_group = (program % across) * together + tl.arange(0, together)
    return program // across // tiles, program // across % tiles, i_group


@triton.jit
def _offsets(i_row, i_t, i_group, length, features: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    return ((i_row * length + i_t) * features)[:, None, None] + _features(i_group, size, width)[None]


@triton.jit
def _features(i_group, size: tl.constexpr, width: tl.constexpr):
    return i_group[:, None] * size + tl.arange(0, width)[None]


@triton.jit
def _held(i_t, i_group, length, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    m_features = (i_group < groups)[:, None] & (tl.arange(0, width) < size)[None]
    return (i_t < length)[:, None, None] & m_features[None]


@triton.jit
def _document_begins(p_begin, i_row, i_t, length):
    if p_begin is None:
        return tl.full(i_t.shape, -1, tl.int64)
    else:
        return tl.load(p_begin + i_row * length + i_t, mask=i_t < length, other=-1).to(tl.int64)


@triton.jit
def _counts(p_count, i_row, i_t, i_begin):
    """Steps of its document up to each step, that one included."""
    return tl.where(i_begin < 0, tl.load(p_count + i_row) + i_t, i_t - i_begin) + 1


@triton.jit
def _moments(b_x, m_x, size: tl.constexpr):
    b_mu = tl.sum(b_x, 2) / size
    b_centered = tl.where(m_x, b_x - b_mu[:, :, None], 0.0)
    return b_mu, tl.sum(b_centered * b_centered, 2) / size


@triton.jit
def _scan(b_mu, b_sigma2, m_first, m_t, beta_mean, beta_variance, added_mean, added_variance,
          cumulative: tl.constexpr):  # fmt: skip
    """What the steps of the tile up to each one come to, as ``_join_…`` takes it. Steps past the end change nothing."""
    b_held = tl.where(m_t, 1.0, 0.0)[:, None] + tl.zeros_like(b_mu)
    b_goes_on = tl.where(m_first & m_t, 0.0, 1.0)[:, None] + tl.zeros_like(b_mu)
    if cumulative:
        return tl.associative_scan((b_goes_on, b_held, b_mu * b_held, b_sigma2 * b_held), 0, _join_pooled)
    else:
        b_a = tl.where(m_t[:, None], beta_mean, 1.0) * b_goes_on
        b_b = tl.where(m_t[:, None], beta_variance, 1.0) * b_goes_on
        b_m, b_v = added_mean * b_mu * b_held, added_variance * b_sigma2 * b_held
        return tl.associative_scan((b_a, b_b, b_m, b_v), 0, _join_decayed)


@triton.jit
def _before_tile(p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles,
                 groups: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """Statistics of the document that is being read where the tile begins, and its steps so far."""
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
def _statistics(b_mu, b_sigma2, b_m_before, b_v_before, count_before, m_first, m_t,
                beta_mean, beta_variance, added_mean, added_variance, cumulative: tl.constexpr):  # fmt: skip
    """Running mean and variance at every step of the tile, without bias correction."""
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
def _corrections(b_count, log_mean, log_variance, cumulative: tl.constexpr):
    """What running mean and variance are divided by."""
    if cumulative:
        return tl.full(b_count.shape, 1.0, tl.float32), tl.full(b_count.shape, 1.0, tl.float32)
    else:
        return _one_minus_exp(b_count * log_mean), _one_minus_exp(b_count * log_variance)


@triton.jit
def _row_of(b_x, i_t, i):
    """The row of b_x (steps, groups) at step i."""
    return tl.sum(tl.where((i_t == i)[:, None], b_x, 0.0), 0)


@triton.jit(do_not_specialize=["length", "tiles"])
def summaries(p_x, p_begin, p_carry, length, tiles,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Mean and variance that the steps of each tile come to by themselves, to p_carry (B, tiles − 1, 2, G)."""
    i_row, i_tile, i_group = _place(tiles - 1, groups, together)
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = _held(i_t, i_group, length, groups, size, width)
    offsets = _offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = _moments(b_x, m_x, size)
    m_first = _document_begins(p_begin, i_row, i_t, length) == i_t
    _, _, b_m, b_v = _scan(
        b_mu, b_sigma2, m_first, i_t < length, beta_mean, beta_variance, added_mean, added_variance, cumulative
    )
    last = i_tile * steps + steps - 1
    out = p_carry + ((i_row * (tiles - 1) + i_tile) * 2) * groups + i_group
    tl.store(out, _row_of(b_m, i_t, last), mask=i_group < groups)
    tl.store(out + groups, _row_of(b_v, i_t, last), mask=i_group < groups)


@triton.jit(do_not_specialize=["length", "tiles"])
def carries(p_count, p_mean, p_variance, p_begin, p_carry, length, tiles,
             beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
             groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
             columns: tl.constexpr, tiles_at_once: tl.constexpr):  # fmt: skip
    """Statistics after each tile, in place of what the tile by itself comes to."""
    i_row, _zero, i_group = _place(1, groups, columns)
    m_group = i_group < groups
    b_m_before = tl.load(p_mean + i_row * groups + i_group, mask=m_group, other=0.0)
    b_v_before = tl.load(p_variance + i_row * groups + i_group, mask=m_group, other=0.0)
    count = tl.load(p_count + i_row)
    zeros = tl.zeros([tiles_at_once, columns], tl.float32)
    for first in range(0, tiles - 1, tiles_at_once):
        i_tile = first + tl.arange(0, tiles_at_once).to(tl.int64)
        held = i_tile < tiles - 1
        # A document that began in the tile, or with it, has nothing of what came before.
        i_begin = _document_begins(p_begin, i_row, tl.where(held, i_tile * steps + steps - 1, length), length)
        goes_on = (i_begin < i_tile * steps) | (held == 0)
        b_goes_on = tl.where(goes_on, 1.0, 0.0)[:, None] + zeros
        b_held = tl.where(held, 1.0, 0.0)[:, None] + zeros
        p_tile = p_carry + ((i_row * (tiles - 1) + i_tile) * 2 * groups)[:, None] + i_group[None]
        m_tile = held[:, None] & m_group[None]
        b_m, b_v = tl.load(p_tile, mask=m_tile, other=0.0), tl.load(p_tile + groups, mask=m_tile, other=0.0)
        if cumulative:
            # Of the last document's steps in the tile; all of them where it goes on.
            b_n = tl.where(goes_on, steps, i_tile * steps + steps - i_begin).to(tl.float32)[:, None] * b_held
            b_a, b_b, b_m, b_v = tl.associative_scan((b_goes_on, b_n, b_m, b_v), 0, _join_pooled)
            i_last = tl.zeros([1], tl.int64) + tl.maximum(first * steps - 1, 0)
            i_begun = tl.where(first > 0, _document_begins(p_begin, i_row, i_last, length), -1)
            count_before = tl.where(i_begun < 0, count + first * steps, first * steps - i_begun)
            before = tl.zeros_like(b_a) + count_before.to(tl.float32)[:, None]
            _, _, b_m, b_v = _join_pooled(b_a, before, b_m_before[None], b_v_before[None], b_a, b_b, b_m, b_v)
        else:
            b_a = tl.where(held, tl.exp(steps * log_mean), 1.0)[:, None] * b_goes_on
            b_b = tl.where(held, tl.exp(steps * log_variance), 1.0)[:, None] * b_goes_on
            b_a, b_b, b_m, b_v = tl.associative_scan((b_a, b_b, b_m, b_v), 0, _join_decayed)
            b_m, b_v = b_m + b_a * b_m_before[None], b_v + b_b * b_v_before[None]
        tl.store(p_tile, b_m, mask=m_tile)
        tl.store(p_tile + groups, b_v, mask=m_tile)
        b_m_before = _row_of(b_m, i_tile, first + tiles_at_once - 1)
        b_v_before = _row_of(b_v, i_tile, first + tiles_at_once - 1)


@triton.jit(do_not_specialize=["length", "tiles"])
def normalise_tiles(p_x, p_begin, p_carry, length, tiles, p_count, p_mean, p_variance, p_weight, p_bias, p_y,
               p_count_after, p_mean_after, p_variance_after, eps,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """y of each tile; the last one writes the state."""
    i_row, i_tile, i_group = _place(tiles, groups, together)
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = _held(i_t, i_group, length, groups, size, width)
    offsets = _offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = _moments(b_x, m_x, size)
    i_begin = _document_begins(p_begin, i_row, i_t, length)
    b_m_before, b_v_before, count_before = _before_tile(
        p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles, groups, steps
    )
    b_m, b_v = _statistics(
        b_mu, b_sigma2, b_m_before, b_v_before, count_before, i_begin == i_t, i_t < length,
        beta_mean, beta_variance, added_mean, added_variance, cumulative,
    )  # fmt: skip
    count = _counts(p_count, i_row, i_t, i_begin)
    by_mean, by_variance = _corrections(count.to(tl.float32), log_mean, log_variance, cumulative)
    b_rstd = tl.rsqrt(b_v / by_variance[:, None] + eps)
    b_y = (b_x - (b_m / by_mean[:, None])[:, :, None]) * b_rstd[:, :, None]
    i_feature = _features(i_group, size, width)
    m_feature = (i_group < groups)[:, None] & (tl.arange(0, width) < size)[None]
    if p_weight is not None:
        b_y *= 1 + tl.load(p_weight + i_feature, mask=m_feature, other=0.0).to(tl.float32)[None]
    if p_bias is not None:
        b_y += tl.load(p_bias + i_feature, mask=m_feature, other=0.0).to(tl.float32)[None]
    tl.store(p_y + offsets, b_y.to(p_y.dtype.element_ty), mask=m_x)
    m_last = (i_group < groups) & (i_tile == tiles - 1)
    tl.store(p_mean_after + i_row * groups + i_group, _row_of(b_m, i_t, length - 1), mask=m_last)
    tl.store(p_variance_after + i_row * groups + i_group, _row_of(b_v, i_t, length - 1), mask=m_last)
    tl.store(p_count_after + i_row + i_t * 0, count, mask=(i_t == length - 1) & (tl.min(i_group, 0) == 0))


@triton.jit
def _gradient_tile(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
                   p_grad_mean_after, p_grad_variance_after, i_row, i_tile, i_group, length, tiles, eps,
                   beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                   features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
                   steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Gradients by the running statistics of each step, summed backwards over the tile, and what they are made of."""
    i_t = i_tile * steps + tl.arange(0, steps)
    m_x = _held(i_t, i_group, length, groups, size, width)
    offsets = _offsets(i_row, i_t, i_group, length, features, size, width)
    b_x = tl.load(p_x + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_grad = tl.load(p_grad_y + offsets, mask=m_x, other=0.0).to(tl.float32)
    b_mu, b_sigma2 = _moments(b_x, m_x, size)
    i_begin = _document_begins(p_begin, i_row, i_t, length)
    b_m_before, b_v_before, count_before = _before_tile(
        p_count, p_mean, p_variance, p_begin, p_carry, i_row, i_tile, i_group, length, tiles, groups, steps
    )
    b_m, b_v = _statistics(
        b_mu, b_sigma2, b_m_before, b_v_before, count_before, i_begin == i_t, i_t < length,
        beta_mean, beta_variance, added_mean, added_variance, cumulative,
    )  # fmt: skip
    count = _counts(p_count, i_row, i_t, i_begin).to(tl.float32)
    by_mean, by_variance = _corrections(count, log_mean, log_variance, cumulative)
    b_rstd = tl.rsqrt(b_v / by_variance[:, None] + eps)
    b_deviation = tl.where(m_x, b_x - (b_m / by_mean[:, None])[:, :, None], 0.0)
    b_scaled = b_grad
    if p_weight is not None:
        m_feature = (i_group < groups)[:, None] & (tl.arange(0, width) < size)[None]
        b_weight = tl.load(p_weight + _features(i_group, size, width), mask=m_feature, other=0.0).to(tl.float32)
        b_scaled = b_grad * (1 + b_weight)[None]
    b_grad_m = -b_rstd * tl.sum(b_scaled, 2) / by_mean[:, None]
    b_grad_v = -0.5 * b_rstd * b_rstd * b_rstd * tl.sum(b_scaled * b_deviation, 2) / by_variance[:, None]

    m_last, state = (i_t == length - 1)[:, None] & (i_group < groups)[None], (i_row * groups + i_group)[None]
    b_grad_m += tl.load(p_grad_mean_after + state, mask=m_last, other=0.0)
    b_grad_v += tl.load(p_grad_variance_after + state, mask=m_last, other=0.0)
    m_goes_on = _document_begins(p_begin, i_row, i_t + 1, length) <= i_t
    b_goes_on = tl.where(m_goes_on, 1.0, 0.0)[:, None] + tl.zeros_like(b_m)
    if cumulative:
        b_r, b_q = b_grad_m / count[:, None], b_grad_v / count[:, None]
        b_a, b_r, b_q, b_origin = tl.associative_scan((b_goes_on, b_r, b_q, b_m), 0, _join_pooled_gradients, True)
        b_b = b_a
    else:
        b_a, b_b = beta_mean * b_goes_on, beta_variance * b_goes_on
        b_a, b_b, b_r, b_q = tl.associative_scan((b_a, b_b, b_grad_m, b_grad_v), 0, _join_decayed, True)
        b_origin = b_m
    return b_x, b_grad, b_scaled, b_deviation, b_rstd, b_mu, b_a, b_b, b_r, b_q, b_origin


@triton.jit(do_not_specialize=["length", "tiles"])
def gradient_summaries(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
                        p_grad_mean_after, p_grad_variance_after, p_later, length, tiles, eps,
                        beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                        features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
                        together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Of every tile but the first, the sums at its first step, to p_later (B, tiles − 1, 3, G)."""
    i_row, i_before, i_group = _place(tiles - 1, groups, together)
    i_tile = i_before + 1
    _, _, _, _, _, _, _, _, b_r, b_q, b_origin = _gradient_tile(
        p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
        p_grad_mean_after, p_grad_variance_after, i_row, i_tile, i_group, length, tiles, eps,
        beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
        features, groups, size, width, steps, cumulative,
    )  # fmt: skip
    i_step = tl.arange(0, steps)
    out = p_later + ((i_row * (tiles - 1) + i_before) * 3) * groups + i_group
    tl.store(out, _row_of(b_r, i_step, 0), mask=i_group < groups)
    tl.store(out + groups, _row_of(b_q, i_step, 0), mask=i_group < groups)
    tl.store(out + 2 * groups, _row_of(b_origin, i_step, 0), mask=i_group < groups)


@triton.jit(do_not_specialize=["length", "tiles"])
def gradient_carries(p_begin, p_later, length, tiles,
                      beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
                      groups: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr,
                      columns: tl.constexpr, tiles_at_once: tl.constexpr):  # fmt: skip
    """The sums at the first step of each tile over all later steps of its document, in place of the tile's own."""
    i_row, _zero, i_group = _place(1, groups, columns)
    m_group = i_group < groups
    zeros = tl.zeros([tiles_at_once, columns], tl.float32)
    b_r_after = tl.zeros([columns], tl.float32)
    b_q_after, b_origin_after = b_r_after, b_r_after
    for done in range(0, tiles - 1, tiles_at_once):
        first = tiles - 1 - done - tiles_at_once
        i_before = first + tl.arange(0, tiles_at_once).to(tl.int64)
        held = i_before >= 0
        i_tile = i_before + 1
        # The last tile has no later one, and past the row's end no document begins.
        i_begin = _document_begins(p_begin, i_row, tl.where(held, (i_tile + 1) * steps, length), length)
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
            b_a, b_b, b_r, b_q = tl.associative_scan((b_a, b_b, b_r, b_q), 0, _join_decayed, True)
            b_r, b_q = b_r + b_a * b_r_after[None], b_q + b_b * b_q_after[None]
        tl.store(p_tile, b_r, mask=m_tile)
        tl.store(p_tile + groups, b_q, mask=m_tile)
        b_r_after, b_q_after = _row_of(b_r, i_before, first), _row_of(b_q, i_before, first)
        b_origin_after = _row_of(b_origin, i_before, first)


@triton.jit(do_not_specialize=["length", "tiles"])
def gradients(p_x, p_grad_y, p_begin, p_count, p_mean, p_variance, p_carry, p_weight,
               p_grad_mean_after, p_grad_variance_after, p_later, length, tiles, eps,
               p_grad_x, p_scale_parts, p_shift_parts, p_grad_mean, p_grad_variance,
               beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance,
               features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
               together: tl.constexpr, steps: tl.constexpr, cumulative: tl.constexpr):  # fmt: skip
    """Gradient of x, of weight and bias by tile, to p_…_parts (B · tiles, D), and, in the first tile, of the state."""
    i_row, i_tile, i_group = _place(tiles, groups, together)
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
    m_x = _held(i_t, i_group, length, groups, size, width)
    offsets = _offsets(i_row, i_t, i_group, length, features, size, width)
    b_grad_x = b_scaled * b_rstd[:, :, None] + (b_grad_mu / size)[:, :, None]
    b_grad_x += (b_x - b_mu[:, :, None]) * (b_grad_sigma2 * (2.0 / size))[:, :, None]
    tl.store(p_grad_x + offsets, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_x)

    parts = (i_row * tiles + i_tile) * features + _features(i_group, size, width)
    m_feature = m_group[:, None] & (tl.arange(0, width) < size)[None]
    tl.store(p_scale_parts + parts, tl.sum(b_grad * b_deviation * b_rstd[:, :, None], 0), mask=m_feature)
    tl.store(p_shift_parts + parts, tl.sum(b_grad, 0), mask=m_feature)

    state, m_state = i_row * groups + i_group, m_group & (i_tile == 0)
    continues = _document_begins(p_begin, i_row, tl.zeros([1], tl.int64), length) < 0
    b_continues = tl.where(continues, 1.0, 0.0)
    b_r_first, b_q_first = _row_of(b_r, i_t, 0) * b_continues, _row_of(b_q, i_t, 0) * b_continues
    if cumulative:
        count = tl.load(p_count + i_row).to(tl.float32)
        b_mean = tl.load(p_mean + state, mask=m_state, other=0.0)
        b_r_first += 2 * (b_mean - _row_of(b_origin, i_t, 0)) * b_q_first
        b_r_first, b_q_first = b_r_first * count, b_q_first * count
    else:
        b_r_first, b_q_first = b_r_first * beta_mean, b_q_first * beta_variance
    tl.store(p_grad_mean + state, b_r_first, mask=m_state)
    tl.store(p_grad_variance + state, b_q_first, mask=m_state)
