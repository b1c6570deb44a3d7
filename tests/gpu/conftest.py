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


@pytest.fixture(autouse=True)
def _synchronised(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for the kernels of a test, so that it fails and not the next one. After an error that CUDA does not recover
    from, end the session or, with pytest-xdist, this worker: every later test would fail too."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        request.session.shouldstop = f"CUDA no longer works in this process: {error}"
        raise


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")
