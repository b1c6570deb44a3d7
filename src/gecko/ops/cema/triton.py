"""Triton backend of CEMA: launches of the filter and of its gradients, and the custom operators.

A program processes a few channels of one row, one tile of sixteen items at a time (``varlen_tiles.py``). For each
channel the items are the rows of matrix products with the tables of a chunk of C steps (``chunked.py``), which are
kept in registers. The program computes what each item adds to the state, x G, then the state before each item by a scan
over the sixteen items. Then it reads x again, from the cache, and computes y = x T + h W and h ← q^C h + x G.

The gradient of x is the same filter run backwards in time with γ and p exchanged. The skip connection ω x is added to
k[0]. The gradients of the coefficients need one more forward pass with ∂h / ∂ log q (``triton_backward.py``). Only x,
the states before and after the call and small tables are saved.

For bfloat16 x, C = 32 and factors are bfloat16: x is exact, tables and states are the sum of two bfloat16 numbers (16
bits), except in the pass over coefficients, where they are one. For float16 x, C = 16 and products are tf32, which
represents x exactly; tables and states are rounded to 11 bits by one instruction, because tensor cores truncate, but
products of states and gradients are three tf32 products. For float32, C = 16 and each product is three tf32 products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op
from gecko.ops.cema.chunked import CEMACoefficients, cema_chunked
from gecko.ops.cema.triton_backward import coefficient_gradients_kernel, gradients_kernel, response_kernel
from gecko.ops.cema.triton_forward import filter_kernel
from gecko.ops.cema.varlen_tiles import ITEMS, MOST_MODES, VarlenTilePlan
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

_CHANNELS = 8
"""Channels per program of the kernels over coefficients."""

_STAGES = 3
"""Chunks of tokens in flight: the one that a program processes, and two that it loads meanwhile. A multiprocessor has
registers for one program, so no other program works while it waits for memory."""


def cema_triton(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor | None, segments: Segments, skip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``cema`` for at least ``FEWEST`` tokens. The chunked form processes the first T mod unit tokens."""
    plan = VarlenTilePlan.of(segments)
    head = x[:, : plan.head]
    if plan.head_segments is not None:
        if state is None:
            state = x.new_zeros(len(x), *coefficients.output.shape, dtype=torch.float32)
        y_head, state = cema_chunked(head.float(), coefficients, state, plan.head_segments)
        head = y_head.to(x.dtype) if skip is None else torch.addcmul(y_head, head, skip).to(x.dtype)
    given = coefficients.input, coefficients.log_damping, coefficients.angle, coefficients.output
    tables = (None if tensor is None else tensor.float().contiguous() for tensor in (*given, skip, state))
    y, after, *_ = _cema(
        x[:, plan.head :].contiguous(), *tables, plan.continues, list(plan.forwards), list(plan.backwards), plan.unit
    )
    return (torch.cat([head, y], dim=1) if plan.head else y), after


_Tables = tuple[Tensor, Tensor, Tensor]
"""Tables that the passes over tokens read: k of one chunk (D, C), and q and p as complex numbers (D, N, 2)."""


def _grid(p: Tensor) -> tuple[int]:
    return (blocks(len(p), _CHANNELS),)


def _sizes(p: Tensor, chunk: int) -> dict[str, int]:
    """Return the size arguments of kernels over coefficients p (D, N)."""
    return {"channels": p.shape[0], "modes": p.shape[1], "chunk": chunk, "b_d": _CHANNELS, "b_n": MOST_MODES}


