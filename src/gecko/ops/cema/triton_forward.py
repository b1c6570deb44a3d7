"""Triton kernels of CEMA's filter and of its single step, and the device functions that CEMA's kernels share.

The filter computes outputs forwards in time, and the gradient of its inputs backwards in time.
Forwards, with z the state before a step:                 z ← q z + in x_t,   y_t = Re Σ out z.
Backwards, with z the sum passed back from later steps:   y_t = Re Σ out (z + in x_t),   z ← q (z + in x_t).
One program processes a few channels of one row from end to end, sixteen items at a time (``varlen_tiles.py``).
Complex numbers are pairs (real, imaginary).
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
def complex_product(a, b):
    """Return a b."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


@triton.jit
def add_product(z, a, b):
    """Return z + a b, in an order of which each step is one fused multiply-add."""
    return z[0] + a[0] * b[0] - a[1] * b[1], z[1] + a[0] * b[1] + a[1] * b[0]


@triton.jit
def added(a, b):
    return a[0] + b[0], a[1] + b[1]


@triton.jit
def zeros_pair(shape):
    return tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32)


@triton.jit
def over_steps(z):
    """Return (channels, modes) as (channels, 1, modes), for tiles (channels, items or steps, modes)."""
    return z[0][:, None, :], z[1][:, None, :]


@triton.jit
def power(q, exponent, bits: tl.constexpr):
    """Return q^exponent for integers below 2^bits, by squaring. The rounding error grows with bits, not the angle."""
    z = tl.where(exponent % 2 == 1, q[0], 1.0), tl.where(exponent % 2 == 1, q[1], 0.0)
    for bit in tl.static_range(1, bits):
        q = complex_product(q, q)
        more = complex_product(z, q)
        taken = (exponent >> bit) % 2 == 1
        z = tl.where(taken, more[0], z[0]), tl.where(taken, more[1], z[1])
    return z


@triton.jit
def into_state(inputs, q, exponents):
    """Return in q^exponent, (channels, steps, modes): the matrix from the inputs of a chunk to the state."""
    return complex_product(over_steps(inputs), power(over_steps(q), exponents[None, :, None], 6))


@triton.jit
def load_pair(p_pair, i_pair, mask):
    """Load interleaved complex numbers; zero outside the mask."""
    return tl.load(p_pair + 2 * i_pair, mask=mask, other=0.0), tl.load(p_pair + 2 * i_pair + 1, mask=mask, other=0.0)


@triton.jit
def load_state(p_state, state, i_mode, mask):
    """Load the complex numbers of a row that begins at ``state``; zeros if there is no state."""
    return zeros_pair(i_mode.shape) if p_state is None else load_pair(p_state + state, i_mode, mask)


@triton.jit
def store_pair(p_pair, i_pair, z, mask):
    """Store complex numbers interleaved; the inverse of ``load_pair``."""
    tl.store(p_pair + 2 * i_pair, z[0], mask=mask)
    tl.store(p_pair + 2 * i_pair + 1, z[1], mask=mask)


@triton.jit
def load_borders(p_first, p_begin, p_end, i_item):
    """Return, for each item, the first token of its unit, its first step in the unit and the step after its last one.
    Item −1 does not exist and gives zeros."""
    there = i_item >= 0
    i_first = tl.load(p_first + i_item, mask=there, other=0)
    i_begin = tl.load(p_begin + i_item, mask=there, other=0)
    return i_first, i_begin, tl.load(p_end + i_item, mask=there, other=0)


@triton.jit
def places(borders, step, unit, i_d, channels, reverse: tl.constexpr, chunk: tl.constexpr):
    """Return the offsets and the mask (2, chunk / 2, items, channels) of chunk ``step`` of every item. If ``reverse``,
    chunks and their steps are counted from the end of the unit. Axis 0 is the step within a pair of steps: a thread
    holds both steps of a pair, so that it moves both at once when the tile is transposed. Items come after steps, so
    that the threads of a warp hold neighbouring rows of 16 bytes: half as many of them meet in a bank."""
    i_first, i_begin, i_end = borders
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
def last_item(z, items: tl.constexpr):
    """Return the last item, (channels, modes), of (channels, items, modes)."""
    is_last = (tl.arange(0, items) == items - 1)[None, :, None]
    return tl.sum(tl.where(is_last, z[0], 0.0), 1), tl.sum(tl.where(is_last, z[1], 0.0), 1)


