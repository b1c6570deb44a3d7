"""Triton kernels of CEMA's filter and of its single step, and the device functions that CEMA's kernels share.

The filter computes outputs forwards in time, and the gradient of its inputs backwards in time.
Forwards, with z the state before a step:                 z ← q z + in x_t,   y_t = Re Σ out z.
Backwards, with z the sum passed back from later steps:   y_t = Re Σ out (z + in x_t),   z ← q (z + in x_t).
One program processes a few channels of one row from end to end, sixteen items at a time (``varlen_tiles.py``).
The kernel for one token reads and writes the state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, custom_op
from gecko.ops.cema.chunked import CEMACoefficients
from gecko.segments import Segments

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def complex_product(a_real, a_imag, b_real, b_imag):
    """Return a b."""
    return a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real


@triton.jit
def power(q_real, q_imag, exponent, bits: tl.constexpr):
    """Return q^exponent for integers below 2^bits, by squaring. The rounding error grows with bits, not the angle."""
    real = tl.where(exponent % 2 == 1, q_real, 1.0)
    imag = tl.where(exponent % 2 == 1, q_imag, 0.0)
    for bit in tl.static_range(1, bits):
        q_real, q_imag = complex_product(q_real, q_imag, q_real, q_imag)
        more_real, more_imag = complex_product(real, imag, q_real, q_imag)
        taken = (exponent >> bit) % 2 == 1
        real = tl.where(taken, more_real, real)
        imag = tl.where(taken, more_imag, imag)
    return real, imag


@triton.jit
def add_product(real, imag, a_real, a_imag, b_real, b_imag):
    """Return real + i imag + a b, in an order of which each step is one fused multiply-add."""
    return real + a_real * b_real - a_imag * b_imag, imag + a_real * b_imag + a_imag * b_real


@triton.jit
def power_for_items(q_real, q_imag, exponent, bits: tl.constexpr):
    """Return q^exponent as (channels, 1, modes), to be multiplied with tiles (channels, items, modes)."""
    real, imag = power(q_real, q_imag, exponent, bits)
    return real[:, None, :], imag[:, None, :]


@triton.jit
def into_state(in_real, in_imag, q_real, q_imag, exponents):
    """Return in q^exponent, (channels, steps, modes): the matrix from the inputs of a chunk to the state."""
    real, imag = power(q_real[:, None, :], q_imag[:, None, :], exponents[None, :, None], 6)
    return complex_product(in_real[:, None, :], in_imag[:, None, :], real, imag)


@triton.jit
def load_pair(p_pair, i_pair, mask):
    """Load interleaved complex numbers as (real, imaginary); zero outside the mask."""
    return tl.load(p_pair + 2 * i_pair, mask=mask, other=0.0), tl.load(p_pair + 2 * i_pair + 1, mask=mask, other=0.0)


@triton.jit
def load_state(p_state, state, i_mode, mask):
    """Load the complex numbers of a row that begins at ``state``; zeros if there is no state."""
    if p_state is None:
        real, imag = tl.zeros(i_mode.shape, tl.float32), tl.zeros(i_mode.shape, tl.float32)
    else:
        real, imag = load_pair(p_state + state, i_mode, mask)
    return real, imag


@triton.jit
def store_pair(p_pair, i_pair, real, imag, mask):
    """Store complex numbers interleaved; the inverse of ``load_pair``."""
    tl.store(p_pair + 2 * i_pair, real, mask=mask)
    tl.store(p_pair + 2 * i_pair + 1, imag, mask=mask)


@triton.jit
def load_borders(p_first, p_begin, p_end, i_item):
    """Return, for each item, the first token of its unit, its first step in the unit and the step after its last one.
    Item −1 does not exist and gives zeros."""
    there = i_item >= 0
    i_first = tl.load(p_first + i_item, mask=there, other=0)
    i_begin = tl.load(p_begin + i_item, mask=there, other=0)
    return i_first, i_begin, tl.load(p_end + i_item, mask=there, other=0)


@triton.jit
def places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse: tl.constexpr, chunk: tl.constexpr):
    """Return the offsets and the mask (2, chunk / 2, items, channels) of chunk ``step`` of every item. If ``reverse``,
    chunks and their steps are counted from the end of the unit. Axis 0 is the step within a pair of steps: a thread
    holds both steps of a pair, so that it moves both at once when the tile is transposed. Items come after steps, so
    that the threads of a warp hold neighbouring rows of 16 bytes: half as many of them meet in a bank."""
    i_t = step * chunk + 2 * tl.arange(0, chunk // 2)[None, :, None] + tl.arange(0, 2)[:, None, None]
    i_t = unit - 1 - i_t if reverse else i_t
    held = (i_t >= i_begin[None, None, :]) & (i_t < i_end[None, None, :])
    offsets = (i_first[None, None, :] + i_t)[:, :, :, None] * channels + i_d[None, None, None, :]
    return offsets, held[:, :, :, None] & (i_d < channels)[None, None, None, :]


@triton.jit
def load_channels(p_x, offsets, mask, precision: tl.constexpr):
    """Load (channels, items, chunk), the left factor of a product; zero outside the mask."""
    b_x = tl.permute(tl.load(p_x + offsets, mask=mask, other=0.0), (3, 2, 1, 0))
    b_x = tl.reshape(b_x, (b_x.shape[0], b_x.shape[1], 2 * b_x.shape[2]))
    return b_x if precision == "bf16" else b_x.to(tl.float32)


@triton.jit
def factor(b_x, precision: tl.constexpr):
    """Return b_x as a factor of products: rounded, or as two bfloat16 numbers, whose sum has 16 bits."""
    if precision == "bf16":
        bits = b_x.to(tl.int32, bitcast=True) & -65536  # the high half of a float32 is the bfloat16 below it
        b_high = bits.to(tl.float32, bitcast=True)
        b_low = (b_x - b_high).to(tl.bfloat16)
        b_high = b_high.to(tl.bfloat16)
    else:
        b_high = rounded(b_x, precision)
        b_low = b_high
    return b_high, b_low


@triton.jit
def rounded_factor(b_x, precision: tl.constexpr):
    """Return b_x as a factor of ``rough_product``. It is rounded here because Triton's interpreter truncates."""
    if precision == "bf16":
        bits = (b_x.to(tl.int32, bitcast=True) + 32768) & -65536
        b_x = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        b_x = rounded(b_x, precision)
    return b_x


