"""Triton backend of the timestep norm, parallel over time: forward and backward are one launch each.

A program processes one tile: some steps of some groups of features. It computes the sums of its tile alone, stores them
for later tiles, waits for those of the tiles before, and computes its result. A tile may hold several documents; the
scan is reset where one starts. The backward pass goes through the tiles from the last to the first: the gradients of
the running statistics are sums over all later steps of the document. Only x and the statistics before tiles are saved.

- **Order.** Tiles form blocks of ``in_block``. What is before a tile are the sums after the block before, and those of
  the tiles since, always added in this order: results do not depend on which program runs first.
- **Waiting.** A program takes its number from a counter when it starts, and waits for smaller numbers only. Those have
  started, so some program can always go on, in whatever order the GPU starts programs.
- **Visibility.** A number and the bit that says that it is there are one word of 64 bits, written and read by atomic
  operations. So no order between several words is needed.

Cumulative statistics are combined as (count, mean, mean variance), which avoids cancellation if the mean is large.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.common import contiguous, empty_contiguous
from gecko.ops.timestep_norm.chunked import Statistics, TimestepNormState
from gecko.ops.timestep_norm.triton_backward import gradients
from gecko.ops.timestep_norm.triton_tiles import (
    at_step,
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
    publish,
    published,
    running_statistics,
    scan_of_spans,
    steps_before,
    take_number,
    times,
)
from gecko.runtime.tensors import to_device
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment


_NUMBERS_OF_WARP = 2048, 1024
"""Numbers of x that a warp processes: for decaying and for cumulative statistics."""


def timestep_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, state: TimestepNormState,
    segments: Segments, dtype: torch.dtype | None = None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute ``timestep_norm`` for the dtypes of the kernels, without context exchange."""

    def begins(segments: Segments) -> Tensor:
        """Return the step of the call at which the document of each step started, or −1 if before; (B, T) int32."""
        assert segments.starts is not None
        steps = np.where(segments.starts, np.arange(segments.length), -1)
        return to_device(torch.from_numpy(np.maximum.accumulate(steps, axis=1).astype(np.int32)), segments.device)

    groups, betas, eps = statistics
    y, count, mean, variance, _ = _timestep_norm(
        x, weight, bias, state.count, state.mean, state.variance,
        None if segments.starts is None else segments.shared("begins", begins), groups,
        None if betas is None else list(betas), eps, dtype or x.dtype,
    )  # fmt: skip
    return y, type(state)(count, mean, variance)


