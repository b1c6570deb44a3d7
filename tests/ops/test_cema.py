"""CEMA and the short convolution satisfy the laws."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from support import cases, laws

from gecko.layers import CEMA
from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.cema.chunked import chunk_tables
from gecko.segments import Segments

# ---- CEMA satisfies the laws.


@pytest.mark.parametrize(("law", "case"), laws.over(cases.COMMON))
def test_cema(law, case):
    law(cases.CEMA, case)


@settings(max_examples=15)
@given(case=cases.anything)
def test_cema_anywhere(case):
    laws.check_all(cases.CEMA, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
def test_cema_gradients_are_numerical(case):
    laws.gradients_are_numerical(cases.CEMA, case)


def test_cema_coefficients_are_the_equations():
    generator = torch.Generator().manual_seed(1)
    alpha, delta = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    theta, gamma = torch.randn(5, generator=generator, dtype=torch.float64), torch.ones(5, 4, 2, dtype=torch.float64)
    found = CEMACoefficients.from_parameters(alpha, delta, theta, gamma)
    k = torch.arange(1, 5).double()
    angle = k * (2 * torch.pi / 4) * theta.sigmoid()[:, None]
    q = (1 - alpha.sigmoid() * delta.sigmoid()) * torch.exp(1j * angle)
    torch.testing.assert_close(found.decay(), q)
    torch.testing.assert_close(found.input, alpha.sigmoid())
    torch.testing.assert_close(found.decay(3), q**3)


def test_cema_of_an_impulse_is_the_filter():
    """One mode: y_t = Re(γ p q^t), without conjugate, factor 2 or 1/√N."""
    p, q, gamma = 0.5, 0.9 * torch.exp(torch.tensor(0.7j, dtype=torch.complex128)), 2.0 - 1.5j
    coefficients = CEMACoefficients(
        torch.tensor([[p]]).double(), q.abs().log().view(1, 1), q.angle().view(1, 1),
        torch.tensor([[[2.0, -1.5]]]).double(),
    )  # fmt: skip
    x = torch.zeros(1, 70, 1, dtype=torch.float64)
    x[0, 0] = 1
    y, _ = cema(x, coefficients)
    torch.testing.assert_close(y[0, :, 0], (gamma * p * q ** torch.arange(70)).real)


def test_cema_stays_accurate_in_float32_over_long_texts():
    generator = torch.Generator().manual_seed(2)
    parameters = cases.CEMA.draw_parameters(generator)
    parameters[1] = parameters[1] - 6  # slow decay
    x = cases.CEMA.draw_inputs(1, 1500, generator)[0]
    exact, _ = cema(x, CEMACoefficients.from_parameters(*parameters))
    single, _ = cema(x.float(), CEMACoefficients.from_parameters(*(p.float() for p in parameters)))
    assert (single - exact).abs().max() < 1e-4 * exact.abs().max()


def test_cema_with_a_skip_connection():
    x = torch.randn(2, 70, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    coefficients = CEMACoefficients.from_parameters(*cases.CEMA.draw_parameters(torch.Generator().manual_seed(4)))
    omega = torch.linspace(-1, 2, 5, dtype=torch.float64)
    for length in (1, 70):
        plain, _ = cema(x[:, :length], coefficients)
        skipping, _ = cema(x[:, :length], coefficients, skip=omega)
        torch.testing.assert_close(skipping, plain + omega * x[:, :length])


def test_tables_have_whole_gradients_where_autocast_is_still_on():
    parameters = [x.float().requires_grad_() for x in cases.CEMA.draw_parameters(torch.Generator().manual_seed(5))]

    response, *_ = chunk_tables(CEMACoefficients.from_parameters(*parameters), 16)
    loss = response.square().sum()
    wanted = torch.autograd.grad(loss, parameters, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(found, wanted)


# ---- The short convolution satisfies the laws.


@pytest.mark.parametrize(("law", "case"), laws.over(cases.ONE_CONFIGURATION))
@pytest.mark.parametrize("operator", cases.CONVOLUTIONS, ids=str)
def test_short_convolution(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
@pytest.mark.parametrize("operator", cases.CONVOLUTIONS, ids=str)
def test_short_convolution_gradients_are_numerical(operator, case):
    laws.gradients_are_numerical(operator, case)


def test_padding_stays_padding_with_gradients():
    """A layout that was built without gradients may be used with them."""
    generator = torch.Generator().manual_seed(3)
    x, parameters = torch.randn(2, 5, 4, generator=generator), torch.randn(3, 4, 3, generator=generator)
    alpha, delta, gamma = parameters
    coefficients = CEMACoefficients.from_parameters(alpha, delta, torch.zeros(4), torch.stack([gamma, gamma], -1))
    with torch.no_grad():
        segments = Segments.build(2, 5, lengths=torch.tensor([5, 2]))
        _, expected = cema(x, coefficients, segments=segments)
    _, found = cema(x.requires_grad_(), coefficients, segments=segments)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[1:], cema(x[1:, :2], coefficients)[1])


def test_weights_in_sixteen_bits_are_widened_before_they_are_computed_with():
    torch.manual_seed(0)
    layer = CEMA(8, 3, "identity").bfloat16()
    found, expected = layer.coefficients(), copy.deepcopy(layer).float().coefficients()
    assert torch.equal(found.output, expected.output)
