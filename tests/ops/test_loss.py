"""The blocked loss equals cross-entropy on all logits, in value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.ops import loss
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy

VOCABULARY = 11


def _case(tokens: int, ignored: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return hidden, weight, targets.masked_fill(torch.rand(tokens, generator=generator) < ignored, IGNORED)


@settings(max_examples=40)
@given(tokens=st.integers(1, 40), block=st.integers(1, 50), ignored=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_loss_is_cross_entropy(tokens, block, ignored):
    hidden, weight, targets = _case(tokens, ignored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_block_size", lambda *_: block)
        value = linear_cross_entropy(hidden, weight, targets)
        each = token_cross_entropy(hidden, weight, targets)
        with torch.no_grad():
            torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), value.detach())
    logits = hidden @ weight.t()
    expected = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    expected = expected / max(1, int((targets != IGNORED).sum()))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(each, F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED).detach())
    for got, wanted in zip(*(torch.autograd.grad(2.5 * x, (hidden, weight)) for x in (value, expected)), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("frozen", [0, 1])
def test_loss_with_one_side_frozen(frozen):
    sides = list(_case(9, 0.2))
    (expected,) = torch.autograd.grad(linear_cross_entropy(*sides), sides[1 - frozen])
    sides[frozen] = sides[frozen].detach()
    (got,) = torch.autograd.grad(linear_cross_entropy(*sides), sides[1 - frozen])
    torch.testing.assert_close(got, expected)


def test_loss_of_sixteen_bit_hidden_states_is_float32():
    hidden, weight, targets = _case(50, 0.2, torch.bfloat16)
    value = linear_cross_entropy(hidden, weight, targets)
    value.backward()
    expected = F.cross_entropy(hidden.double() @ weight.double().t(), targets, ignore_index=IGNORED)
    assert value.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert abs(value.item() - expected.item()) < 0.02


@pytest.mark.parametrize("tokens", [1, 1000, 1024])
def test_scaled_gradients_in_float16_are_those_of_all_tokens(tokens: int):
    """1 / tokens, times a probability, is no float16; times the scale of a GradScaler it is."""
    scale, vocabulary = 2.0**15, 20_000
    hidden, weight = torch.zeros(tokens, 4).half(), torch.zeros(vocabulary, 4).half()
    hidden[:, 0] = 1
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    (linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long)) * scale).backward()
    expected = torch.full((vocabulary,), scale / vocabulary)
    expected[0] -= scale
    torch.testing.assert_close(weight.grad[:, 0].float(), expected, rtol=2e-3, atol=0)


def test_large_logits_do_not_overflow():
    hidden, weight, targets = _case(9, 0.0, torch.float32)
    assert linear_cross_entropy(1e4 * hidden, weight, targets).isfinite()


def test_autocast_on_a_cpu_rounds_no_logits():
    hidden, weight, targets = _case(40, 0.3, torch.float32)
    expected = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        value = linear_cross_entropy(hidden, weight, targets)
        each = token_cross_entropy(hidden, weight, targets)
    assert torch.equal(value, expected)
    assert torch.equal(each, token_cross_entropy(hidden, weight, targets))


def test_products_in_sixteen_bits_stay_near():
    """Compute as a GPU does under autocast: operands rounded to bfloat16, sums in float32."""
    hidden, weight, targets = _case(200, 0.2, torch.float32)
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    rounded = torch.autograd.grad(
        loss._MeanCrossEntropy.apply(hidden, weight, targets, torch.bfloat16, 0.0), (hidden, weight)
    )
    for got, wanted in zip(rounded, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() < 0.02 * wanted.norm()


@settings(max_examples=40)
@given(tokens=st.integers(1, 40), block=st.integers(1, 50), ignored=st.sampled_from([0.0, 0.3, 1.0]))
def test_z_loss_is_the_mean_square_of_the_log_sums(tokens, block, ignored):
    hidden, weight, targets = _case(tokens, ignored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_block_size", lambda *_: block)
        value = linear_cross_entropy(hidden, weight, targets, z_loss=0.1)
        with torch.no_grad():
            assert torch.equal(linear_cross_entropy(hidden, weight, targets, z_loss=0.1), value)
    trained = targets != IGNORED
    log_sums = torch.logsumexp(hidden @ weight.t(), -1)[trained]
    expected = linear_cross_entropy(hidden, weight, targets) + 0.1 * log_sums.square().sum() / max(1, trained.sum())
    torch.testing.assert_close(value, expected)
    for got, wanted in zip(*(torch.autograd.grad(2.5 * x, (hidden, weight)) for x in (value, expected)), strict=True):
        torch.testing.assert_close(got, wanted)