def _sizes(length: int, features: int, groups: int, cumulative: bool) -> dict[str, int]:
    """Return the sizes of a tile. It spans at least 64 adjacent numbers per step (whole cache lines) if D allows."""
    size = features // groups
    width = tile(size, 1)
    together = min(tile(groups, 1), max(1, 64 // width))
    steps = 4 if length <= 4 else min(128, max(4, 8192 // (together * width)))
    span = min(steps, _NUMBERS_OF_WARP[cumulative] // 256)  # a warp moves 256 numbers of 16 bits at a time
    return {
        "features": features, "groups": groups, "size": size, "width": width, "together": together, "span": span,
        "spans": steps // span,
    }  # fmt: skip


def _tiles_in_block(together: int) -> int:
    """Return the tiles of a block. Blocks wait for each other in turn, and a program reads two words per tile of its
    block and group."""
    return max(2, min(32, 64 // together))


def _tiling(
    x: Tensor, count: Tensor, groups: int, betas: list[float] | None
) -> tuple[int, tuple[int], dict[str, Any], int]:
    """Return the number of tiles of a row in time, the grid, the arguments that are the same forwards and backwards,
    and the warps. ``p_words`` are the zeros by which programs exchange numbers, or None if a row has one tile."""
    (batch, length, features), cumulative = x.shape, betas is None
    sizes = _sizes(length, features, groups, cumulative)
    steps, in_block = sizes["span"] * sizes["spans"], _tiles_in_block(sizes["together"])
    tiles = blocks(length, steps)
    words = 1 + batch * (tiles + blocks(tiles, in_block)) * groups * 2
    given = {
        "p_words": count.new_zeros(words) if tiles > 1 else None, "length": length, "tiles": tiles, **sizes,
        "in_block": in_block, **decay_arguments(betas),
    }  # fmt: skip
    warps = max(1, steps * sizes["together"] * sizes["width"] // _NUMBERS_OF_WARP[cumulative])
    return tiles, (batch * tiles * blocks(groups, sizes["together"]),), given, warps


def decay_arguments(betas: list[float] | None) -> dict[str, Any]:
    """Return β, 1 − β and log β, computed in float64 and rounded once."""
    beta_mean, beta_variance = betas or (1.0, 1.0)
    log_mean, log_variance = (math.log(beta) if beta > 0 else -1e9 for beta in (beta_mean, beta_variance))
    return {
        "beta_mean": beta_mean, "beta_variance": beta_variance,
        "added_mean": 1 - beta_mean, "added_variance": 1 - beta_variance,
        "log_mean": log_mean, "log_variance": log_variance, "cumulative": betas is None,
    }  # fmt: skip


@custom_op("timestep_norm_backward")
def _backward(
    grad_y: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, x: Tensor, weight: Tensor | None,
    count: Tensor, mean: Tensor, variance: Tensor, begins: Tensor | None, carry: Tensor, groups: int,
    betas: list[float] | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, of weight and bias (2, D), and of the mean and variance of the state."""
    tiles, grid, given, warps = _tiling(x, count, groups, betas)
    grad_x = empty_contiguous(x)
    grad_before = mean.new_empty(mean.shape), variance.new_empty(variance.shape)
    parts = mean.new_empty(2, len(x) * tiles, x.shape[2])
    Launch(gradients, grid, {
        **contiguous(
            p_x=x, p_grad_y=grad_y, p_count=count, p_mean=mean, p_variance=variance, p_grad_mean_after=grad_mean,
            p_grad_variance_after=grad_variance,
        ), "p_begin": begins, "p_carry": carry, "p_weight": weight, "p_grad_x": grad_x, "p_scale_parts": parts[0],
        "p_shift_parts": parts[1], "p_grad_mean": grad_before[0], "p_grad_variance": grad_before[1], "eps": eps,
        **given,
    }, warps).run()  # fmt: skip
    return grad_x, parts.sum(1), *grad_before


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, count, mean, variance, begins, *ctx.fixed, _ = inputs
    ctx.save_for_backward(x, weight, bias, count, mean, variance, begins, output[4])
    ctx.set_materialize_grads(False)


def _propagate(
    ctx: Any, grad_y: Tensor | None, _: Any, grad_mean: Tensor | None, grad_variance: Tensor | None, __: Any
) -> tuple[Any, ...]:
    x, weight, bias, count, mean, variance, begins, carry = ctx.saved_tensors
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_x, affine, grad_mean, grad_variance = _backward(
        grad_y, grad_mean, grad_variance, x, weight, count, mean, variance, begins, carry, *ctx.fixed
    )
    grad_weight = None if weight is None else affine[0].to(weight.dtype)
    grad_bias = None if bias is None else affine[1].to(bias.dtype)
    return grad_x, grad_weight, grad_bias, None, grad_mean, grad_variance, *[None] * 5


@custom_op("timestep_norm")
def _timestep_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor,
    begins: Tensor | None, groups: int, betas: list[float] | None, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tiles, grid, given, warps = _tiling(x, count, groups, betas)
    x, count, mean, variance = (x.contiguous() for x in (x, count, mean, variance))
    carry = mean.new_empty(len(x), tiles - 1, 2, groups)
    y = torch.empty_like(x, dtype=dtype)
    after = (torch.empty_like(count), torch.empty_like(mean), torch.empty_like(variance))
    Launch(normalise_tiles, grid, {
        "p_x": x, "p_begin": begins, "p_carry": carry, "p_count": count, "p_mean": mean, "p_variance": variance,
        "p_weight": weight, "p_bias": bias, "p_y": y, "p_count_after": after[0], "p_mean_after": after[1],
        "p_variance_after": after[2], "eps": eps, **given,
    }, warps).run()  # fmt: skip
    return y, *after, carry


_timestep_norm.register_autograd(_propagate, setup_context=_keep)


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
