"""The loss kernel computes cross-entropy and its gradient, and the blocked loss is the same with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.agreement import is_well_registered, normal
from kernels.recording import take_kernels

from gecko.ops import loss
from gecko.ops.loss import IGNORED
from gecko.ops.loss.triton import losses_and_gradient


def _targets(tokens: int, vocabulary: int, ignored: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.randint(vocabulary, (tokens,), generator=generator)
    return drawn.masked_fill(torch.rand(tokens, generator=generator) < ignored, IGNORED)


@pytest.mark.parametrize(
    ("vocabulary", "ignored", "scale"),
    [(1, 0.5, 1.0), (11, 1.0, 1.0), (4096, 0.0, 0.0), (5000, 0.5, 1e4), (9001, 0.5, 1.0)],
)
def test_losses_and_gradient(vocabulary, ignored, scale):
    logits, targets = scale * normal(5, vocabulary).detach(), _targets(5, vocabulary, ignored)
    count = (targets != IGNORED).sum().clamp(min=1)
    losses, grad = losses_and_gradient(logits, targets, count, IGNORED, torch.float32)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (wanted,) = torch.autograd.grad(expected.sum() / count, exact)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-6)
    rounded = losses_and_gradient(logits, targets, count, IGNORED, torch.bfloat16)[1]
    # The interpreter truncates where a GPU rounds.
    torch.testing.assert_close(rounded.float(), grad, rtol=2**-7, atol=0.0)


def test_blocked_loss_with_the_kernel(monkeypatch):
    hidden, weight, targets = normal(30, 6), normal(11, 6), _targets(30, 11, 0.3)
    monkeypatch.setattr(loss, "_block_size", lambda *_: 7)
    expected = loss.linear_cross_entropy(hidden, weight, targets)
    take_kernels(monkeypatch)
    value = loss.linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(value, expected)
    for got, wanted in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (value, expected)), strict=True):
        torch.testing.assert_close(got, wanted)


def test_cross_entropy_is_well_registered():
    count = torch.tensor(3)
    is_well_registered(losses_and_gradient, normal(4, 7).detach(), _targets(4, 7, 0.3), count, IGNORED, torch.bfloat16)
