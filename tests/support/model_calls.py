"""Helpers by which tests of the model read texts and compare the results."""

import pytest
import torch
from support.cases import VARIANTS
from torch import Tensor

import gecko

variants = pytest.mark.parametrize("variant", VARIANTS)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert that two tensors are equal within a tolerance relative to the largest number."""
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= TOLERANCE[actual.dtype], f"relative difference {difference:.2e}"


def assert_same_states(found: gecko.GeckoState, expected: gecko.GeckoState, tolerance: float) -> None:
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(
            found.tensors()[name].double(), tensor.double(), rtol=tolerance, atol=tolerance, msg=name
        )


def read(model: gecko.Gecko, text: Tensor, cuts=(), ids: Tensor | None = None, state: gecko.GeckoState | None = None):
    """Return the logits and the state of a text that is read in several calls."""
    logits = []
    for part, part_ids in zip(
        text.tensor_split(list(cuts), dim=1), [None] * 999 if ids is None else ids.tensor_split(list(cuts), dim=1),
        strict=False,
    ):  # fmt: skip
        out, state = model(part, part_ids, state)
        logits.append(out)
    return torch.cat(logits, dim=1), state


def assert_same_state(actual: gecko.GeckoState, expected: gecko.GeckoState) -> None:
    for (name, got), wanted in zip(actual.tensors().items(), expected.tensors().values(), strict=True):
        if wanted.is_floating_point():
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert torch.equal(got, wanted), name


def documents(batch: int, length: int, seed: int) -> Tensor:
    """Return segment ids with random document starts. Per row, the rate of starts is 0, 0.1 or 0.4 per token."""
    generator = torch.Generator().manual_seed(seed)
    rate = torch.tensor([0.0, 0.1, 0.4])[torch.randint(3, (batch, 1), generator=generator)]
    return (torch.rand(batch, length, generator=generator) < rate).long().cumsum(1)
