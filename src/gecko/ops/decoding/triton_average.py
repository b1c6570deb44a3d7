"""Triton kernel of the timestep norm and the moving average of one token of several sequences.

The state of a row is in its slot or page, and is changed in place. ``heads_kernel`` counts the step afterwards.

If a tile has fewer numbers than a program has threads, several threads load the same number, and one of them stores the
new one. A barrier between both keeps a slow thread from loading what another has stored already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.decoding.triton_pages import state_of
from gecko.ops.timestep_norm.triton_tiles import centered_moments, feature_mask, feature_offsets, one_minus_exp

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def _running_norm(
    b_x, p_count, p_mean, p_variance, i_group, beta_mean, beta_variance, added_mean, added_variance,
    log_mean, log_variance, groups: tl.constexpr, size: tl.constexpr, cumulative: tl.constexpr,
):  # fmt: skip
    """Add the step x (1, groups, features) to the statistics. Return mean and variance to normalise it with."""
    i_state = i_group[None]
    m_state = (i_group < groups)[None]
    b_m = tl.load(p_mean + i_state, mask=m_state, other=0.0)
    b_v = tl.load(p_variance + i_state, mask=m_state, other=0.0)
    count = (tl.load(p_count) + 1).to(tl.float32)
    _, b_mu, b_sigma2 = centered_moments(b_x, size)
    tl.debug_barrier()  # all threads have loaded the statistics
    if cumulative:
        b_step = b_mu - b_m
        b_m += b_step / count
        b_v += (b_sigma2 + b_step * (b_mu - b_m) - b_v) / count
        b_center, b_spread = b_m, b_v
    else:
        b_m = beta_mean * b_m + added_mean * b_mu
        b_v = beta_variance * b_v + added_variance * b_sigma2
        b_center, b_spread = b_m / one_minus_exp(count * log_mean), b_v / one_minus_exp(count * log_variance)
    tl.store(p_mean + i_state, b_m, mask=m_state)
    tl.store(p_variance + i_state, b_v, mask=m_state)
    return b_center, b_spread


@triton.jit
def _loaded(p_tables, p_skip, p_state, m_x, i_feature, features: tl.constexpr, modes: tl.constexpr,
            modes_width: tl.constexpr, table_row: tl.constexpr):  # fmt: skip
    """Load what the moving average of some features takes. The tables are those of the C decoder: factors of h, of h
    with swapped parts, of x, and of the output, each (D, 2N) padded to ``table_row``."""
    i_pair = tl.arange(0, 2 * modes_width)[None, None, :]
    m_pair = m_x[:, :, None] & (i_pair < 2 * modes)
    i_table = (i_feature * table_row)[:, :, None] + i_pair
    shape: tl.constexpr = (i_feature.shape[0], i_feature.shape[1], modes_width, 2)
    table: tl.constexpr = features * table_row
    i_state = i_feature[:, :, None] * (2 * modes) + i_pair
    h = tl.split(tl.reshape(tl.load(p_state + i_state, mask=m_pair, other=0.0), shape))
    q_real, _ = tl.split(tl.reshape(tl.load(p_tables + i_table, mask=m_pair, other=0.0), shape))
    _, q_imag = tl.split(tl.reshape(tl.load(p_tables + table + i_table, mask=m_pair, other=0.0), shape))
    b_in, _ = tl.split(tl.reshape(tl.load(p_tables + 2 * table + i_table, mask=m_pair, other=0.0), shape))
    out = tl.split(tl.reshape(tl.load(p_tables + 3 * table + i_table, mask=m_pair, other=0.0), shape))
    return i_state, m_pair, h, q_real, q_imag, b_in, out, tl.load(p_skip + i_feature, mask=m_x, other=0.0)


@triton.jit
def _moving_average(b_x, p_state, loaded):
    """Compute h ← q h + p x and return Re Σ γ h + ω x, for x (groups, features)."""
    i_state, m_pair, h, q_real, q_imag, b_in, out, b_skip = loaded
    b_real = q_real * h[0] - q_imag * h[1] + b_in * b_x[:, :, None]
    b_imag = q_real * h[1] + q_imag * h[0]
    tl.debug_barrier()  # all threads have loaded the state
    tl.store(p_state + i_state, tl.reshape(tl.join(b_real, b_imag), i_state.shape), mask=m_pair)
    return tl.sum(out[0] * b_real + out[1] * b_imag, 2) + b_skip * b_x


@triton.jit
def average_kernel(
    p_x, p_scale, p_shift, p_count, p_mean, p_variance, p_tables, p_skip, p_state, p_normal, p_averaged, p_page,
    beta_mean, beta_variance, added_mean, added_variance, log_mean, log_variance, eps, features: tl.constexpr,
    groups: tl.constexpr, size: tl.constexpr, width: tl.constexpr, together: tl.constexpr, modes: tl.constexpr,
    modes_width: tl.constexpr, table_row: tl.constexpr, cumulative: tl.constexpr, page_bytes: tl.constexpr,
):  # fmt: skip
    """Timestep norm of some groups of a row, and their moving average if there is a ``p_state``."""
    row = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1) * together + tl.arange(0, together)
    i_feature, m_x = feature_offsets(i_group, size, width), feature_mask(i_group, groups, size, width)
    b_x = tl.load(p_x + row * features + i_feature, mask=m_x, other=0.0)
    b_scale = tl.load(p_scale + i_feature, mask=m_x, other=0.0)
    b_shift = tl.load(p_shift + i_feature, mask=m_x, other=0.0)
    if p_state is not None:  # all loads are issued before the first store, and waited for once
        p_state = state_of(p_state, p_page, row, 2 * features * modes, page_bytes)
        loaded = _loaded(p_tables, p_skip, p_state, m_x, i_feature, features, modes, modes_width, table_row)
    b_center, b_spread = _running_norm(
        b_x[None], state_of(p_count, p_page, row, 1, page_bytes), state_of(p_mean, p_page, row, groups, page_bytes),
        state_of(p_variance, p_page, row, groups, page_bytes), i_group, beta_mean, beta_variance, added_mean,
        added_variance, log_mean, log_variance, groups, size, cumulative,
    )  # fmt: skip
    b_y = (b_x[None] - b_center[:, :, None]) * tl.rsqrt(b_spread + eps)[:, :, None] * b_scale[None]
    b_y = tl.sum(b_y, 0) + b_shift
    tl.store(p_normal + row * features + i_feature, b_y.to(p_normal.dtype.element_ty), mask=m_x)
    if p_state is not None:
        b_averaged = _moving_average(b_y, p_state, loaded)
        tl.store(p_averaged + row * features + i_feature, b_averaged, mask=m_x)