def _filter(
    x: Tensor, tables: _Tables, into: Tensor, out: Tensor, before: Tensor | None, continues: Tensor | None,
    items: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the state after it; with ``continues``, backwards in time."""
    (batch, _, channels), modes, (response, decay, _) = x.shape, into.shape[1], tables
    y, after = torch.empty_like(x), into.new_empty(batch, channels, modes, 2)
    arguments = {
        "p_x": x, "p_y": y, "p_response": response, "p_in": into, "p_out": out, "p_decay": decay,
        "p_before": before, "p_after": after, "p_continues": continues, "reverse": continues is not None,
        # One channel per warp: the tables and the sixteen items of two channels do not fit into its registers.
        "modes": modes, "b_d": 8, "b_n": MOST_MODES, **_tokens(x, items, unit),
    }  # fmt: skip
    grid = batch, blocks(channels, 8)
    Launch(filter_kernel, grid, arguments, warps=8, stages=_STAGES, registers=_registers(x)).run()
    return y, after


def _tokens(x: Tensor, items: list[Tensor], unit: int) -> dict[str, Any]:
    """Return what kernels over the tokens of x take."""
    precision = {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(x.dtype, "tf32x3")
    sizes = {"channels": x.shape[2], "unit": unit, "precision": precision, "chunk": _chunk(x, unit), "items": ITEMS}
    return dict(zip(("p_first", "p_begin", "p_end", "p_kind", "p_tiles"), items, strict=True)) | sizes


def _chunk(x: Tensor, unit: int) -> int:
    """Return the steps of an item per matrix product. Tables of more steps in 32 bits do not fit in registers."""
    return 32 if x.dtype == torch.bfloat16 and unit >= 32 else 16


def _registers(x: Tensor) -> int | None:
    """Return the limit of registers. In 16 bits the compiler takes more without one, but spills nothing with it."""
    return None if x.dtype == torch.float32 else 232


@custom_op("cema_backward")
def _backward(
    grad: Tensor | None, grad_after: Tensor | None, x: Tensor, output: Tensor, response: Tensor, decay: Tensor,
    input: Tensor, before: Tensor | None, after: Tensor, continues: Tensor, forwards: list[Tensor],
    backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, input, log_damping, angle, output, skip and before."""
    grad = torch.zeros_like(x) if grad is None else grad.contiguous()
    grad_after = None if grad_after is None else grad_after.contiguous()
    tables = response, decay, input
    grad_x, grad_before = _filter(grad, tables, output, input, grad_after, continues, backwards, unit)
    (batch, _, channels), modes, chunk = x.shape, input.shape[1], _chunk(x, unit)
    # Σ g h and Σ g ∂h/∂log q without the inputs of the chunk of each step, ∂h/∂log q after the last step, all
    # (B, D, N, 2), and the correlation Σ x_s g_t of steps s and t within a chunk over all chunks, (B, D, C, C).
    sums, derivatives, last = (input.new_empty(batch, channels, modes, 2) for _ in range(3))
    correlation = input.new_empty(batch, channels, chunk, chunk)
    arguments = {
        "p_x": x, "p_grad": grad, "p_in": input, "p_decay": decay, "p_before": before, "p_sums": sums,
        "p_derivatives": derivatives, "p_correlation": correlation, "p_after": last, "modes": modes, "b_d": 8, "b_n": 8,
        **_tokens(x, forwards, unit),
    }  # fmt: skip
    grid = batch, blocks(channels, 8) * blocks(modes, 8)
    Launch(gradients_kernel, grid, arguments, warps=8, stages=_STAGES, registers=_registers(x)).run()
    by_input, by_log, by_angle = (input.new_empty(input.shape[:2]) for _ in range(3))
    by_output, by_skip = torch.empty_like(output), input.new_empty(len(input))
    arguments = {
        "p_in": input, "p_out": output, "p_decay": decay, "batch": batch, "p_sums": sums, "p_derivatives": derivatives,
        "p_last": last, "p_correlation": correlation, "p_after": after, "p_grad_after": grad_after, "p_before": before,
        "p_grad_before": grad_before, "p_grad_in": by_input, "p_grad_log": by_log, "p_grad_angle": by_angle,
        "p_grad_out": by_output, "p_grad_skip": by_skip, **_sizes(input, chunk), "lags": 8,
    }  # fmt: skip
    Launch(coefficient_gradients_kernel, _grid(input), arguments, warps=4).run()
    return grad_x, by_input, by_log, by_angle, by_output, by_skip, grad_before


def _saved(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Any, ...]:
    x, _, _, _, out, _, before, *rest = inputs
    return x, out, *output[2:], before, output[1], *rest


@custom_op("cema", _backward, of=range(7), saves=_saved, results=2, zeros=False)
def _cema(
    x: Tensor, input: Tensor, log_damping: Tensor, angle: Tensor, output: Tensor, skip: Tensor | None,
    before: Tensor | None, continues: Tensor, forwards: list[Tensor], backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    chunk = _chunk(x, unit)
    tables = input.new_empty(len(input), chunk), torch.empty_like(output), torch.empty_like(output)
    given = {
        "p_in": input, "p_log": log_damping, "p_angle": angle, "p_out": output, "p_skip": skip,
        "p_response": tables[0], "p_decay": tables[1], "p_pair": tables[2],
    }  # fmt: skip
    Launch(response_kernel, _grid(input), given | _sizes(input, chunk), warps=4).run()
    return *_filter(x, tables, tables[2], output, before, None, forwards, unit), *tables
