"""Kernels are compiled in the common session, and interpreted in one of their own: Triton decides at its import.

TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = ["compiled"] if INTERPRETS else ["interpreted"]


class WithoutTriton(pytest.Module):
    """A module of tests that cannot be imported."""

    def collect(self):
        pytest.skip("Triton is not installed, and the kernels are written in it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if importlib.util.find_spec("triton") is None:
        return WithoutTriton.from_parent(parent, path=module_path)
    return None
