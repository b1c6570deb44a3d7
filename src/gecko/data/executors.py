"""Where the tasks of a tokenizing plan run: on this machine, or on a cluster by datatrove's executors."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.data.shards import ShardRecord
from gecko.data.tokenizing import TokenizingPlan, read_record, run_task
from gecko.extras import require

MOST_THREADS = 8
"""Up to here, one process whose tokenizer works outside Python's lock keeps all cores busy, and starts at once."""
RUN_FOLDER = "executor"
"""Where datatrove keeps its logs, inside the folder of the shards."""


def run_here(plan: TokenizingPlan, workers: int) -> Iterator[ShardRecord]:
    """Write the shards that are not there yet, ``workers`` at a time; each is given out once it is whole.

    Raises:
        ValueError, OSError: as ``run_task``; shards that were begun are finished first.
    """
    waiting = [number for number, task in enumerate(plan.tasks) if read_record(plan, task) is None]
    # The largest first: the last to end should be a small one.
    waiting.sort(key=lambda number: -plan.tasks[number].size)
    with _pool(max(1, min(workers, len(waiting)))) as pool:
        futures = [pool.submit(run_task, plan.folder, number) for number in waiting]
        try:
            for future in as_completed(futures):
                yield _result(future)
        finally:
            for future in futures:
                future.cancel()


def _pool(workers: int) -> Executor:
    if workers <= MOST_THREADS:
        return ThreadPoolExecutor(workers)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(workers, context, initializer=_one_thread)


def _one_thread() -> None:
    """Processes share the cores already; the tokenizers library reads this when it first works in parallel."""
    os.environ["RAYON_NUM_THREADS"] = "1"


def _result(future: Future[ShardRecord]) -> ShardRecord:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise OSError(
            None, "a process that wrote a shard was killed, perhaps for want of memory. Run the command again with "
            "fewer --workers; shards that are whole stay."
        ) from error  # fmt: skip


@dataclass(frozen=True)
class TokenizingStep:
    """The plan in ``folder`` as one step of a datatrove pipeline: rank r of any number writes tasks r, r + n, …

    Whoever writes the last shard writes the manifest.
    """

    folder: Path

    def __call__(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        plan = TokenizingPlan.load(self.folder)
        for number in range(rank, len(plan.tasks), world_size):
            run_task(self.folder, number)
        plan.finish()
        return iter(())


def run_on_slurm(plan: TokenizingPlan, workers: int, *, partition: str, hours: int) -> str:
    """Submit the plan as an array of Slurm jobs of one core each, ``workers`` at a time; the job's number.

    Raises:
        ValueError: this machine cannot submit jobs.
    """
    if shutil.which("sbatch") is None:
        raise ValueError("Slurm jobs are submitted where the command sbatch is, on a login node; there is none here.")
    executor = require("datatrove.executor", "cluster").SlurmPipelineExecutor(
        [TokenizingStep(plan.folder.resolve())], tasks=len(plan.tasks), workers=workers, partition=partition,
        time=f"{hours}:00:00", job_name="gecko-tokenize", qos="", **_common(plan),
        # Jobs find datatrove's launcher where this Python has its commands.
        env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
    )  # fmt: skip
    executor.run()
    return str(executor.job_id)


def run_on_ray(plan: TokenizingPlan, workers: int) -> None:
    """Run the plan on the Ray cluster that this machine belongs to, ``workers`` tasks at a time, to its end."""
    require("ray", "ray")
    executor = require("datatrove.executor", "ray").RayPipelineExecutor(
        [TokenizingStep(plan.folder.resolve())], tasks=len(plan.tasks), workers=workers, **_common(plan)
    )
    executor.run()


def _common(plan: TokenizingPlan) -> dict[str, Any]:
    # Whether a task is done is for its shard to say: datatrove would not notice that one was deleted.
    return {"logging_dir": str(plan.folder.resolve() / RUN_FOLDER), "skip_completed": False}
