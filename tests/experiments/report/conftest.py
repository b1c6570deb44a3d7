"""Files that a report is made from; see ``support.results``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.results import write_all


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_all(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="session")
def runs(inputs: list[Path]) -> Path:
    """Return a folder of MODEL/seed-N, each with results in its ``eval/``; tests must not change it."""
    return inputs[0].parent.parent


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Return a function that copies a run folder, without its evaluations, so that a test may change it."""

    def copy(recipe: str, seed: int) -> Path:
        without = shutil.ignore_patterns("eval")
        return Path(shutil.copytree(runs / recipe / f"seed-{seed}", tmp_path / recipe / f"seed-{seed}", ignore=without))

    return copy
