"""Kernel tests need three sessions. The common one compiles kernels. Two others run them: under Triton's interpreter,
which Triton enables only when it is imported, and under a simulator, which is a pytest plugin.

TRITON_INTERPRET=1 pytest tests/kernels/interpreted
PYTHONPATH=tests pytest -p kernels.simulated tests/kernels/interpreted
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    runs = os.environ.get("TRITON_INTERPRET") == "1" or config.pluginmanager.hasplugin("kernels.simulated")
    return True if collection_path == HERE / ("compiled" if runs else "interpreted") else None


class WithoutTriton(pytest.Module):
    """A test module that cannot be imported because Triton is missing."""

    def collect(self):
        pytest.skip("Triton is not installed, and the kernels are written in it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("triton") is None:
        return WithoutTriton.from_parent(parent, path=module_path)
    return None
