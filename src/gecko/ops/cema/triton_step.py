# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The kernel of CEMA for one token: the state is read and written once, which is all there is to move."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.ops.cema.triton_tiles import complex_product, load_pair, store_pair
from gecko.ops.custom_op import custom_op
from gecko.ops.kernels import Launch, blocks
from gecko.segments import Segments


@triton.jit
def step_kernel(
    p_x, p_y, p_in, p_out, p_decay, p_before, p_after, p_continues, channels, modes,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """h ← q h + p x and y = Re Σ γ h for a few channels of one row; h = 0 before where p_continues is not."""
    row = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(1) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    mask = (i_d < channels)[:, None] & (i_n < modes)[None, :]
    i_mode = i_d[:, None] * modes + i_n[None, :]
    i_state = row * channels * modes + i_mode
    kept = tl.load(p_continues + row).to(tl.float32)
    q_real, q_imag = load_pair(p_decay, i_mode, mask)
    h_real, h_imag = load_pair(p_before, i_state, mask)
    h_real, h_imag = complex_product(h_real * kept, h_imag * kept, q_real, q_imag)
    b_x = tl.load(p_x + row * channels + i_d, mask=i_d < channels, other=0.0).to(tl.float32)
    h_real += tl.load(p_in + i_mode, mask=mask, other=0.0) * b_x[:, None]
    store_pair(p_after, i_state, h_real, h_imag, mask)
    out_real, out_imag = load_pair(p_out, i_mode, mask)
    b_y = tl.sum(out_real * h_real - out_imag * h_imag, 1)
    tl.store(p_y + row * channels + i_d, b_y.to(p_y.dtype.element_ty), mask=i_d < channels)


def _step(
    x: Tensor, input: Tensor, decay: Tensor, output: Tensor, state: Tensor, continues: Tensor
) -> tuple[Tensor, Tensor]:
    y, after = torch.empty_like(x), torch.empty_like(state)
    batch, channels, modes = state.shape[:3]
    arguments = {
        "p_x": x, "p_y": y, "p_in": input, "p_out": output, "p_decay": decay, "p_before": state, "p_after": after,
        "p_continues": continues, "channels": channels, "modes": modes,
        "b_d": 32, "b_n": 1 << (modes - 1).bit_length(),
    }  # fmt: skip
    Launch(step_kernel, (batch, blocks(channels, 32)), arguments, warps=4).run()
    return y, after


_step_op = custom_op("cema_step")(_step)


@_step_op.register_fake
def _(
    x: Tensor, input: Tensor, decay: Tensor, output: Tensor, state: Tensor, continues: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


def cema_step_kernel(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Same contract as ``cema_step``, but without gradients, and with y in the dtype of x."""
    decay = torch.view_as_real(coefficients.factor)
    given = (x, coefficients.input, decay, coefficients.output, state, segments.continues[:, 0])
    return _step_op(*(tensor.contiguous() for tensor in given))
