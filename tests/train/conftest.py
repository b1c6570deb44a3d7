"""A run small enough to train many times over: text of a few thousand bytes, a Gecko of two layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gecko.config import GeckoConfig
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings

SMALL = GeckoConfig(
    vocab_size=257, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(0)
    words = ["red", "green", "blue", "stone", "river", "runs", "falls", "slowly", "over", "under"]
    for number in range(20):
        text = " ".join(choose.choices(words, k=60))
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def small_run(corpus_folder: Path, tmp_path: Path) -> Run:
    """Twelve steps, about a quarter of a second."""
    return Run(
        model=SMALL,
        output=str(tmp_path / "run"),
        data=DataSettings(source=str(corpus_folder), validation_fraction=0.2),
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
    """The small run in a folder of the given name."""
    return lambda name: replace(small_run, output=str(tmp_path / name))