@triton.jit
def state_factor(b_z, precision: tl.constexpr):
    """Return a state as a factor of ``rough_product``, rounded by one instruction."""
    return b_z.to(tl.bfloat16) if precision == "bf16" else rounded(b_z, precision)


@triton.jit
def rough_product(left, right, b_sum, precision: tl.constexpr):
    """Return b_sum + left right, for factors that are inputs, a ``rounded_factor`` or a ``state_factor``."""
    mode: tl.constexpr = "ieee" if precision == "bf16" else precision
    return tl.dot(left, right, b_sum, input_precision=mode)


@triton.jit
def product(b_x, right, b_sum, precision: tl.constexpr):
    """Return b_sum + b_x right, for inputs b_x and a right ``factor``."""
    b_sum = rough_product(b_x, right[0], b_sum, precision)
    if precision == "bf16":
        b_sum = rough_product(b_x, right[1], b_sum, precision)
    return b_sum


@triton.jit
def wide_product(b_z, right, b_sum, precision: tl.constexpr):
    """Return b_sum + b_z right, for float32 numbers b_z and a right ``factor``."""
    high, low = factor(b_z, precision)
    b_sum = product(high, right, b_sum, precision)
    if precision == "bf16":
        b_sum = rough_product(low, right[0], b_sum, precision)
    return b_sum


@triton.jit
def rounded(b_x, precision: tl.constexpr):
    """Round a factor of plain tf32 products: tensor cores drop the low 13 bits of float32 and do not round."""
    if precision == "tf32":
        b_x = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return b_x


@triton.jit
def last_item(b_h, items: tl.constexpr):
    """Return the last item, (channels, modes), of (channels, items, modes)."""
    return tl.sum(tl.where((tl.arange(0, items) == items - 1)[None, :, None], b_h, 0.0), 1)


