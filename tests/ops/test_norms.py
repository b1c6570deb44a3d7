"""Operators of one step equal their equations: norms, gates, rotary embedding, scale and shift."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.layers import LayerNorm, RMSNorm
from gecko.ops import common
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import by_head, gated, gated_reference, silu_by_head, silu_by_head_reference
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.qk_scale_shift import qk_scale_shift, qk_scale_shift_reference
from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate

EPS = 1e-3


def _draw(*shape: int, seed: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _layer(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()


def _agree(operator: Callable[..., Tensor], equation: Callable[..., Tensor], *leaves: Tensor | None) -> None:
    """Assert that the operator is its equation, and that its gradients are numerical."""
    torch.testing.assert_close(operator(*leaves), equation(*leaves))
    given = [x for x in leaves if x is not None]

    def call(*given: Tensor) -> Tensor:
        rest = iter(given)
        return operator(*(None if x is None else next(rest) for x in leaves))

    assert torch.autograd.gradcheck(call, tuple(given))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_norms(groups, affine):
    """Weights are offsets from 1."""
    x, weight, bias = _draw(2, 5, 12), *((_draw(12), _draw(12, seed=1)) if affine else (None, None))

    def of_groups(form: Callable[[Tensor], Tensor], x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
        y = form(x.unflatten(-1, (groups, -1))).flatten(-2)
        y = y if w is None else y * (1 + w)
        return y if b is None else y + b

    _agree(lambda x, w: group_rms_norm(x, w, groups, EPS), lambda x, w: of_groups(_rms, x, w), x, weight)
    _agree(
        lambda x, w, b: group_layer_norm(x, w, b, groups, EPS), lambda x, w, b: of_groups(_layer, x, w, b),
        x, weight, bias,
    )  # fmt: skip


@pytest.mark.parametrize("norm", [group_rms_norm, lambda x, w, g, e: group_layer_norm(x, w, w, g, e)])
def test_sixteen_bit_inputs_keep_their_dtype_and_use_float32_statistics(norm):
    x, weight = (1000 + 10 * _draw(4, 64)).bfloat16(), torch.zeros(64)
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


# ---- Gates, and scaled and shifted rows: in slices of steps, of rows, and of all; the last one is smaller.

SLICED = pytest.mark.parametrize("numbers", [24, 100, 2**17])


@SLICED
@pytest.mark.parametrize("recalls", [True, False])
def test_gates(numbers, recalls, monkeypatch):
    monkeypatch.setattr(common, "_NUMBERS", numbers)
    attended, x, recalled = _draw(3, 3, 5, 4), _draw(3, 5, 12), _draw(3, 3, 5, 4, seed=1) if recalls else None

    def equation(attended: Tensor, gate: Tensor, recalled: Tensor | None) -> Tensor:
        out = attended * _silu(by_head(gate, 3)) + (0 if recalled is None else recalled)
        return out.transpose(1, 2).flatten(2)

    _agree(gated, equation, attended, x, recalled)
    _agree(lambda x: silu_by_head(x, 3), lambda x: _silu(by_head(x, 3)), x)
    assert silu_by_head(x, 3).is_contiguous()
    torch.testing.assert_close(gated(attended, x, recalled), gated_reference(attended, x, recalled))
    torch.testing.assert_close(silu_by_head(x, 3), silu_by_head_reference(x, 3))


def test_swiglu():
    _agree(swiglu, lambda a, b: _silu(a) * b, _draw(2, 5, 6), _draw(2, 5, 6, seed=1))


@SLICED
@pytest.mark.parametrize(("rows", "heads", "size"), [(4, 2, 6), (2, 3, 4), (2, 1, 5)])
def test_qk_scale_shift(numbers, rows, heads, size, monkeypatch):
    monkeypatch.setattr(common, "_NUMBERS", numbers)
    given = _draw(3, 5, heads * size), _draw(rows, heads * size), _draw(rows, heads * size, seed=1)

    def equation(z: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        normal = _rms(z.unflatten(-1, (heads, -1))).flatten(-2)
        return torch.stack(
            [by_head(normal * (1 + a) / math.sqrt(size) + b, heads) for a, b in zip(scale, offset, strict=True)]
        )

    _agree(lambda *x: torch.stack(qk_scale_shift(*x, heads, EPS)), equation, *given)
    torch.testing.assert_close(qk_scale_shift(*given, heads, EPS), qk_scale_shift_reference(*given, heads, EPS))
    assert all(row.is_contiguous() for row in qk_scale_shift(*given, heads, EPS))


def test_sixteen_bit_input_keeps_its_dtype_and_is_rounded_once():
    z, scale = _draw(2, 5, 12, dtype=torch.bfloat16), _draw(4, 12, dtype=torch.float32)
    out = qk_scale_shift(z, scale, scale, 2, EPS)
    for row, exact in zip(out, qk_scale_shift(z.float(), scale, scale, 2, EPS), strict=True):
        assert row.dtype == torch.bfloat16
        assert torch.equal(row, exact.bfloat16())


# ---- Rotary embedding: scores depend on differences of positions only.

DIM, BASE = 6, 10_000.0
FREQUENCIES = rotary_frequencies(DIM, BASE)


def _turned(x: Tensor, position: int, heads: int = 2) -> Tensor:
    return rotate(x, rotary_phases(torch.tensor([position]), FREQUENCIES, x.dtype, x.device), heads)


Q, K = _draw(2, 1, 2, 1, DIM, seed=9).detach()


def test_rotation_turns_interleaved_pairs_of_the_first_heads():
    pairs = torch.view_as_complex(Q.unflatten(-1, (-1, 2)))
    angle = 7 * BASE ** -(torch.arange(0, DIM, 2).double() / DIM)
    torch.testing.assert_close(_turned(Q, 7), torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2))
    assert torch.equal(_turned(Q, 5, heads=0), Q)
    one = _turned(Q, 5, heads=1)
    assert torch.equal(one[:, 0], _turned(Q, 5)[:, 0]) and torch.equal(one[:, 1], Q[:, 1])


@given(query=st.integers(0, 5000), lag=st.integers(0, 5000), shift=st.integers(-5000, 5000))
def test_scores_depend_on_differences_only(query, lag, shift):
    here = (_turned(Q, query) * _turned(K, query - lag)).sum()
    there = (_turned(Q, query + shift) * _turned(K, query - lag + shift)).sum()
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_float32_tables_are_rounded_once():
    """Angles are computed in float64: at position 4 M, a float32 angle would be off by a quarter radian."""
    position = torch.tensor([4_000_000])
    single, exact = (
        rotary_phases(position, FREQUENCIES, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64)
    )
    assert (single - exact).abs().max() < 1e-7
