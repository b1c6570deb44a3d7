"""CEMA on a GPU: the filter, its gradients, and what surrounds the kernels.

A program takes a few channels of one row and walks through its items (``gecko.ops.cema.items``), sixteen at a time. For
each channel these are rows of matrix products with the tables of a chunk of C = 16 steps, which stay in registers:
first what each item adds to the state, by x G; then the states that enter the items, by one scan of sixteen; then, with
x read again from the cache, y = x T + h W and h ← q^C h + x G. The gradient of x is the same filter run backwards in
time with γ and p exchanged. A skip connection ω x is a part of k[0], so that it takes no pass of its own. Gradients of
the coefficients come from one more pass forwards with ∂h / ∂ log q (``triton_gradients``). Nothing is kept for backward
but x, the state before the call and that after it.

**Counts** for B = 1, T = 32,768, D = 4,096, N = 16, bfloat16 (x is 268 MB), multiply-adds in matrix products and
instructions of a thread per token and channel, the latter from the code compiled for sm_90:

    part                     passes over memory    bytes      floor        multiply-adds     instructions
    forward                  2: x, y               537 MB     537 MB       C + 6 N = 112     42
    backward, inputs         2: g, dx              537 MB                  C + 6 N = 112     42
    backward, coefficients   2: x, g               537 MB     805 MB       2 C + 12 N = 224  130

Floor is that of both backward parts together. At 4 instructions of 32 threads a cycle, 132 multiprocessors and
1.75 GHz, 42 of them take 0.19 ms, more than 537 MB at 4.3 TB/s (0.125 ms), and 130 take 0.59 ms: so instructions are
the limit, above all those of the coefficients' gradients. No time was measured. The second reading of a tile (16 items
of at most 256 tokens, 8 or 16 channels: at most 128 KiB) is from the L2 cache, and so is that of the second block of
8 modes. One row gives D / 16 programs: fewer than 132 · 16 channels in all rows leave a part of such a card idle.

Matrix products are tf32 for 16-bit x: tf32 holds x exactly, and tables and states are rounded to 11 bits, so that a
number is off by less than the rounding of the tensor's largest one to 16 bits. Of float32 they are three tf32 products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.cema.chunked import cema_chunked
from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.ops.cema.items import CHUNK, ITEMS, ItemPlan
from gecko.ops.cema.triton_filter import filter_kernel
from gecko.ops.cema.triton_gradients import gradients_kernel
from gecko.ops.custom_op import custom_op
from gecko.ops.kernels import Launch, blocks
from gecko.segments import Segments


def cema_kernels(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments, skip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same contract as ``cema`` for at least ``CHUNK`` tokens.

    The T mod unit tokens at the start, if there are any, take the chunked form.
    """
    plan = ItemPlan.of(segments)
    head = x[:, : plan.head]
    if plan.head_segments is not None:
        y_head, state = cema_chunked(head.float(), coefficients, state, plan.head_segments)
        head = y_head.to(x.dtype) if skip is None else torch.addcmul(y_head, head, skip).to(x.dtype)
    before = (state * plan.continues.view(-1, 1, 1, 1)).contiguous()
    given = coefficients.input, coefficients.log_damping, coefficients.angle, coefficients.output
    y, after = _cema_op(
        x[:, plan.head :].contiguous(), *(tensor.to(before.dtype).contiguous() for tensor in given),
        before.new_zeros(x.shape[-1]) if skip is None else skip.to(before.dtype),
        before, plan.forwards.tensors(), plan.backwards.tensors(), plan.unit,
    )  # fmt: skip
    return (torch.cat([head, y], dim=1) if plan.head else y), after


def _forward(
    x: Tensor, input: Tensor, log_damping: Tensor, angle: Tensor, output: Tensor, skip: Tensor, before: Tensor,
    forwards: list[Tensor], backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    coefficients = CEMACoefficients(input, log_damping, angle, output)
    response = _response(coefficients, skip)
    return _filter(x, coefficients, response, _real_pair(input), output, before, forwards, unit, reverse=False)


def _filter(
    x: Tensor, coefficients: CEMACoefficients, response: Tensor, into: Tensor, out: Tensor, before: Tensor,
    items: list[Tensor], unit: int, *, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, after = torch.empty_like(x), torch.empty_like(before)
    arguments = {
        "p_x": x, "p_y": y, "p_response": response, "p_in": into, "p_out": out,
        "p_decay": _decay(coefficients), "p_before": before, "p_after": after, **_named(items),
        "channels": x.shape[-1], "modes": before.shape[2], "unit": unit, "reverse": reverse, "b_n": 16,
        **_constants(x),
    }  # fmt: skip
    # A warp takes one channel: the tables and the sixteen items of two would not fit into its registers.
    b_d = 16 if _is_rough(x) else 8
    grid = (x.shape[0], blocks(x.shape[-1], b_d))
    Launch(filter_kernel, grid, {**arguments, "b_d": b_d}, warps=b_d).run()
    return y, after


def _constants(x: Tensor) -> dict[str, Any]:
    return {"precision": "tf32" if _is_rough(x) else "tf32x3", "chunk": CHUNK, "items": ITEMS}


def _is_rough(x: Tensor) -> bool:
    """Whether outputs keep no more than the 11 bits of tf32."""
    return x.dtype != torch.float32


def _named(items: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("p_first", "p_begin", "p_end", "p_kind", "p_tiles"), items, strict=True))


def _real_pair(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)], dim=-1)


def _decay(coefficients: CEMACoefficients) -> Tensor:
    return torch.view_as_real(coefficients.factor)


