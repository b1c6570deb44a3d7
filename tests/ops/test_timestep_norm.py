"""The timestep norms, decaying and cumulative, satisfy the laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases, laws

from gecko.ops.timestep_norm import Statistics, timestep_norm
from gecko.segments import Segments

BETAS = (0.999, 0.9999)
EPS = 1e-5
DECAY, FAST_DECAY, CUMULATIVE = cases.TIMESTEP_NORMS


@pytest.mark.parametrize(("law", "case"), laws.over(cases.COMMON))
@pytest.mark.parametrize("operator", [DECAY, CUMULATIVE], ids=str)
def test_timestep_norm(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize(("law", "case"), laws.over(cases.ONE_CONFIGURATION))
def test_timestep_norm_that_forgets_fast(law, case):
    law(FAST_DECAY, case)


@settings(max_examples=20)
@given(operator=st.sampled_from(cases.TIMESTEP_NORMS), case=cases.anything)
def test_timestep_norm_anywhere(operator, case):
    laws.check_all(operator, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
@pytest.mark.parametrize("operator", [DECAY, CUMULATIVE], ids=str)
def test_timestep_norm_gradients_are_numerical(operator, case):
    laws.gradients_are_numerical(operator, case)


def _texts(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_cumulative_statistics_are_those_of_all_features_so_far():
    x = 5 + 2 * _texts(1, 100, 12)
    y, state = timestep_norm(x, None, None, Statistics(3, None, EPS))
    for t in (0, 1, 40, 99):
        seen = x[0, : t + 1].view(t + 1, 3, 4).transpose(0, 1).flatten(1)
        deviation = (seen.var(1, correction=0, keepdim=True) + EPS).sqrt()
        torch.testing.assert_close(y[0, t].view(3, 4), (x[0, t].view(3, 4) - seen.mean(1, keepdim=True)) / deviation)
    torch.testing.assert_close(state.variance[0], seen.var(1, correction=0))


def test_decay_norm_of_constant_statistics_is_unbiased_at_every_step():
    """Steps of equal mean and variance are normalised by exactly these from the first step on, also in float32."""
    step = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(4))
    x = step.expand(1, 3000, 64) * 3 + 1
    expected = (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)
    for given_x in (x, x.double()):
        y, _ = timestep_norm(given_x, None, None, Statistics(1, BETAS, 0.0))
        assert (y - expected).abs().max() < 2e-5


@pytest.mark.parametrize("betas", [BETAS, None])
def test_statistics_survive_a_large_offset_in_float32(betas):
    x = 100 + _texts(1, 300, 12)
    exact, _ = timestep_norm(x.float().double(), None, None, Statistics(3, betas, EPS))
    single, _ = timestep_norm(x.float(), None, None, Statistics(3, betas, EPS))
    assert (single - exact).abs().max() < 2e-3 * exact.abs().max()


def test_sixteen_bit_activations_keep_float32_statistics():
    x = _texts(1, 20, 12)
    y, state = timestep_norm(x.bfloat16(), None, None, Statistics(3, BETAS, EPS))
    exact, exact_state = timestep_norm(x.bfloat16().double(), None, None, Statistics(3, BETAS, EPS))
    assert y.dtype == torch.bfloat16
    assert state.mean.dtype == state.variance.dtype == torch.float32
    torch.testing.assert_close(state.variance.double(), exact_state.variance, rtol=1e-5, atol=1e-7)
    assert (y.double() - exact).abs().max() < 0.02


@pytest.mark.parametrize("length", [1, 2])
def test_small_weights_in_sixteen_bits_are_not_rounded_away(length: int) -> None:
    """A weight of 2⁻⁹ beside 1 is no bfloat16; one token is computed by other code than several."""
    x, weight = _texts(1, length, 12).float(), torch.full((12,), 2.0**-9)
    exact, _ = timestep_norm(x, weight, 0 * weight, Statistics(3, BETAS, EPS))
    y, _ = timestep_norm(x, weight.bfloat16(), 0 * weight.bfloat16(), Statistics(3, BETAS, EPS))
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("betas", [BETAS, None])
def test_padding_stays_padding_with_gradients(betas: tuple[float, float] | None) -> None:
    """Also in the backward pass. A layout that was built without gradients may be used with them."""
    x = _texts(2, 5, 48).float().requires_grad_()
    with torch.no_grad():
        segments = Segments.build(2, 5, lengths=torch.tensor([5, 2]))
    _, padded = timestep_norm(x, None, None, Statistics(3, betas, EPS), segments=segments)
    _, alone = timestep_norm(x[1:, :2], None, None, Statistics(3, betas, EPS))
    torch.testing.assert_close(padded.variance[1:], alone.variance)
    sums = (variance.square().sum() for variance in (padded.variance[1:], alone.variance))
    found, expected = (torch.autograd.grad(of, x)[0][1] for of in sums)
    torch.testing.assert_close(found, expected)
