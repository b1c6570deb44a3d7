"""Triton backend of the timestep norm, parallel over time.

A program processes one tile: some steps of some groups of features. A tile may hold several documents; the scan is
reset where one starts. Both passes are one launch each: a program computes the sums of its tile alone, stores them for
later tiles, waits for those of the tiles before, and computes its result. x stays in registers, or in the cache where
there is too much of it. The backward pass goes through the tiles from the last to the first.

- **Order.** Tiles form blocks of ``in_block``. What is before a tile are the sums after the block before, and those of
  the tiles since, always added in this order: results do not depend on which program runs first.
- **Waiting.** A program takes its number from a counter when it starts, and waits for smaller numbers only. Those have
  started, so some program can always go on, in whatever order the GPU starts programs.
- **Visibility.** A number and the bit that says that it is there are one word of 64 bits, written and read by atomic
  operations. So no order between several words is needed.

Only x and the statistics before tiles are saved.

Memory traffic for B = 1, T = 32,768, D = 4,096, G = 64 in bfloat16 (one pass over x is 268 MB, words and statistics
between programs 2 MB, partial sums of the weight gradient 8 MB): forward 2 passes, backward 3, the minimum of both.
Instructions per number of x: ``benchmarks/results/gpu_budget.md``.

Cumulative statistics are combined as (count, mean, mean variance), which avoids cancellation if the mean is large.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op, tile
from gecko.ops.timestep_norm.chunked import TimestepNormState
from gecko.ops.timestep_norm.triton_backward import gradients
from gecko.ops.timestep_norm.triton_forward import normalise_tiles
from gecko.runtime.tensors import to_device
from gecko.segments import Segments


def timestep_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, betas: tuple[float, float] | None, eps: float,
    state: TimestepNormState, segments: Segments, dtype: torch.dtype | None = None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Compute ``timestep_norm`` for the dtypes of the kernels, without context exchange."""
    begins = None if segments.starts is None else segments.shared("begins", _begins)
    decays = None if betas is None else list(betas)
    y, count, mean, variance, _ = _timestep_norm(
        x, weight, bias, state.count, state.mean, state.variance, begins, groups, decays, eps, dtype or x.dtype
    )
    return y, type(state)(count, mean, variance)


def _begins(segments: Segments) -> Tensor:
    """Return the step of the call at which the document of each step started, or −1 if before; (B, T) int32."""
    assert segments.starts is not None
    steps = np.where(segments.starts, np.arange(segments.length), -1)
    return to_device(torch.from_numpy(np.maximum.accumulate(steps, axis=1).astype(np.int32)), segments.device)


