"""Four processes and a small run, for all tests with several ranks."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import training_jobs as work
from support.corpora import write_corpus
from support.jobs import Exact, Jobs
from train.conftest import small

from gecko.train import EvaluationSettings, ParallelSettings, Run, SampleSettings


class Kept:
    """A run whose folder can be restored after changes to it."""

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, run.folder.parent
        self._copy = self._folder.with_name(f"{self._folder.name}-kept")
        shutil.copytree(self._folder, self._copy)

    def restored(self) -> Run:
        """Restore the folder that contains the run's folder, and return the run."""
        shutil.rmtree(self._folder)
        shutil.copytree(self._copy, self._folder)
        return self._run


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    jobs = Jobs(4)
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def on_four_ranks(jobs: Jobs) -> Iterator[Callable[..., list[Any]]]:
    """Return a function that runs a function on four ranks, which stay connected from call to call."""
    with jobs.connected(4) as run:
        yield run


@pytest.fixture(scope="session")
def exact(jobs: Jobs) -> Exact:
    """Return a function that gives three steps of a run on one rank, which are computed once for a model."""
    found: dict[Any, dict[str, Any]] = {}

    def steps(run: Run) -> dict[str, Any]:
        key = run.model, run.optimizer
        if key not in found:
            ((found[key],),) = jobs.run(1, work.exact_steps, [run], 3)
        return found[key]

    return steps


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def run_at(corpus: Path) -> Callable[..., Run]:
    """Return a function that makes the small run of 20 steps, in the given folder, with changes."""

    def make(folder: Path, *, replicate: int = 1, shard: int | None = None, context: int = 1, **changes: Any) -> Run:
        run = replace(
            small(corpus, folder), batch_size=8, sequence_length=32, steps=20,
            evaluation=EvaluationSettings(every=10, rows=3, final_rows=5), sample=SampleSettings("red ", tokens=3),
            parallel=ParallelSettings(replicate, shard, context),
            hang_minutes=2,  # deadlocked ranks end before the job does, with their stacks
        )  # fmt: skip
        return replace(run, **changes)

    return make


@pytest.fixture
def run_in(run_at: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes the small run in a folder of the given name, with changes."""
    return lambda name, **changes: run_at(tmp_path / name, **changes)


@pytest.fixture(scope="session")
def trained_once(jobs: Jobs, run_at: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Kept:
    run = run_at(tmp_path_factory.mktemp("trained") / "run", steps=8)
    jobs.run(2, work.train_run, run)
    return Kept(run)


@pytest.fixture
def trained(trained_once: Kept) -> Run:
    """Return a run of eight steps on two ranks, with the files that it left, whatever other tests did to them."""
    return trained_once.restored()
