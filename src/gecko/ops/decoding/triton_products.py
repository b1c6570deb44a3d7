"""Triton kernels of matrix products with few rows, which read every weight once, and of the norms before them.

Weights are float32, bfloat16, or int8 with a scale per output. Inputs have the dtype of float weights, so they are
rounded once, by the kernel that makes them. Sums, and everything else, are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gecko.ops.timestep_norm.triton_tiles import feature_mask, feature_offsets

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls


@triton.jit
def norm_kernel(p_x, p_scale, p_shift, p_y, eps, features: tl.constexpr, groups: tl.constexpr, size: tl.constexpr,
                width: tl.constexpr, together: tl.constexpr, centered: tl.constexpr):  # fmt: skip
    """RMS norm of a row, or layer norm if ``centered``, over each group of its features."""
    row, i_group = tl.program_id(0).to(tl.int64), tl.arange(0, together)
    i_feature, m_x = feature_offsets(i_group, size, width), feature_mask(i_group, groups, size, width)
    b_x = tl.load(p_x + row * features + i_feature, mask=m_x, other=0.0)
    if centered:
        b_x = tl.where(m_x, b_x - (tl.sum(b_x, 1) / size)[:, None], 0.0)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / size + eps)[:, None]
    b_y *= tl.load(p_scale + i_feature, mask=m_x, other=0.0)
    if p_shift is not None:
        b_y += tl.load(p_shift + i_feature, mask=m_x, other=0.0)
    tl.store(p_y + row * features + i_feature, b_y.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit
def _places(tile, rows, outputs, many: tl.constexpr, out: tl.constexpr):
    """Return the rows and outputs of this program, and their masks."""
    i_row = tl.program_id(1).to(tl.int64) * many + tl.arange(0, many)
    i_out = tile.to(tl.int64) * out + tl.arange(0, out)
    return i_row, i_out, i_row < rows, i_out < outputs


@triton.jit
def _matrix_sums(p_x, p_weight, p_other, i_row, i_out, m_row, m_out, inputs: tl.constexpr, stride: tl.constexpr,
                 many: tl.constexpr, out: tl.constexpr, inner: tl.constexpr, operand_type: tl.constexpr):  # fmt: skip
    b_sum, b_other_sum = tl.zeros([many, out], tl.float32), tl.zeros([many, out], tl.float32)
    for begin in range(0, inputs, inner):
        i = begin + tl.arange(0, inner)
        m = i < inputs
        b_x = tl.load(p_x + i_row[:, None] * inputs + i[None, :], mask=m_row[:, None] & m[None, :], other=0.0)
        i_tile, m_tile = i_out[:, None] * stride + i[None, :], m_out[:, None] & m[None, :]
        b_weight = tl.trans(tl.load(p_weight + i_tile, mask=m_tile, other=0.0).to(operand_type))
        b_sum = tl.dot(b_x.to(operand_type), b_weight, b_sum, input_precision="tf32x3")
        if p_other is not None:
            b_weight = tl.trans(tl.load(p_other + i_tile, mask=m_tile, other=0.0).to(operand_type))
            b_other_sum = tl.dot(b_x.to(operand_type), b_weight, b_other_sum, input_precision="tf32x3")
    return b_sum, b_other_sum


@triton.jit
def _row_sums(p_x, p_weight, p_other, i_out, m_out, inputs: tl.constexpr, stride: tl.constexpr, out: tl.constexpr,
              inner: tl.constexpr):  # fmt: skip
    """Multiply one row in float32: a matrix product takes 16, of as many outputs, which are too few programs."""
    b_products, b_others = tl.zeros([out, inner], tl.float32), tl.zeros([out, inner], tl.float32)
    for begin in tl.range(0, inputs, inner, num_stages=3):
        i = begin + tl.arange(0, inner)
        m = i < inputs
        i_tile, m_tile = i_out[:, None] * stride + i[None, :], m_out[:, None] & m[None, :]
        b_x = tl.load(p_x + i, mask=m, other=0.0).to(tl.float32)[None, :]
        b_products += b_x * tl.load(p_weight + i_tile, mask=m_tile, other=0.0).to(tl.float32)
        if p_other is not None:
            b_others += b_x * tl.load(p_other + i_tile, mask=m_tile, other=0.0).to(tl.float32)
    return tl.sum(b_products, 1)[None, :], tl.sum(b_others, 1)[None, :]


@triton.jit
def _sums(p_x, p_weight, p_scale, p_other, p_other_scale, i_row, i_out, m_row, m_out, inputs: tl.constexpr,
          stride: tl.constexpr, many: tl.constexpr, out: tl.constexpr, inner: tl.constexpr,
          operand_type: tl.constexpr):  # fmt: skip
    """Return Σ_i x[row, i] weight[out, i], (rows, outputs), and the same of the other weights, or zeros without them. A
    row of weights takes ``stride`` numbers."""
    if many == 1:
        b_sum, b_other_sum = _row_sums(p_x, p_weight, p_other, i_out, m_out, inputs, stride, out, inner)
    else:
        b_sum, b_other_sum = _matrix_sums(
            p_x, p_weight, p_other, i_row, i_out, m_row, m_out, inputs, stride, many, out, inner, operand_type
        )
    if p_scale is not None:
        b_sum *= tl.load(p_scale + i_out, mask=m_out, other=0.0)[None, :]
    if p_other_scale is not None:
        b_other_sum *= tl.load(p_other_scale + i_out, mask=m_out, other=0.0)[None, :]
    return b_sum, b_other_sum


@triton.jit
def _of_part(tile, gates, queries, keys, shares, rest, of_value, of_gate, of_query, of_key, of_share, of_hidden):
    """Return what belongs to the part of a tile; the parts after the first begin at the tiles ``gates`` … ``rest``."""
    of_key = tl.where(tile < shares, of_key, tl.where(tile < rest, of_share, of_hidden))
    of_query = tl.where(tile < keys, of_query, of_key)
    return tl.where(tile < gates, of_value, tl.where(tile < queries, of_gate, of_query))


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    p_normal, p_averaged, p_value, p_gate, p_query, p_key, p_memory_gate, p_hidden, p_scale, p_bias, p_y, rows,
    value: tl.constexpr, gate: tl.constexpr, query: tl.constexpr, key: tl.constexpr, memory_gate: tl.constexpr,
    hidden: tl.constexpr, silu_values: tl.constexpr, inputs: tl.constexpr, stride: tl.constexpr, many: tl.constexpr,
    out: tl.constexpr, inner: tl.constexpr, operand_type: tl.constexpr,
):  # fmt: skip
    """The projections of the mixer side by side, of these sizes, some of which may be 0: values; gates, after silu;
    queries, or what queries and keys share; keys; gates of the memory; hidden. Values read the normal features, the
    others the averaged ones."""
    gates: tl.constexpr = (value + out - 1) // out
    queries: tl.constexpr = gates + (gate + out - 1) // out
    keys: tl.constexpr = queries + (query + out - 1) // out
    shares: tl.constexpr = keys + (key + out - 1) // out
    rest: tl.constexpr = shares + (memory_gate + out - 1) // out
    after_query: tl.constexpr = value + gate + query
    tile = tl.program_id(0)
    p_x = tl.where(tile < gates, p_normal, p_averaged)
    p_weight = _of_part(
        tile, gates, queries, keys, shares, rest, p_value, p_gate, p_query, p_key, p_memory_gate, p_hidden
    )
    outputs = _of_part(tile, gates, queries, keys, shares, rest, value, gate, query, key, memory_gate, hidden)
    before = _of_part(
        tile, gates, queries, keys, shares, rest, 0, value, value + gate, after_query, after_query + key,
        after_query + key + memory_gate,
    )  # fmt: skip
    activated = ((tile < gates) & silu_values) | ((tile >= gates) & (tile < queries))

    tile -= _of_part(tile, gates, queries, keys, shares, rest, 0, gates, queries, keys, shares, rest)
    i_row, i_out, m_row, m_out = _places(tile, rows, outputs, many, out)
    p_factor = p_scale
    if p_scale is not None:
        p_factor = p_scale + before
    b_y, _ = _sums(
        p_x, p_weight, p_factor, None, None, i_row, i_out, m_row, m_out, inputs, stride, many, out, inner, operand_type
    )
    b_y += tl.load(p_bias + before + i_out, mask=m_out, other=0.0)[None, :]
    b_y = tl.where(activated, b_y * tl.sigmoid(b_y), b_y)
    i_y = i_row[:, None] * (after_query + key + memory_gate + hidden) + before + i_out[None, :]
    tl.store(p_y + i_y, b_y, mask=m_row[:, None] & m_out[None, :])


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    p_x, p_gate, p_gate_scale, p_up, p_up_scale, p_y, rows, outputs: tl.constexpr, inputs: tl.constexpr,
    stride: tl.constexpr, many: tl.constexpr, out: tl.constexpr, inner: tl.constexpr, operand_type: tl.constexpr,
):  # fmt: skip
    """Compute silu(x gateᵀ), times x upᵀ if there is an ``up``."""
    i_row, i_out, m_row, m_out = _places(tl.program_id(0), rows, outputs, many, out)
    b_y, b_up = _sums(
        p_x, p_gate, p_gate_scale, p_up, p_up_scale, i_row, i_out, m_row, m_out, inputs, stride, many, out, inner,
        operand_type,
    )  # fmt: skip
    b_y *= tl.sigmoid(b_y)
    if p_up is not None:
        b_y *= b_up
    i_y = i_row[:, None] * outputs + i_out[None, :]
    tl.store(p_y + i_y, b_y.to(p_y.dtype.element_ty), mask=m_row[:, None] & m_out[None, :])


@triton.jit(do_not_specialize=["rows"])
def onto_kernel(
    p_x, p_weight, p_scale, p_factor, p_onto, p_more, p_y, rows, more_stride: tl.constexpr, outputs: tl.constexpr,
    inputs: tl.constexpr, stride: tl.constexpr, many: tl.constexpr, out: tl.constexpr, inner: tl.constexpr,
    operand_type: tl.constexpr,
):  # fmt: skip
    """Compute y = x weightᵀ · factor + onto + more, each of the last three if there is one. y may be ``onto``."""
    i_row, i_out, m_row, m_out = _places(tl.program_id(0), rows, outputs, many, out)
    b_y, _ = _sums(
        p_x, p_weight, p_scale, None, None, i_row, i_out, m_row, m_out, inputs, stride, many, out, inner, operand_type
    )
    if p_factor is not None:
        b_y *= tl.load(p_factor + i_out, mask=m_out, other=0.0)[None, :]
    i_y, m = i_row[:, None] * outputs + i_out[None, :], m_row[:, None] & m_out[None, :]
    if p_onto is not None:
        b_y += tl.load(p_onto + i_y, mask=m, other=0.0)
    if p_more is not None:
        b_y += tl.load(p_more + i_row[:, None] * more_stride + i_out[None, :], mask=m, other=0.0)
    tl.store(p_y + i_y, b_y, mask=m)
