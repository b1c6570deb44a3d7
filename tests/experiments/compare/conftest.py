"""Recipes small enough to train often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.corpora import BYTE_MODEL, write_corpus

from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    texts = tmp_path_factory.mktemp("texts")
    write_corpus(texts / "train", 12)
    write_corpus(texts / "rest", 4, first=12)
    return Run(
        model=replace(BYTE_MODEL, num_layers=1), output="unused", batch_size=2, sequence_length=24, steps=8,
        data=DataSettings(source=str(texts / "train"), validation=str(texts / "rest")),
        optimizer=OptimizerSettings(learning_rate=1e-2), threads=1,
        evaluation=EvaluationSettings(every=3, rows=4, final_rows=32),
        checkpoint=CheckpointSettings(every=8, keep=2), sample=SampleSettings(prompt="red ", tokens=1),
    )  # fmt: skip


@pytest.fixture(scope="session")
def recipes(base: Run, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return recipes with and without memory."""
    folder = tmp_path_factory.mktemp("recipes")
    base.save(folder / "whole.json")
    replace(base, model=replace(base.model, memory="none")).save(folder / "bare.json")
    return [str(folder / "whole.json"), str(folder / "bare.json")]