@triton.jit
def _follow(a_real, a_imag, u_real, u_imag, b_real, b_imag, v_real, v_imag):
    """Compose z → a z + u and then z → b z + v into one step."""
    decay_real, decay_imag = complex_product(b_real, b_imag, a_real, a_imag)
    real, imag = add_product(v_real, v_imag, b_real, b_imag, u_real, u_imag)
    return decay_real, decay_imag, real, imag


@triton.jit
def _out_of_state(out_real, out_imag, q_real, q_imag, exponents, precision: tl.constexpr):
    """Return the conjugate of out q^exponent, (channels, modes, steps). Its real product with z is Re(out q^e z)."""
    real, imag = power(q_real[:, :, None], q_imag[:, :, None], exponents[None, None, :], 6)
    real, imag = complex_product(out_real[:, :, None], out_imag[:, :, None], real, imag)
    return factor(real, precision), factor(-imag, precision)


@triton.jit
def _load_responses(p_response, i_d, channels, chunk: tl.constexpr, precision: tl.constexpr):
    """Return the matrix from the inputs of a chunk to its outputs, (channels, chunk, chunk)."""
    i_t = tl.arange(0, chunk)
    i_lag = i_t[None, :] - i_t[:, None]
    mask = (i_d < channels)[:, None, None] & (i_lag >= 0)[None, :, :]
    b_response = tl.load(p_response + i_d[:, None, None] * chunk + i_lag[None, :, :], mask=mask, other=0.0)
    return factor(b_response, precision)


@triton.jit
def _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision: tl.constexpr):
    """Return z after one more chunk of inputs (channels, items, chunk)."""
    z_real, z_imag = complex_product(z_real, z_imag, step_real, step_imag)
    return product(b_x, g_real, z_real, precision), product(b_x, g_imag, z_imag, precision)


