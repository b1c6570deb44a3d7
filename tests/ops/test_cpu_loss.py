"""The C kernel of the loss equals the eager form in float64, for any vocabulary size."""

from __future__ import annotations

import pytest
import torch
from support.native_agreement import calls, needs_compiler, normal, on_two_threads
from torch import Tensor

from gecko.ops import loss as loss_file
from gecko.ops.backends import cpu as panels
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy

pytestmark = needs_compiler

SIZES = [(1, 1), (3, 7), (5, 16), (20, 33), (300, 264), (7, 5000)]
"""(tokens, vocabulary) around 16 lanes; the last two are divided among threads."""


WIDE = [(1, 16, 1), (96, 48, 33), (97, 16, 264), (1000, 80, 500)]
"""(tokens, features, vocabulary) of heads whose logits fit in the cache, around a block of tokens."""


def _loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets)
    return loss.detach(), *torch.autograd.grad(3 * loss, leaves)


def _agree(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    found, exact = _loss(hidden, weight, targets), _loss(hidden.double(), weight.double(), targets)
    again = on_two_threads(lambda: _loss(hidden, weight, targets))
    assert torch.equal(found[0], again[0])
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * max(1e-3, float(wanted.abs().max())))


def _targets(tokens: int, vocabulary: int, ignored: float) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return targets.masked_fill(torch.rand(tokens, generator=generator) < ignored, IGNORED)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", SIZES)
def test_loss(size, ignored):
    tokens, vocabulary = size
    _agree(normal(tokens, 8), normal(vocabulary, 8), _targets(tokens, vocabulary, ignored))


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", WIDE)
def test_loss_of_a_head_of_few_weights(monkeypatch, size, ignored):
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 1)
    names = calls(monkeypatch, loss_file)
    tokens, features, vocabulary = size
    weight = normal(vocabulary, features) / features**0.5
    _agree(normal(tokens, features), weight, _targets(tokens, vocabulary, ignored))
    assert set(names) == {"loss_of_head"}


@pytest.mark.parametrize("frozen", [0, 1])
def test_head_with_one_side_frozen(monkeypatch, frozen):
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 1)
    leaves = [normal(100, 16), normal(40, 16)]
    trained = leaves[1 - frozen].requires_grad_()
    targets = _targets(100, 40, 0.2)
    (found,) = torch.autograd.grad(linear_cross_entropy(*leaves, targets), trained)
    (exact,) = torch.autograd.grad(linear_cross_entropy(*(x.double() for x in leaves), targets), trained)
    torch.testing.assert_close(found, exact.float())


@pytest.mark.parametrize("features", [8, 32])
def test_a_weight_of_other_features_is_refused(monkeypatch, features):
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 1)
    hidden, weight = normal(100, 16).requires_grad_(), normal(40, features)
    for loss in (linear_cross_entropy, token_cross_entropy):
        with pytest.raises(ValueError, match=rf"weight must have shape \(40, 16\); got \(40, {features}\)"):
            loss(hidden, weight, _targets(100, 40, 0.2))


def test_second_derivatives_of_a_head_are_refused(monkeypatch):
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 1)
    hidden = normal(100, 16).requires_grad_()
    loss = linear_cross_entropy(hidden, normal(40, 16), _targets(100, 40, 0.2))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_large_logits():
    """Logits of either sign, so far apart that the largest one is the whole sum."""
    for scale in (1e3, 1e30):
        _agree(scale * normal(9, 8), normal(33, 8), _targets(9, 33, 0.2))
        _agree(-scale * normal(9, 8), normal(33, 8), _targets(9, 33, 0.2))


@pytest.mark.parametrize("place", [0, 15, 32])
def test_none_stays_none(place):
    """A NaN or an infinity in the logits of one row affects only the loss and the gradient of that row."""
    for value in (float("nan"), float("inf")):
        logits = normal(3, 33)
        logits[1, place] = value
        losses, grad = loss_file.losses_and_gradient_cpu(logits, torch.tensor([1, 2, 3]), 3.0)
        assert losses.isfinite().tolist() == [True, False, True]
        assert grad.isfinite().all(1).tolist() == [True, False, True]


def test_float32_takes_the_kernel(monkeypatch):
    names = calls(monkeypatch, loss_file)
    _loss(normal(5, 8), normal(7, 8), _targets(5, 7, 0.0))
    _loss(normal(5, 8).double(), normal(7, 8).double(), _targets(5, 7, 0.0))
    assert names == ["loss_and_gradient"]


@pytest.mark.parametrize("fewest", [1, 1536], ids=["head", "logits"])
def test_targets_that_are_none_are_refused(monkeypatch, fewest):
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", fewest)
    hidden, weight = normal(5, 16).requires_grad_(), normal(7, 16)
    for wrong in (-1, 7, 2_000_000_000):
        targets = torch.tensor([1, 2, wrong, 3, IGNORED])
        with pytest.raises(IndexError, match=rf"in 0\.\.6, or -100; got {wrong}"):
            linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(TypeError, match=r"targets must be int64; got torch\.int32"):
        linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"targets must have shape \(5,\); got \(4,\)"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("size", SIZES)
def test_z_loss(size):
    tokens, vocabulary = size
    leaves = [normal(tokens, 8).requires_grad_(), normal(vocabulary, 8).requires_grad_()]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    targets = _targets(tokens, vocabulary, 0.4)
    for got, wanted in zip(*(_with_z(given, targets) for given in (leaves, wide)), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * max(1e-3, float(wanted.abs().max())))


def _with_z(leaves: list[Tensor], targets: Tensor) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(*leaves, targets, z_loss=0.01)
    return loss.detach(), *torch.autograd.grad(loss, leaves)
