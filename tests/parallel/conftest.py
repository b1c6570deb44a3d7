"""Four processes and a small run, for all tests of the engine with several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs

from gecko.config import GeckoConfig
from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Run,
    SampleSettings,
)

SMALL = GeckoConfig(
    vocab_size=257, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    jobs = Jobs(4)
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(0)
    words = ["red", "green", "blue", "stone", "river", "runs", "falls", "slowly", "over", "under"]
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text(" ".join(choose.choices(words, k=60)), encoding="utf-8")
    return folder


@pytest.fixture
def run_in(corpus: Path, tmp_path: Path) -> Callable[..., Run]:
    """The small run, 20 steps, in a folder of the given name, with changes; those of ``parallel`` by name."""

    def make(name: str, *, replicate: int = 1, shard: int | None = None, context: int = 1, **changes: Any) -> Run:
        run = Run(
            model=SMALL,
            output=str(tmp_path / name),
            data=DataSettings(source=str(corpus), validation_fraction=0.2),
            batch_size=8,
            sequence_length=32,
            steps=20,
            optimizer=OptimizerSettings(learning_rate=1e-2),
            evaluation=EvaluationSettings(every=10, rows=3, final_rows=5),
            checkpoint=CheckpointSettings(every=4, keep=2),
            sample=SampleSettings(prompt="red ", tokens=3),
            parallel=ParallelSettings(replicate, shard, context),
            threads=1,
        )
        return replace(run, **changes)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with several ranks run in one worker of pytest-xdist: more processes than cores only wait."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("ranks"))
