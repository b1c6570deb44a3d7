"""Fixtures of the tests on a real GPU: ``pytest tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    """Fill unwritten memory with NaN, on the device too. Only warn about nondeterminism: cuBLAS would refuse."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")  # the environment may have enabled TF32
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")