@triton.jit
def _follow(a_real, a_imag, u_real, u_imag, b_real, b_imag, v_real, v_imag):
    """Compose z → a z + u and then z → b z + v into one step."""
    decay = complex_product((b_real, b_imag), (a_real, a_imag))
    z = add_product((v_real, v_imag), (b_real, b_imag), (u_real, u_imag))
    return decay[0], decay[1], z[0], z[1]


@triton.jit
def _out_of_state(outputs, q, exponents, precision: tl.constexpr):
    """Return the conjugate of out q^exponent, (channels, modes, steps). Its real product with z is Re(out q^e z)."""
    z = power((q[0][:, :, None], q[1][:, :, None]), exponents[None, None, :], 6)
    z = complex_product((outputs[0][:, :, None], outputs[1][:, :, None]), z)
    return factor(z[0], precision), factor(-z[1], precision)


@triton.jit
def _load_responses(p_response, i_d, channels, chunk: tl.constexpr, precision: tl.constexpr):
    """Return the matrix from the inputs of a chunk to its outputs, (channels, chunk, chunk)."""
    i_t = tl.arange(0, chunk)
    i_lag = i_t[None, :] - i_t[:, None]
    mask = (i_d < channels)[:, None, None] & (i_lag >= 0)[None, :, :]
    b_response = tl.load(p_response + i_d[:, None, None] * chunk + i_lag[None, :, :], mask=mask, other=0.0)
    return factor(b_response, precision)


@triton.jit
def _advance(z, b_x, g, step, precision: tl.constexpr):
    """Return z after one more chunk of inputs (channels, items, chunk)."""
    z = complex_product(z, step)
    return product(b_x, g[0], z[0], precision), product(b_x, g[1], z[1], precision)


