"""A run small enough to train often: text of a few thousand bytes, a Gecko with two layers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import BYTE_MODEL, write_corpus
from support.whole_runs import plain_report

from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    Run,
    SampleSettings,
    TrainResult,
    train,
)


@pytest.fixture(autouse=True)
def _plain_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("gecko.train.finish.write_report", plain_report)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def small(corpus: Path, output: Path) -> Run:
    return Run(
        model=BYTE_MODEL,
        output=str(output),
        data=DataSettings(source=str(corpus), validation_fraction=0.2),
        batch_size=2,
        sequence_length=24,
        steps=12,
        optimizer=OptimizerSettings(learning_rate=1e-2),
        evaluation=EvaluationSettings(every=5, rows=4, final_rows=8),
        checkpoint=CheckpointSettings(every=4, keep=2),
        sample=SampleSettings(prompt="red ", tokens=8),
        threads=1,
    )


def growing(run: Run) -> Run:
    """Return the run with batches of 1, 2 and 4 rows, of 6, 12 and 24 tokens."""
    growth = {"initial_batch_size": 1, "batch_size_steps": 4, "initial_sequence_length": 6, "sequence_length_steps": 6}
    return replace(run, batch_size=4, schedule=replace(run.schedule, **growth))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """Return the result of the small run, trained once and undisturbed; tests must not change its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gecko.train.finish.write_report", plain_report)
        return train(small(corpus, tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture
def small_run(corpus: Path, tmp_path: Path) -> Run:
    """Return a run of twelve steps, which takes about a quarter of a second."""
    return small(corpus, tmp_path / "run")


@pytest.fixture
def finished(small_run: Run, whole: TrainResult) -> Run:
    """Return the small run with a copy of the files that it leaves at its end."""
    shutil.copytree(whole.run.folder, small_run.folder)
    return small_run


@pytest.fixture
def run_in(small_run: Run, tmp_path: Path) -> Callable[[str], Run]:
    """Return a function that makes the small run in a folder of the given name."""
    return lambda name: replace(small_run, output=str(tmp_path / name))