@triton.jit
def _added(
    p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, reverse: tl.constexpr,
    precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Return z after each item, starting from z = 0."""
    z_real = tl.zeros((b_d, items, b_n), tl.float32)
    z_imag = tl.zeros((b_d, items, b_n), tl.float32)
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        z_real, z_imag = _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision)
    return z_real, z_imag


@triton.jit
def entering(kind, z_real, z_imag, unit_real, unit_imag, c_real, c_imag, items: tl.constexpr):
    """Return z before each item of a tile, from ``_added`` for the item before each and from z after the tile before
    (c), which the first item continues."""
    first = tl.arange(0, items) == 0
    continues = ((kind == 1) & (first == 0))[None, :, None]
    passes = (kind == 2) | ((kind == 1) & first)
    a_real = tl.where(continues, unit_real, tl.where(passes[None, :, None], 1.0, 0.0))
    a_imag = tl.where(continues, unit_imag, 0.0)
    z_real = tl.where(continues, z_real, 0.0)
    z_imag = tl.where(continues, z_imag, 0.0)
    a_real, a_imag, z_real, z_imag = tl.associative_scan((a_real, a_imag, z_real, z_imag), 1, _follow)
    return add_product(z_real, z_imag, a_real, a_imag, c_real[:, None, :], c_imag[:, None, :])


@triton.jit
def _write_outputs(
    p_x, p_y, i_first, i_begin, i_end, i_d, channels, unit, z_real, z_imag, b_response, w_real, w_imag, g_real, g_imag,
    step_real, step_imag, reverse: tl.constexpr, precision: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store y of the items of a tile, given z before each item, and return z after each."""
    for step in range(unit // chunk):
        offsets, mask = places(i_first, i_begin, i_end, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        # The states are multiplied first, so that the registers of their rounded copies are free for the inputs.
        b_y = tl.zeros((b_x.shape[0], b_x.shape[1], chunk), tl.float32)
        b_y = wide_product(z_real, w_real, b_y, precision)
        b_y = wide_product(z_imag, w_imag, b_y, precision)
        b_y = product(b_x, b_response, b_y, precision).to(p_y.dtype.element_ty)
        b_y = tl.permute(tl.reshape(b_y, (b_y.shape[0], b_y.shape[1], chunk // 2, 2)), (3, 2, 1, 0))
        tl.store(p_y + offsets, b_y, mask=mask)
        z_real, z_imag = _advance(z_real, z_imag, b_x, g_real, g_imag, step_real, step_imag, precision)
    return z_real, z_imag


@triton.jit(do_not_specialize=["unit"])
def filter_kernel(
    p_x, p_y, p_response, p_in, p_out, p_decay, p_before, p_after, p_continues, p_first, p_begin, p_end, p_kind,
    p_tiles, channels, modes, unit,
    reverse: tl.constexpr, precision: tl.constexpr, chunk: tl.constexpr, items: tl.constexpr,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Compute y and the last z of one row from the z before it, which is zero if p_before is None.

    If ``reverse``, the states before and after are gradients: conjugates of z. That after is zero if the row does not
    continue the document before it (p_continues, (rows,)).

    p_x, p_y: (tokens, channels). p_response: (channels, chunk). p_in, p_out, p_decay: (channels, modes, 2).
    p_before, p_after: (rows, channels, modes, 2). p_first … p_kind: (tiles · items,). p_tiles: (rows + 1,).
    """
    row = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(1) * b_d + tl.arange(0, b_d)
    i_n = tl.arange(0, b_n)
    m_mode = (i_d < channels)[:, None] & (i_n < modes)[None, :]
    i_mode = i_d[:, None] * modes + i_n[None, :]
    q_real, q_imag = load_pair(p_decay, i_mode, m_mode)
    in_real, in_imag = load_pair(p_in, i_mode, m_mode)
    out_real, out_imag = load_pair(p_out, i_mode, m_mode)

    # The matrices of a chunk: into the state (g), out of it (w), and from input to output.
    i_t = tl.arange(0, chunk)
    late: tl.constexpr = 1 if reverse else 0
    g_real, g_imag = into_state(in_real, in_imag, q_real, q_imag, chunk - 1 + late - i_t)
    g_real, g_imag = factor(g_real, precision), factor(g_imag, precision)
    w_real, w_imag = _out_of_state(out_real, out_imag, q_real, q_imag, i_t + 1 - late, precision)
    b_response = _load_responses(p_response, i_d, channels, chunk, precision)
    step_real, step_imag = power_for_items(q_real, q_imag, chunk, 6)
    unit_real, unit_imag = power_for_items(q_real, q_imag, unit, 10)

    state = 2 * row * channels * modes
    c_real, c_imag = load_state(p_before, state, i_mode, m_mode)
    if reverse:
        c_imag = -c_imag
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        # For each item, add up the inputs of the item before it. With this shift, one scan gives z before every item.
        # The sum of the tile's first item is ignored: it is part of z after the tile before.
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item - 1)
        z_real, z_imag = _added(
            p_x, i_first, i_begin, i_end, i_d, channels, unit, g_real, g_imag, step_real, step_imag, reverse, precision,
            chunk, items, b_d, b_n,
        )  # fmt: skip
        z_real, z_imag = entering(tl.load(p_kind + i_item), z_real, z_imag, unit_real, unit_imag, c_real, c_imag, items)
        # Now the state before each item is known: read the inputs again, from the cache.
        i_first, i_begin, i_end = load_borders(p_first, p_begin, p_end, i_item)
        z_real, z_imag = _write_outputs(
            p_x, p_y, i_first, i_begin, i_end, i_d, channels, unit, z_real, z_imag, b_response, w_real, w_imag, g_real,
            g_imag, step_real, step_imag, reverse, precision, chunk,
        )  # fmt: skip
        c_real, c_imag = last_item(z_real, items), last_item(z_imag, items)
    if reverse:
        kept = tl.load(p_continues + row).to(tl.float32)
        c_real, c_imag = c_real * kept, -c_imag * kept
    store_pair(p_after + state, i_mode, c_real, c_imag, m_mode)


@triton.jit
def step_kernel(
    p_x, p_y, p_in, p_out, p_decay, p_before, p_after, p_continues, channels, modes,
    b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Compute h ← q h + p x and y = Re Σ γ h for a few channels of one row. h is 0 before, unless ``p_continues``."""
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


def cema_step_triton(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Compute ``cema_step`` without gradients, with y in the dtype of x."""
    decay = torch.view_as_real(coefficients.factor)
    given = (x, coefficients.input, decay, coefficients.output, state, segments.continues[:, 0])
    return _step_op(*(tensor.contiguous() for tensor in given))