@triton.jit
def _added(
    p_x, borders, i_d, channels, unit, g, of_chunk, reverse: tl.constexpr, precision: tl.constexpr,
    chunk: tl.constexpr, items: tl.constexpr, b_d: tl.constexpr, b_n: tl.constexpr,
):  # fmt: skip
    """Return z after each item, starting from z = 0."""
    z = zeros_pair((b_d, items, b_n))
    for step in range(unit // chunk):
        offsets, mask = places(borders, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        z = _advance(z, b_x, g, of_chunk, precision)
    return z


@triton.jit
def entering(kind, z, of_unit, c, items: tl.constexpr):
    """Return z before each item of a tile, from ``_added`` for the item before each and from z after the tile before
    (c), which the first item continues."""
    first = tl.arange(0, items) == 0
    continues = ((kind == 1) & (first == 0))[None, :, None]
    passes = (kind == 2) | ((kind == 1) & first)
    a_real = tl.where(continues, of_unit[0], tl.where(passes[None, :, None], 1.0, 0.0))
    a_imag = tl.where(continues, of_unit[1], 0.0)
    z_real = tl.where(continues, z[0], 0.0)
    z_imag = tl.where(continues, z[1], 0.0)
    a_real, a_imag, z_real, z_imag = tl.associative_scan((a_real, a_imag, z_real, z_imag), 1, _follow)
    return add_product((z_real, z_imag), (a_real, a_imag), over_steps(c))


@triton.jit
def _write_outputs(
    p_x, p_y, borders, i_d, channels, unit, z, b_response, w, g, of_chunk, reverse: tl.constexpr,
    precision: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store y of the items of a tile, given z before each item, and return z after each."""
    for step in range(unit // chunk):
        offsets, mask = places(borders, step, unit, i_d, channels, reverse, chunk)
        b_x = load_channels(p_x, offsets, mask, precision)
        # The states are multiplied first, so that the registers of their rounded copies are free for the inputs.
        b_y = tl.zeros((b_x.shape[0], b_x.shape[1], chunk), tl.float32)
        b_y = wide_product(z[0], w[0], b_y, precision)
        b_y = wide_product(z[1], w[1], b_y, precision)
        b_y = product(b_x, b_response, b_y, precision).to(p_y.dtype.element_ty)
        b_y = tl.permute(tl.reshape(b_y, (b_y.shape[0], b_y.shape[1], chunk // 2, 2)), (3, 2, 1, 0))
        tl.store(p_y + offsets, b_y, mask=mask)
        z = _advance(z, b_x, g, of_chunk, precision)
    return z


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
    q = load_pair(p_decay, i_mode, m_mode)
    inputs, outputs = load_pair(p_in, i_mode, m_mode), load_pair(p_out, i_mode, m_mode)

    # The matrices of a chunk: into the state (g), out of it (w), and from input to output.
    i_t = tl.arange(0, chunk)
    late: tl.constexpr = 1 if reverse else 0
    g = into_state(inputs, q, chunk - 1 + late - i_t)
    g = factor(g[0], precision), factor(g[1], precision)
    w = _out_of_state(outputs, q, i_t + 1 - late, precision)
    b_response = _load_responses(p_response, i_d, channels, chunk, precision)
    of_chunk, of_unit = over_steps(power(q, chunk, 6)), over_steps(power(q, unit, 10))

    state = 2 * row * channels * modes
    c = load_state(p_before, state, i_mode, m_mode)
    if reverse:
        c = c[0], -c[1]
    for tile in range(tl.load(p_tiles + row), tl.load(p_tiles + row + 1)):
        i_item = tile * items + tl.arange(0, items)
        # For each item, add up the inputs of the item before it. With this shift, one scan gives z before every item.
        # The sum of the tile's first item is ignored: it is part of z after the tile before.
        borders = load_borders(p_first, p_begin, p_end, i_item - 1)
        z = _added(p_x, borders, i_d, channels, unit, g, of_chunk, reverse, precision, chunk, items, b_d, b_n)
        z = entering(tl.load(p_kind + i_item), z, of_unit, c, items)
        # Now the state before each item is known: read the inputs again, from the cache.
        borders = load_borders(p_first, p_begin, p_end, i_item)
        z = _write_outputs(
            p_x, p_y, borders, i_d, channels, unit, z, b_response, w, g, of_chunk, reverse, precision, chunk
        )
        c = last_item(z, items)
    if reverse:
        kept = tl.load(p_continues + row).to(tl.float32)
        c = c[0] * kept, -c[1] * kept
    store_pair(p_after + state, i_mode, c, m_mode)


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
    q = load_pair(p_decay, i_mode, mask)
    h = load_pair(p_before, i_state, mask)
    h_real, h_imag = complex_product((h[0] * kept, h[1] * kept), q)
    b_x = tl.load(p_x + row * channels + i_d, mask=i_d < channels, other=0.0).to(tl.float32)
    h_real += tl.load(p_in + i_mode, mask=mask, other=0.0) * b_x[:, None]
    store_pair(p_after, i_state, (h_real, h_imag), mask)
    out = load_pair(p_out, i_mode, mask)
    b_y = tl.sum(out[0] * h_real - out[1] * h_imag, 1)
    tl.store(p_y + row * channels + i_d, b_y.to(p_y.dtype.element_ty), mask=i_d < channels)


@custom_op("cema_step")
def _step(
    x: Tensor, input: Tensor, decay: Tensor, output: Tensor, state: Tensor, continues: Tensor
) -> tuple[Tensor, Tensor]:
    y, after = torch.empty_like(x), torch.empty_like(state)
    batch, channels, modes = state.shape[:3]
    arguments = {
        "p_x": x, "p_y": y, "p_in": input, "p_out": output, "p_decay": decay, "p_before": state, "p_after": after,
        "p_continues": continues, "channels": channels, "modes": modes, "b_d": 32, "b_n": 1 << (modes - 1).bit_length(),
    }  # fmt: skip
    Launch(step_kernel, (batch, blocks(channels, 32)), arguments, warps=4).run()
    return y, after


def cema_step_triton(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Compute ``cema_step`` without gradients, with y in the dtype of x."""
    decay = torch.view_as_real(coefficients.factor)
    given = (x, coefficients.input, decay, coefficients.output, state, segments.continues[:, 0])
    return _step(*(tensor.contiguous() for tensor in given))
