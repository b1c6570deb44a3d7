"""Triton kernels of the ends of a step: embedding, rotation for sinks, clock, and the choice of the next token."""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.decoding.triton_pages import state_of

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


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
def turn_kernel(p_position, p_start, p_frequencies, p_turns, pairs: tl.constexpr, width: tl.constexpr):
    """Store cosine and sine of the angles of a token's number in its document, (pairs, 2). They are computed in
    float64, as the number may be large: from the Taylor series of a quarter of the angle, at most π / 4."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    number = (tl.load(p_position + row) - tl.load(p_start + row)).to(tl.float64)
    b_turns = number * tl.load(p_frequencies + i, mask=i < pairs, other=0.0) * 0.15915494309189535  # 1 / 2π
    b_turns -= (b_turns + 0.5).to(tl.int64).to(tl.float64)
    b_x = b_turns * 1.5707963267948966
    b_square = b_x * b_x
    b_cosine, b_sine = tl.full([width], 1.0, tl.float64), tl.full([width], 1.0, tl.float64)
    for term in tl.static_range(14, 0, -2):
        b_cosine = 1 - b_square * (1 / (term * (term - 1))) * b_cosine
        b_sine = 1 - b_square * (1 / (term * (term + 1))) * b_sine
    b_sine *= b_x
    for _ in tl.static_range(2):
        b_cosine, b_sine = b_cosine * b_cosine - b_sine * b_sine, 2 * b_cosine * b_sine
    p_pair = p_turns + (row * pairs + i) * 2
    tl.store(p_pair, b_cosine.to(tl.float32), mask=i < pairs)
    tl.store(p_pair + 1, b_sine.to(tl.float32), mask=i < pairs)


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