def _response(coefficients: CEMACoefficients, skip: Tensor) -> Tensor:
    """k[j] = Re Σ γ p q^j of one chunk, (D, C), with the skip connection as a part of k[0]."""
    gamma_p = torch.view_as_complex(coefficients.output) * coefficients.input
    response = torch.einsum("dn,dnc->dc", gamma_p, coefficients.powers(CHUNK)).real
    return response + F.pad(skip.unsqueeze(1), (0, CHUNK - 1))


_cema_op = custom_op("cema")(_forward)


@_cema_op.register_fake
def _(
    x: Tensor, input: Tensor, log_damping: Tensor, angle: Tensor, output: Tensor, skip: Tensor, before: Tensor,
    forwards: list[Tensor], backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(x), torch.empty_like(before)


def _backward(
    grad: Tensor, grad_after: Tensor, x: Tensor, input: Tensor, log_damping: Tensor, angle: Tensor, output: Tensor,
    skip: Tensor, before: Tensor, after: Tensor, forwards: list[Tensor], backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by x, input, log_damping, angle, output, skip and before."""
    coefficients = CEMACoefficients(input, log_damping, angle, output)
    grad_x, handed = _filter(
        grad, coefficients, _response(coefficients, skip), output, _real_pair(input), _conjugate(grad_after), backwards,
        unit, reverse=True,
    )  # fmt: skip
    grad_before = _conjugate(handed)
    sums, derivatives, last, grad_skip = _sums(grad, x, coefficients, before, forwards, unit)

    gamma, end = torch.view_as_complex(output), torch.view_as_complex(grad_after)
    by_log = (gamma * derivatives).conj() + (last.conj() * end).sum(0)
    # Σ g y, and the same for the last state, is linear in p and in the state before: what is not by that is by p.
    linear = (gamma * sums).real + (grad_after * after).sum((0, -1)) - (grad_before * before).sum((0, -1))
    grad_output = torch.view_as_real(sums.conj().resolve_conj())
    return (
        grad_x, linear / input, by_log.real.contiguous(), by_log.imag.contiguous(), grad_output, grad_skip, grad_before
    )  # fmt: skip


def _conjugate(pairs: Tensor) -> Tensor:
    """Without signs from the host: to copy them to a GPU waits until it has done all that was asked of it so far."""
    return torch.view_as_real(torch.view_as_complex(pairs).conj_physical())


def _sums(
    grad: Tensor, x: Tensor, coefficients: CEMACoefficients, before: Tensor, items: list[Tensor], unit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ g h and Σ g ∂h/∂log q, complex (D, N), the last ∂h/∂log q, complex (B, D, N), and Σ g x, (D,)."""
    sums, derivatives, last = (torch.empty_like(before) for _ in range(3))
    batch, channels, modes = before.shape[:3]
    correlation = before.new_empty(batch, channels, CHUNK, CHUNK)
    b_d, b_n = 8, 8
    arguments = {
        "p_x": x, "p_grad": grad, "p_in": _real_pair(coefficients.input), "p_decay": _decay(coefficients),
        "p_before": before, "p_sums": sums, "p_derivatives": derivatives, "p_correlation": correlation,
        "p_after": last, **_named(items), "channels": channels, "modes": modes, "unit": unit,
        "b_d": b_d, "b_n": b_n, **_constants(x),
    }  # fmt: skip
    grid = (batch, blocks(channels, b_d) * blocks(modes, b_n))
    Launch(gradients_kernel, grid, arguments, warps=8).run()

    lags = _lag_sums(correlation.sum(0))
    driven = coefficients.input.unsqueeze(-1) * coefficients.powers(CHUNK) * lags.unsqueeze(1)
    own, own_derivatives = driven.sum(-1), (driven * torch.arange(CHUNK, device=x.device)).sum(-1)
    return (
        torch.view_as_complex(sums.sum(0)) + own,
        torch.view_as_complex(derivatives.sum(0)) + own_derivatives,
        torch.view_as_complex(last),
        lags[:, 0].contiguous(),
    )


def _lag_sums(correlation: Tensor) -> Tensor:
    """(D, C, C) by s and t to (D, C) by t − s ≥ 0: rows one longer than they were shift row s by s."""
    chunk = correlation.shape[-1]
    flat = F.pad(F.pad(correlation, (0, chunk)).flatten(1), (0, chunk))
    return flat.view(-1, chunk, 2 * chunk + 1)[..., :chunk].sum(1)


_backward_op = custom_op("cema_backward")(_backward)


@_backward_op.register_fake
def _(
    grad: Tensor, grad_after: Tensor, x: Tensor, input: Tensor, log_damping: Tensor, angle: Tensor, output: Tensor,
    skip: Tensor, before: Tensor, after: Tensor, forwards: list[Tensor], backwards: list[Tensor], unit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shaped = (x, input, log_damping, angle, output, skip, before)
    return tuple(torch.empty_like(tensor) for tensor in shaped)  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, forwards, backwards, ctx.unit = inputs
    ctx.counts = len(tensors) + 1, len(forwards)
    ctx.save_for_backward(*tensors, output[1], *forwards, *backwards)


def _differentiate(ctx: Any, grad: Tensor, grad_after: Tensor) -> tuple[Any, ...]:
    values, items = ctx.counts
    saved = list(ctx.saved_tensors)
    grads = _backward_op(
        grad.contiguous(), grad_after.contiguous(), *saved[:values],
        saved[values : values + items], saved[values + items :], ctx.unit,
    )  # fmt: skip
    return *grads, [None] * items, [None] * items, None


_cema_op.register_autograd(_differentiate, setup_context=_setup)
