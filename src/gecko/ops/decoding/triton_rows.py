"""Triton kernels of a step by whole rows: embedding, norm and moving average, clock, next token.

``state_of`` and ``place_of`` say where a row is: its state in the slot of that number or in a page, and its token in
document, chunk and window. States are changed in place. ``heads_kernel`` counts the step after ``average_kernel``.

If a tile has fewer numbers than a program has threads, several threads load the same number, and one of them stores the
new one. A barrier between both keeps a slow thread from loading what another has stored already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.timestep_norm.triton_tiles import centered_moments, feature_mask, feature_offsets, one_minus_exp

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def state_of(p_states, p_page, row, numbers: tl.constexpr, page_bytes: tl.constexpr):
    """Return the address of the ``numbers`` of a row in a tensor of the state.

    Without ``p_page`` the rows lie one after the other. With it the tensor is a view of pages that are ``page_bytes``
    apart, and row r is in page ``p_page[r]``.
    """
    if p_page is None:
        p_state = p_states + row * numbers
    else:
        bits: tl.constexpr = p_states.dtype.element_ty.primitive_bitwidth  # 1 for bool, which fills a byte
        size: tl.constexpr = bits // 8 if bits > 8 else 1
        p_state = p_states + tl.load(p_page + row) * (page_bytes // size)
    return p_state


@triton.jit
def place_of(p_position, p_start, row, chunk: tl.constexpr, attention: tl.constexpr):
    """Return position, start of its document and of its chunk, and the first position that the window has of it."""
    position, start = tl.load(p_position + row), tl.load(p_start + row)
    chunk_start = position - position % chunk
    if attention == "sliding_window":
        first = position - chunk + 1
    elif attention == "chunk":
        first = chunk_start
    else:
        first = chunk_start - chunk
    return position, start, chunk_start, tl.maximum(first, start)


@triton.jit
def is_visible(i_slot, position, first, chunk: tl.constexpr):
    """Return whether attention sees the token in a ring slot: position j is in slot j mod 2c."""
    own_slot = position % (2 * chunk)
    age = tl.where(i_slot <= own_slot, own_slot - i_slot, own_slot - i_slot + 2 * chunk)
    return position - age >= first


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


@triton.jit
def embed_kernel(p_token, p_embedding, p_x, scale, vocabulary: tl.constexpr, features: tl.constexpr,
                 stride: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Read the embedding of a row's token. Token −1, which follows broken logits, is read as token 0; a token after the
    vocabulary is NaN."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    token = tl.maximum(tl.load(p_token + row), 0)
    m = (i < features) & (token < vocabulary)
    b_x = tl.load(p_embedding + token * stride + i, mask=m, other=float("nan")).to(tl.float32)
    tl.store(p_x + row * features + i, b_x * scale, mask=i < features)


@triton.jit
def advance_kernel(p_position, p_count, p_page, page_bytes: tl.constexpr):
    """Count the step of a row, after all other kernels have read the position and the final norm its count, if it has
    one."""
    row = tl.program_id(0)
    tl.store(p_position + row, tl.load(p_position + row) + 1)
    if p_count is not None:
        p_count = state_of(p_count, p_page, row, 1, page_bytes)
        tl.store(p_count, tl.load(p_count) + 1)


@triton.jit
def _waiting_time(bits):
    """Return −log(1 − u), exponentially distributed, for u = (bits + ½) / 2³²; also small times have full precision."""
    u = (bits.to(tl.float32) + 0.5) * 2.0**-32
    near = u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))
    return tl.where(u < 0.01, near, -tl.log(1 - tl.minimum(u, 1 - 2.0**-24)))


@triton.jit
def _better(p_logits, i, bits, temperature, drawn, vocabulary: tl.constexpr, b_best, b_token, b_broken):
    """Return the better of the best token so far and token i, in each lane, and whether logits were not finite."""
    m = i < vocabulary
    b_logit = tl.load(p_logits + i, mask=m, other=0.0)
    b_broken |= m & ~(tl.abs(b_logit) < float("inf"))
    b_score = tl.where(drawn, b_logit / temperature - tl.log(_waiting_time(bits)), b_logit)
    better = m & (b_score > b_best)
    return tl.where(better, b_score, b_best), tl.where(better, i, b_token), b_broken


@triton.jit
def draw_kernel(p_logits, p_temperature, p_seed, p_position, p_scores, p_tokens, vocabulary: tl.constexpr,
                block: tl.constexpr):  # fmt: skip
    """Choose one of 4 blocks of tokens of a row, with its score: the first of the most likely ones at temperature 0,
    else one drawn from the softmax of logits / temperature. It is −1, with an infinite score, if a logit is not finite.

    Token i waits for an exponentially distributed time with rate exp(logit / temperature); the first one is chosen. Its
    random number is a function of the row's seed, the position and i, so a draw can be repeated.
    """
    row = tl.program_id(0).to(tl.int64)
    p_logits += row * vocabulary
    temperature = tl.load(p_temperature + row)
    drawn = temperature > 0
    temperature = tl.where(drawn, tl.maximum(temperature, 1e-30), 1.0)  # no logit / temperature overflows
    seed, position = tl.load(p_seed + row), tl.load(p_position + row)
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    b_best, b_token = tl.full([block], float("-inf"), tl.float32), tl.zeros([block], tl.int32)
    b_broken = tl.zeros([block], tl.int1)
    i = tl.program_id(1) * 4 * block + tl.arange(0, block)
    bits = tl.philox(seed, i, low, high, 0)
    for part in tl.static_range(4):
        b_best, b_token, b_broken = _better(
            p_logits, i + part * block, bits[part], temperature, drawn, vocabulary, b_best, b_token, b_broken
        )
    best = tl.max(b_best, 0)
    token = tl.min(tl.where(b_best == best, b_token, vocabulary), 0)
    broken = tl.max(b_broken.to(tl.int32), 0) > 0
    i_choice = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_scores + i_choice, tl.where(broken, float("inf"), best))
    tl.store(p_tokens + i_choice, tl.where(broken, -1, token))


@triton.jit
def choose_kernel(p_scores, p_tokens, p_token, choices: tl.constexpr, width: tl.constexpr):
    """Choose the token of a row with the highest score of its ``choices``, the first one of equal scores."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    b_score = tl.load(p_scores + row * choices + i, mask=i < choices, other=float("-inf"))
    b_token = tl.load(p_tokens + row * choices + i, mask=i < choices, other=2**31 - 1)
    token = tl.min(tl.where(b_score == tl.max(b_score, 0), b_token, 2**31 - 1), 0)
    tl.store(p_token + row, token.to(tl.int64))