def _sizes(length: int, features: int, groups: int, cumulative: bool) -> dict[str, int]:
    """Return the sizes of a tile. It spans at least 64 adjacent numbers per step (whole cache lines) if D allows."""
    size = features // groups
    width = tile(size, 1)
    together = min(tile(groups, 1), max(1, 64 // width))
    steps = 4 if length <= 4 else min(128, max(4, 8192 // (together * width)))
    span = min(steps, _numbers_of_warp(cumulative) // 256)  # a warp moves 256 numbers of 16 bits at a time
    return {
        "features": features, "groups": groups, "size": size, "width": width, "together": together, "span": span,
        "spans": steps // span,
    }  # fmt: skip


def _numbers_of_warp(cumulative: bool) -> int:
    return 1024 if cumulative else 2048


def _warps(sizes: dict[str, int], cumulative: bool) -> int:
    numbers = sizes["span"] * sizes["spans"] * sizes["together"] * sizes["width"]
    return max(1, numbers // _numbers_of_warp(cumulative))


def _tiles_in_block(together: int) -> int:
    """Return the tiles of a block. Blocks wait for each other in turn, and a program reads two words per tile of its
    block and group."""
    return max(2, min(32, 64 // together))


def _tiling(length: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Return the number of tiles of a row in time, and across its features."""
    return blocks(length, sizes["span"] * sizes["spans"]), blocks(sizes["groups"], sizes["together"])


def _words(count: Tensor, tiles: int, groups: int, in_block: int) -> Tensor | None:
    """Return the zeros by which programs exchange numbers, or None if a row has one tile."""
    words = 1 + len(count) * (tiles + blocks(tiles, in_block)) * groups * 2
    return count.new_zeros(words) if tiles > 1 else None


def decay_arguments(betas: list[float] | None) -> dict[str, Any]:
    """Return β, 1 − β and log β, computed in float64 and rounded once."""
    beta_mean, beta_variance = betas or (1.0, 1.0)
    log_mean, log_variance = (math.log(beta) if beta > 0 else -1e9 for beta in (beta_mean, beta_variance))
    return {
        "beta_mean": beta_mean, "beta_variance": beta_variance,
        "added_mean": 1 - beta_mean, "added_variance": 1 - beta_variance,
        "log_mean": log_mean, "log_variance": log_variance, "cumulative": betas is None,
    }  # fmt: skip


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor,
    begins: Tensor | None, groups: int, betas: list[float] | None, eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, features = x.shape
    sizes, decay = _sizes(length, features, groups, betas is None), decay_arguments(betas)
    tiles, across = _tiling(length, sizes)
    in_block = _tiles_in_block(sizes["together"])
    x, count, mean, variance = (x.contiguous() for x in (x, count, mean, variance))
    carry = mean.new_empty(batch, tiles - 1, 2, groups)
    y = torch.empty_like(x, dtype=dtype)
    after = (torch.empty_like(count), torch.empty_like(mean), torch.empty_like(variance))
    Launch(normalise_tiles, (batch * tiles * across,), {
        "p_x": x, "p_begin": begins, "p_carry": carry, "p_words": _words(count, tiles, groups, in_block),
        "length": length, "tiles": tiles, "p_count": count, "p_mean": mean, "p_variance": variance,
        "p_weight": weight, "p_bias": bias, "p_y": y, "p_count_after": after[0], "p_mean_after": after[1],
        "p_variance_after": after[2], "eps": eps, **sizes, **decay, "in_block": in_block,
    }, _warps(sizes, betas is None)).run()  # fmt: skip
    return y, *after, carry


def _backward(
    grad_y: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, x: Tensor, weight: Tensor | None,
    count: Tensor, mean: Tensor, variance: Tensor, begins: Tensor | None, carry: Tensor, groups: int,
    betas: list[float] | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, of weight and bias (2, D), and of the mean and variance of the state."""
    batch, length, features = x.shape
    sizes, decay = _sizes(length, features, groups, betas is None), decay_arguments(betas)
    tiles, across = _tiling(length, sizes)
    in_block = _tiles_in_block(sizes["together"])
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_before = mean.new_empty(mean.shape), variance.new_empty(variance.shape)
    parts = mean.new_empty(2, batch * tiles, features)
    Launch(gradients, (batch * tiles * across,), {
        "p_x": x.contiguous(), "p_grad_y": grad_y.contiguous(), "p_begin": begins, "p_count": count.contiguous(),
        "p_mean": mean.contiguous(), "p_variance": variance.contiguous(), "p_carry": carry,
        "p_words": _words(count, tiles, groups, in_block), "p_weight": weight,
        "p_grad_mean_after": None if grad_mean is None else grad_mean.contiguous(),
        "p_grad_variance_after": None if grad_variance is None else grad_variance.contiguous(),
        "p_grad_x": grad_x, "p_scale_parts": parts[0], "p_shift_parts": parts[1], "p_grad_mean": grad_before[0],
        "p_grad_variance": grad_before[1], "length": length, "tiles": tiles, "eps": eps, **sizes, **decay,
        "in_block": in_block,
    }, _warps(sizes, betas is None)).run()  # fmt: skip
    return grad_x, parts.sum(1), *grad_before


_timestep_norm = custom_op("timestep_norm")(_forward)
_timestep_norm_backward = custom_op("timestep_norm_backward")(_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, count, mean, variance, begins, *ctx.fixed, _ = inputs
    ctx.save_for_backward(x, weight, bias, count, mean, variance, begins, output[4])
    ctx.set_materialize_grads(False)


def _propagate(
    ctx: Any, grad_y: Tensor | None, _: Any, grad_mean: Tensor | None, grad_variance: Tensor | None, __: Any
) -> tuple[Any, ...]:
    x, weight, bias, count, mean, variance, begins, carry = ctx.saved_tensors
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_x, affine, grad_mean, grad_variance = _timestep_norm_backward(
        grad_y, grad_mean, grad_variance, x, weight, count, mean, variance, begins, carry, *ctx.fixed
    )
    grad_weight = None if weight is None else affine[0].to(weight.dtype)
    grad_bias = None if bias is None else affine[1].to(bias.dtype)
    return grad_x, grad_weight, grad_bias, None, grad_mean, grad_variance, *[None] * 5


_timestep_norm.register_autograd(_propagate, setup_context=_keep)
