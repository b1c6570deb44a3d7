"""Training steps from captured graphs equal eager ones on the GPU, over batches whose documents differ."""

from __future__ import annotations

import copy

import pytest
import torch
from support import cases

from gecko.data import Batch
from gecko.train.capture import CapturedGradients
from gecko.train.step import compute_gradients, split_batch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

LENGTH = 64


def _batch(number: int, documents: int) -> Batch:
    text = cases.tokens(4, LENGTH + 1, seed=number)
    ids = (torch.arange(LENGTH) * documents // LENGTH).expand(4, -1)
    return Batch(text[:, :-1], text[:, 1:], ids)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_losses_and_gradients_are_those_of_eager_steps(precision, checkpointing, parts, device):
    """Each part of a batch has its replay; batches with one document a row have another graph."""
    model = cases.model("gecko", torch.float32).to(device)
    model.activation_checkpointing = checkpointing
    eager, captured = copy.deepcopy(model), CapturedGradients(model, precision)
    for number, documents in enumerate([3, 5, 1, 4, 1, 3]):
        given = split_batch(_batch(number, documents), parts, next(model.parameters()).device)
        eager.zero_grad()
        assert torch.equal(captured(given), compute_gradients(eager, given, precision))
        for (name, mine), wanted in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-5, atol=1e-7, msg=name)
            for x in (mine, wanted):
                x.data.add_(wanted.grad, alpha=-0.01)
