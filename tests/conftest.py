"""Fixtures and settings of all tests: a deterministic search for examples, and unwritten memory filled with NaN."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

# Threads of OpenMP that wait would keep a processor busy, which other tests need. PyTorch reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

from gecko.runtime.process import keep_existing_objects

_modules = 0
"""Modules that were imported when existing objects were last kept."""

TOGETHER = (
    "tests/kernels/compiled/", "tests/kernels/interpreted/test_context.py",
    "tests/ops/test_cpu_library.py", "tests/ops/test_cpu_memory.py", "tests/parallel/", "tests/plan/test_dry_run.py",
    "tests/plan/test_search.py", "tests/cli/test_commands.py::test_a_command_answers[plan ",
)  # fmt: skip
"""Folders and files of tests that share what takes long to make, such as four processes or compiled kernels. Each runs
in one worker."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of ``--dist loadgroup``. That of pytest-xdist 3.8 finds no groups under pytest 9.2."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)

    return Together(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collections of garbage: there is none yet, and they take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup() -> None:
    """Keep thousands of tests and modules out of the collections of garbage, which would take longer than tests."""
    global _modules
    if len(sys.modules) > _modules + 50:
        keep_existing_objects()
        _modules = len(sys.modules)


settings.register_profile("gecko", deadline=None, derandomize=True)
settings.load_profile("gecko")

# Test tensors are so small that waking a second thread costs more than it saves, tenfold on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Fill the results of torch.empty and similar functions with NaN, so that reads before writes are noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def pictures() -> None:
    """Let runs draw the pictures of their reports, where the other tests of a folder have plain reports."""


@pytest.fixture
def eager_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators use no C kernels."""
    monkeypatch.setattr("gecko.ops.backends.dispatch._cpu_kernels_installed", lambda: False)
