"""A model whose operators all take their kernels agrees with itself in float64, with what it recomputes as without."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

from gecko import Gecko, GeckoConfig
from gecko.ops import kernels

SMALL = GeckoConfig(
    vocab_size=32, num_layers=1, model_dim=16, key_dim=16, value_dim=32, num_heads=1, ffn_dim=16, chunk_size=8,
    cema_modes=2, timestep_groups=2,
)  # fmt: skip


@pytest.fixture
def _on_kernels(monkeypatch):
    """As for tensors on a GPU; float64 stays with the eager forms."""
    before = kernels.kernels_run_on
    for name, module in list(sys.modules.items()):
        if name.startswith("gecko.") and getattr(module, "kernels_run_on", None) is before:
            monkeypatch.setattr(module, "kernels_run_on", lambda x: x.dtype in kernels.DTYPES)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.usefixtures("_on_kernels")
def test_loss_and_gradients(checkpointing):
    torch.manual_seed(0)
    model = Gecko(SMALL)
    exact = copy.deepcopy(model).double()
    tokens = torch.randint(32, (1, 36))
    documents = (torch.arange(35) >= 19).long().unsqueeze(0)
    losses = []
    for each in (model, exact):
        each.activation_checkpointing = checkpointing
        losses.append(each.loss(tokens[:, :-1], tokens[:, 1:], documents))
        losses[-1].backward()
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=0)
    for (name, found), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (found.grad - wanted.grad).norm() / wanted.grad.norm().clamp(min=1e-9)
        assert error < 2e-5, name


@pytest.mark.usefixtures("_on_kernels")
@torch.no_grad()
def test_reading_goes_on_from_the_state():
    torch.manual_seed(1)
    model = Gecko(SMALL)
    tokens = torch.randint(32, (1, 36))
    expected, _ = copy.deepcopy(model).double()(tokens)
    first, state = model(tokens[:, :21])
    second, _ = model(tokens[:, 21:], state=state)
    torch.testing.assert_close(torch.cat([first, second], dim=1).double(), expected, rtol=1e-4, atol=1e-5)
