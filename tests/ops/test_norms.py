"""Norms over the features of one step equal their equations; weights are offsets from 1."""

from __future__ import annotations

import pytest
import torch

import gecko
from gecko.layers.norms import LayerNorm, RMSNorm
from gecko.ops.norms import group_layer_norm, group_rms_norm

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
