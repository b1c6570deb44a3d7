"""``gecko compare`` passes its arguments on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that the comparison, which is replaced, is called with."""
    seen: dict[str, Any] = {"failed": False}

    def compare(plan: Any, *, jobs: int, command: str, console: Any) -> Any:
        seen.update(plan=plan, jobs=jobs)
        return SimpleNamespace(page=Path("x/comparison.html"), stopped=None, failed=seen["failed"])

    monkeypatch.setattr("gecko.experiments.compare.compare", compare)
    return seen


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe in a folder whose name looks like an override."""
    from gecko.recipes import get_recipe

    path = tmp_path / "rate=3" / "recipe.json"
    path.parent.mkdir()
    get_recipe("tiny").save(path)
    return path


def test_recipes_overrides_and_options(command: Callable[..., Any], compared: dict[str, Any], recipe: Path) -> None:
    result = command(
        "compare", "tiny", "steps=7", recipe, "data.tokenizer=bytes", "--out", "runs/x", "--seeds", "0,2", "--jobs", 3,
        "--learning-rates", "2e-3,4e-3", "--tuning-steps", 5,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    plan = compared["plan"]
    assert list(plan.recipes) == ["tiny", "rate=3"]
    assert [run.steps for run in plan.recipes.values()] == [7, 7]
    assert (plan.folder, plan.seeds, compared["jobs"]) == (Path("runs/x"), (0, 2), 3)
    assert (plan.tuning.learning_rates, plan.tuning.steps) == ((2e-3, 4e-3), 5)
    assert "x/comparison.html" in result.stdout


def test_a_failed_run_is_an_exit_code(command: Callable[..., Any], compared: dict[str, Any], recipe: Path) -> None:
    compared["failed"] = True
    assert command("compare", "tiny", recipe, "steps=7", "--out", "runs/x").exit_code == 1
    assert compared["plan"].tuning is None
