"""``gecko train`` passes its arguments on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that the trainer, which is replaced, is called with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("gecko.train.train", lambda run, resume, **_: seen.update(run=run, resume=resume))
    return seen


def test_show_prints_the_settings_and_leaves_no_trace(
    command: Callable[..., Any], trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", "tiny", "steps=7", "sample.prompt=a b", "--out", "runs/x", "--resume", "--show")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "steps=7                            Optimizer steps. None: as many as fit into minutes, " in result.stdout
    assert any(line.startswith("sample.prompt='a b' ") for line in lines)
    assert any(line.startswith("output=runs/x ") for line in lines)
    assert not trained and not list(tmp_path.iterdir())


def test_recipe_overrides_and_options(command: Callable[..., Any], trained: dict[str, Any]) -> None:
    result = command("train", "tiny", "steps=7", "--out", "runs/x", "optimizer.learning_rate=1e-4", "--resume")
    assert result.exit_code == 0, result.stderr
    run = trained["run"]
    assert (run.steps, run.output, run.optimizer.learning_rate) == (7, "runs/x", 1e-4)
    assert trained["resume"] is True


def test_a_real_run_from_training_to_text(process: Callable[..., Any], tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 30
    (tmp_path / "books").mkdir()
    for name in "abcdefgh":
        (tmp_path / "books" / f"{name}.txt").write_text(text)
    result = process(
        "train", "tiny", "--out", tmp_path / "run", f"data.source={tmp_path / 'books'}", "data.validation_fraction=0.3",
        "steps=2", "batch_size=2", "sequence_length=64", "model.model_dim=32", "model.num_layers=1", "sample.tokens=5",
        "evaluation.rows=2", "evaluation.final_rows=2", "threads=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    written = process("generate", tmp_path / "run", "-p", "the ", "-n", 6, "--seed", 1)
    assert written.returncode == 0, written.stderr.decode()
    assert b"wrote" in written.stderr
    again = process("train", "tiny", "--out", tmp_path / "run", "steps=2")
    assert again.returncode == 2
    assert b"--resume" in again.stderr
