"""A run small enough to train often: text of a few thousand bytes, a Gecko with two layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import BYTE_MODEL, write_corpus
from support.whole_runs import plain_report

from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings


@pytest.fixture(autouse=True)
def _plain_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("gecko.train.finish.write_report", plain_report)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def small_run(corpus: Path, tmp_path: Path) -> Run:
    """Return a run of twelve steps, which takes about a quarter of a second."""
    return Run(
        model=BYTE_MODEL,
        output=str(tmp_path / "run"),
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


@pytest.fixture
def run_in(small_run: Run, tmp_path: Path) -> Callable[[str], Run]:
    """Return a function that makes the small run in a folder of the given name."""
    return lambda name: replace(small_run, output=str(tmp_path / name))
