"""Operators of one step: norms, gates, rotary embedding, scale and shift."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gecko
from gecko.layers import LayerNorm, RMSNorm
from gecko.ops import common as slices
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated, gated_reference, silu_by_head, silu_by_head_reference
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.qk_scale_shift import qk_scale_shift, qk_scale_shift_reference
from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate

# ---- Norms over the features of one step equal their equations; weights are offsets from 1.

EPS = 1e-3


def _draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_group_rms_norm(groups, affine):
    x, weight = _draw(2, 5, 12), _draw(12) if affine else None
    grouped = x.view(2, 5, groups, -1)
    expected = (grouped / (grouped.square().mean(-1, keepdim=True) + EPS).sqrt()).view(2, 5, 12)
    torch.testing.assert_close(group_rms_norm(x, weight, groups, EPS), expected * (1 + weight) if affine else expected)
    leaves = (x, weight) if affine else (x,)
    assert torch.autograd.gradcheck(lambda x, weight=None: group_rms_norm(x, weight, groups, EPS), leaves)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_group_layer_norm(groups, affine):
    x, weight, bias = _draw(2, 5, 12), *((_draw(12), _draw(12) + 1) if affine else (None, None))
    grouped = x.view(2, 5, groups, -1)
    spread = grouped.var(-1, correction=0, keepdim=True)
    expected = ((grouped - grouped.mean(-1, keepdim=True)) / (spread + EPS).sqrt()).view(2, 5, 12)
    expected = expected * (1 + weight) + bias if affine else expected
    torch.testing.assert_close(group_layer_norm(x, weight, bias, groups, EPS), expected)
    leaves = (x, weight, bias) if affine else (x,)
    assert torch.autograd.gradcheck(lambda x, w=None, b=None: group_layer_norm(x, w, b, groups, EPS), leaves)


@pytest.mark.parametrize("groups", [1, 3])
def test_group_layer_norm_takes_weight_and_bias_together(groups):
    with pytest.raises(ValueError, match="weight and bias must both be given, or neither; got a bias only"):
        group_layer_norm(_draw(2, 12), None, _draw(12), groups, EPS)


@pytest.mark.parametrize("norm", [group_rms_norm, lambda x, w, g, e: group_layer_norm(x, w, w, g, e)])
def test_sixteen_bit_inputs_keep_their_dtype_and_use_float32_statistics(norm):
    x = (1000 + 10 * _draw(4, 64)).bfloat16()
    weight = torch.zeros(64)
    y = norm(x, weight, 1, EPS)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), norm(x.double(), weight.double(), 1, EPS), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("eager_forms")
@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm])
def test_a_norm_layer_rounds_what_linear_layers_would_round(layer):
    """Under autocast the output has the autocast dtype, and linear layers compute the same as from float32."""
    config = gecko.GeckoConfig.preset("tiny")
    norm, linear = layer(config), torch.nn.Linear(config.model_dim, 5)
    x = _draw(3, 4, config.model_dim).float()
    whole = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, y, expected = norm(x), linear(norm(x)), linear(whole)
    assert whole.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, whole.bfloat16())
    assert torch.equal(y, expected)


# ---- The gates equal their equations, in the memory layouts of the operators beside them.


def _draw_gates(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def test_silu_by_head():
    x = _draw_gates(2, 5, 12)
    y = silu_by_head(x, 3)
    assert y.shape == (2, 3, 5, 4) and y.is_contiguous()
    for head in range(3):
        torch.testing.assert_close(y[:, head], _silu(x[..., 4 * head : 4 * head + 4]))


@pytest.mark.parametrize("recalls", [True, False])
def test_gated(recalls):
    attended, gate, recalled = (
        _draw_gates(2, 3, 5, 4),
        _draw_gates(2, 5, 12),
        _draw_gates(2, 3, 5, 4, seed=1) if recalls else None,
    )
    out = gated(attended, gate, recalled)
    assert out.shape == (2, 5, 12)
    for head in range(3):
        own = slice(4 * head, 4 * head + 4)
        expected = attended[:, head] * _silu(gate[..., own]) + (recalled[:, head] if recalls else 0)
        torch.testing.assert_close(out[..., own], expected)


@pytest.mark.parametrize("numbers", [24, 100, 2**17])
@pytest.mark.parametrize("recalls", [True, False])
def test_gradients_in_slices_of_steps_of_rows_and_of_all(numbers, recalls, monkeypatch):
    """The last slice of a row, and of the batch, is smaller than the others."""
    monkeypatch.setattr(slices, "_NUMBERS", numbers)
    x = _draw_gates(3, 5, 12)
    given = _draw_gates(3, 3, 5, 4), x, _draw_gates(3, 3, 5, 4, seed=1) if recalls else None
    torch.testing.assert_close(gated(*given), gated_reference(*given))
    torch.testing.assert_close(silu_by_head(x, 3), silu_by_head_reference(x, 3))
    assert torch.autograd.gradcheck(gated, given)
    assert torch.autograd.gradcheck(lambda x: silu_by_head(x, 3), (x,))


def test_swiglu():
    a, b = _draw_gates(2, 5, 6), _draw_gates(2, 5, 6, seed=1)
    torch.testing.assert_close(swiglu(a, b), _silu(a) * b)


def test_gates_refuse_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="heads must divide the features of x; got 5 and 12"):
        silu_by_head(torch.zeros(1, 2, 12), 5)
    attended = torch.zeros(2, 3, 5, 4)
    with pytest.raises(ValueError, match=r"gate must have shape \(2, 5, 12\); got \(2, 5, 4\)"):
        gated(attended, torch.zeros(2, 5, 4), None)
    with pytest.raises(ValueError, match=r"recalled must have shape \(2, 3, 5, 4\); got \(2, 3, 5, 1\)"):
        gated(attended, torch.zeros(2, 5, 12), torch.zeros(2, 3, 5, 1))
    with pytest.raises(ValueError, match=r"b must have shape \(2, 3\); got \(2, 1\)"):
        swiglu(torch.zeros(2, 3), torch.zeros(2, 1))


# ---- ``qk_scale_shift`` equals its equation, row by row and head by head.


def _draw_rows(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(("rows", "heads", "size"), [(4, 2, 6), (2, 3, 4), (2, 1, 5)])
def test_qk_scale_shift(rows, heads, size):
    z, scale, offset = _draw_rows(2, 5, heads * size), _draw_rows(rows, heads * size), _draw_rows(rows, heads * size)
    out = qk_scale_shift(z, scale, offset, heads, EPS)
    assert len(out) == rows
    assert all(row.shape == (2, heads, 5, size) and row.is_contiguous() for row in out)
    for row in range(rows):
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            x = z[..., own]
            normal = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            expected = normal * (1 + scale[row, own]) / math.sqrt(size) + offset[row, own]
            torch.testing.assert_close(out[row][:, head], expected)
    assert torch.autograd.gradcheck(lambda *x: qk_scale_shift(*x, heads, EPS), (z, scale, offset))


@pytest.mark.parametrize("numbers", [40, 500])
def test_gradients_in_slices_of_steps_and_of_rows(numbers, monkeypatch):
    monkeypatch.setattr(slices, "_NUMBERS", numbers)
    given = _draw_rows(3, 5, 12), _draw_rows(4, 12), _draw_rows(4, 12)
    torch.testing.assert_close(qk_scale_shift(*given, 2, EPS), qk_scale_shift_reference(*given, 2, EPS))
    assert torch.autograd.gradcheck(lambda *x: qk_scale_shift(*x, 2, EPS), given)


def test_sixteen_bit_input_keeps_its_dtype_and_is_rounded_once():
    z, scale = _draw_rows(2, 5, 12, dtype=torch.bfloat16), _draw_rows(4, 12, dtype=torch.float32)
    out = qk_scale_shift(z, scale, scale, 2, EPS)
    for row, exact in zip(out, qk_scale_shift(z.float(), scale, scale, 2, EPS), strict=True):
        assert row.dtype == torch.bfloat16
        assert torch.equal(row, exact.bfloat16())


def test_qk_scale_shift_refuses_shapes_that_do_not_fit():
    z = torch.zeros(1, 2, 12)
    with pytest.raises(ValueError, match="heads must divide the features of z; got 5 and 12"):
        qk_scale_shift(z, torch.zeros(4, 12), torch.zeros(4, 12), 5, EPS)
    with pytest.raises(ValueError, match=r"scale must have shape \(4, 12\); got \(4, 11\)"):
        qk_scale_shift(z, torch.zeros(4, 11), torch.zeros(4, 12), 2, EPS)
    with pytest.raises(ValueError, match=r"offset must have shape \(4, 12\); got \(2, 12\)"):
        qk_scale_shift(z, torch.zeros(4, 12), torch.zeros(2, 12), 2, EPS)


# ---- Rotary embedding: scores depend on differences of positions only.

DIM, BASE = 6, 10_000.0
FREQUENCIES = rotary_frequencies(DIM, BASE)


def _turned(x: torch.Tensor, position: int, heads: int = 2) -> torch.Tensor:
    return rotate(x, rotary_phases(torch.tensor([position]), FREQUENCIES, x.dtype, x.device), heads)


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    q, k = torch.randn(2, 1, 2, 1, DIM, generator=generator, dtype=torch.float64)
    return q, k


def test_rotation_turns_interleaved_pairs():
    x, _ = _pair()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angle = 7 * BASE ** -(torch.arange(0, DIM, 2).double() / DIM)
    torch.testing.assert_close(_turned(x, 7), torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2))


@given(query=st.integers(0, 5000), lag=st.integers(0, 5000), shift=st.integers(-5000, 5000))
def test_scores_depend_on_differences_only(query, lag, shift):
    q, k = _pair()
    here = (_turned(q, query) * _turned(k, query - lag)).sum()
    there = (_turned(q, query + shift) * _turned(k, query - lag + shift)).sum()
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_only_the_first_heads_turn():
    x, _ = _pair()
    assert torch.equal(_turned(x, 5, heads=0), x)
    one = _turned(x, 5, heads=1)
    assert torch.equal(one[:, 0], _turned(x, 5)[:, 0]) and torch.equal(one[:, 1], x[:, 1])


def test_float32_tables_are_rounded_once():
    """Angles are computed in float64: at position 4 M, a float32 angle would be off by a quarter radian."""
    position = torch.tensor([4_000_000])
    exact = rotary_phases(position, FREQUENCIES, torch.float64, torch.device("cpu"))
    single = rotary_phases(position, FREQUENCIES, torch.float32, torch.device("cpu"))
    for got, wanted in zip(single, exact, strict=True):
        assert (got - wanted).abs().max() < 1e-7
