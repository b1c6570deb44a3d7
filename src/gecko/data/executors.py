"""Where the tasks of a tokenizing plan run: on this machine, or on a cluster by datatrove's executors."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.data.shards import ShardRecord
from gecko.data.tokenizers import Tokenizer
from gecko.data.tokenizing import TokenizingPlan, read_record, run_task, write_shard
from gecko.extras import require

MOST_THREADS = 8
"""Up to here, one process whose tokenizer works outside Python's lock keeps all cores busy, and starts at once."""
RUN_FOLDER = "executor"
"""Where datatrove keeps its logs, inside the folder of the shards."""
SLURM_JOB = "slurm_job"
"""In there: the number of the Slurm job that was submitted last."""


def run_here(plan: TokenizingPlan, tokenizer: Tokenizer, workers: int) -> Iterator[ShardRecord]:
    """Write the shards that are not there yet with the plan's tokenizer; each is given out once it is whole.

    At most ``workers`` are encoded at a time; while threads do it, as many others are written meanwhile.

    Raises:
        ValueError, OSError: as ``run_task``; shards that were begun are finished first.
    """
    waiting = [number for number, task in enumerate(plan.tasks) if read_record(plan, task) is None]
    # The largest first: the last to end should be a small one.
    waiting.sort(key=lambda number: -plan.tasks[number].size)
    with _writing(plan, tokenizer, max(1, min(workers, len(waiting)))) as submit:
        futures = [submit(number) for number in waiting]
        try:
            for future in as_completed(futures):
                yield _result(future)
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _writing(
    plan: TokenizingPlan, tokenizer: Tokenizer, workers: int
) -> Iterator[Callable[[int], Future[ShardRecord]]]:
    """What begins to write a task's shard; the block ends once all that were begun have ended."""
    if workers > MOST_THREADS:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
            yield lambda number: pool.submit(run_task, plan.folder, number)
        return
    # A shard ends with several waits for the disk: another one is encoded meanwhile.
    with ThreadPoolExecutor(workers) as encoders, ThreadPoolExecutor(2 * workers) as writers:
        yield lambda number: writers.submit(write_shard, plan, plan.tasks[number], tokenizer, encoders)


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
    job = str(executor.job_id)
    # Of several arrays, for more tasks than one may have, this is the last, which begins when the others have ended.
    (plan.folder / RUN_FOLDER / SLURM_JOB).write_text(job, encoding="utf-8")
    return job


def unfinished_slurm_job(plan: TokenizingPlan) -> str | None:
    """The job that ``run_on_slurm`` submitted last, if Slurm still has it; None too where Slurm cannot be asked."""
    record = plan.folder / RUN_FOLDER / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return None
    job = record.read_text(encoding="utf-8")
    queue = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    # A job that Slurm has forgotten is an error, and no output.
    return job if queue.stdout.strip() else None


def run_on_ray(plan: TokenizingPlan, workers: int) -> None:
    """Run the plan on the Ray cluster that this machine belongs to, ``workers`` tasks at a time, to its end.

    Raises:
        OSError: a shard could not be written; the others are.
    """
    require("ray", "ray")
    executor = require("datatrove.executor", "ray").RayPipelineExecutor(
        [TokenizingStep(plan.folder.resolve())], tasks=len(plan.tasks), workers=workers, **_common(plan)
    )
    executor.run()
    # The executor tries a failed task again, then only says that it failed.
    if missing := len(plan.tasks) - len(plan.done()):
        raise OSError(
            None, f"{missing} of {len(plan.tasks)} shards could not be written; {plan.folder / RUN_FOLDER / 'logs'} "
            "says why. Mend that and run the command again: shards that are whole stay."
        )  # fmt: skip


def _common(plan: TokenizingPlan) -> dict[str, Any]:
    # Whether a task is done is for its shard to say: datatrove would not notice that one was deleted.
    return {"logging_dir": str(plan.folder.resolve() / RUN_FOLDER), "skip_completed": False}
