"""Benchmarks are scripts: put their folder on the path, as it is when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tables in an empty folder."""
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    return tmp_path
