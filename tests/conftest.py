"""What all tests share: a fixed search for examples, and memory that is poisoned before it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("gecko", deadline=None, derandomize=True)
settings.load_profile("gecko")

# Test tensors are so small that waking a second thread costs more than it does, tenfold on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Fills what torch.empty and its kin return with NaN, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def eager_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators take no kernels in C."""
    monkeypatch.setattr("gecko.ops.backends.dispatch._cpu_kernels_installed", lambda: False)
