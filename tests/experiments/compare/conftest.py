"""Recipes small enough to train often, in the process of the tests."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.corpora import BYTE_MODEL, write_corpus

from gecko.experiments.compare import ComparisonPlan, Outcome, compare
from gecko.experiments.compare.runs import DIVERGED
from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    NonFiniteError,
    OptimizerSettings,
    Run,
    SampleSettings,
    train,
)

SMALL = replace(BYTE_MODEL, num_layers=1)
STEPS = 8


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder / "train", 12)
    write_corpus(folder / "rest", 4, first=12)
    return folder


@pytest.fixture
def base(texts: Path) -> Run:
    return Run(
        model=SMALL,
        output="unused",
        data=DataSettings(source=str(texts / "train"), validation=str(texts / "rest")),
        batch_size=2,
        sequence_length=24,
        steps=STEPS,
        optimizer=OptimizerSettings(learning_rate=1e-2),
        evaluation=EvaluationSettings(every=3, rows=4, final_rows=32),
        checkpoint=CheckpointSettings(every=3, keep=2),
        sample=SampleSettings(prompt="red ", tokens=1),
        threads=1,
    )


@pytest.fixture
def recipes(base: Run, tmp_path: Path) -> list[str]:
    """Return recipes with and without memory."""
    base.save(tmp_path / "whole.json")
    replace(base, model=replace(SMALL, memory="none")).save(tmp_path / "bare.json")
    return [str(tmp_path / "whole.json"), str(tmp_path / "bare.json")]


class TrainsHere:
    """Replaces ``subprocess.Popen``: does a worker's job in its constructor."""

    started: list[str]
    """Folders of the runs in the order of their start, in one list for all instances."""
    after: Callable[[], None]
    """Called when a run has ended."""

    def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
        path, self.stdin = Path(command[-1]), io.BytesIO()
        self.started.append(f"{path.parent.parent.name}/{path.parent.name}")
        try:
            train(Run.load(path), resume=True)
            self.returncode = 0
        except NonFiniteError:
            self.returncode = DIVERGED
        except Exception:
            stdout.write(traceback.format_exc().encode())
            self.returncode = 1
        type(self).after()

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode

    def terminate(self) -> None: ...

    kill = terminate


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[TrainsHere]:
    """Train runs in this process, without their reports."""

    class Here(TrainsHere):
        after = staticmethod(lambda: None)

    Here.started = []
    monkeypatch.setattr("gecko.experiments.compare.runs.Popen", Here)
    monkeypatch.setattr("gecko.train.finish.write_report", lambda *_: None)
    monkeypatch.setattr("gecko.experiments.compare._POLL_SECONDS", 0)
    return Here


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, str]]:
    """Return a function that runs ``compare`` on a plan and returns its output. The page is slow, so it is optional."""

    def run(plan: ComparisonPlan, jobs: int = 1, *, page: bool = False) -> tuple[Outcome, str]:
        console = Console(file=io.StringIO(), width=200, highlight=False, markup=False)
        with monkeypatch.context() as patch:
            if not page:
                patch.setattr("gecko.experiments.compare.write_page", lambda *_: None)
            outcome = compare(plan, jobs=jobs, command="gecko compare …", console=console)
        return outcome, console.file.getvalue()  # type: ignore[attr-defined]

    return run
