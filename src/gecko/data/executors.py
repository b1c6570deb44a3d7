"""Executors of a tokenizing plan: this machine, or a Slurm or Ray cluster with datatrove."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.data.shards import ShardRecord
from gecko.data.tokenize import TokenizingPlan, read_record, run_task, write_shard
from gecko.data.tokenizers import Tokenizer
from gecko.runtime.process import require

MOST_THREADS = 8
"""Largest number of workers that run as threads: the tokenizer releases the GIL, and threads start at once."""
RUN_FOLDER = "executor"
"""Folder of datatrove's logs, inside the folder of the shards."""
SLURM_JOB = "slurm_job"
"""File in ``RUN_FOLDER`` with the number of the Slurm job that was submitted last."""


def run_here(plan: TokenizingPlan, tokenizer: Tokenizer, workers: int) -> Iterator[ShardRecord]:
    """Write the missing shards with the plan's tokenizer, and yield the record of each when it is complete.

    At most ``workers`` shards are encoded at a time. With threads, the same number of others is written at that time.
    Errors are those of ``run_task``, after all started shards have ended.
    """
    waiting = [number for number, task in enumerate(plan.tasks) if read_record(plan, task) is None]
    # The largest shards first, so that no large shard is still running at the end.
    waiting.sort(key=lambda number: -plan.tasks[number].size)
    with _pool(plan, tokenizer, max(1, min(workers, len(waiting)))) as submit:
        futures = [submit(number) for number in waiting]
        try:
            for future in as_completed(futures):
                yield _result(future)
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _pool(plan: TokenizingPlan, tokenizer: Tokenizer, workers: int) -> Iterator[Callable[[int], Future[ShardRecord]]]:
    """Yield a function that submits a task; the block waits for all submitted tasks."""
    if workers > MOST_THREADS:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context, initializer=_set_up_worker) as pool:
            yield lambda number: pool.submit(run_task, plan.folder, number)
        return
    # Completing a shard waits for the disk several times. Meanwhile another shard is encoded.
    with ThreadPoolExecutor(workers) as encoders, ThreadPoolExecutor(2 * workers) as writers:
        yield lambda number: writers.submit(write_shard, plan, plan.tasks[number], tokenizer, encoders)


def _set_up_worker() -> None:
    """Use one thread, because the processes share the cores, and end with the parent process."""
    # The tokenizers library reads this variable when it first works in parallel.
    os.environ["RAYON_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends; otherwise the process waits forever, as it holds both ends of the pool's queue."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _result(future: Future[ShardRecord]) -> ShardRecord:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise OSError(
            None, "a process that wrote a shard was killed, perhaps for lack of memory. Run the command again with "
            "fewer --workers; complete shards stay."
        ) from error  # fmt: skip


@dataclass(frozen=True)
class TokenizingStep:
    """Step of a datatrove pipeline that runs the plan in ``folder``: rank r of n writes tasks r, r + n, …

    The rank that writes the last shard also writes the manifest.
    """

    folder: Path

    def __call__(self, data: Any, rank: int, world_size: int) -> Iterator[Any]:
        plan = TokenizingPlan.load(self.folder)
        for number in range(rank, len(plan.tasks), world_size):
            run_task(self.folder, number)
        plan.finish()
        return iter(())


def run_on_slurm(plan: TokenizingPlan, workers: int, *, partition: str, hours: int) -> str:
    """Submit the plan as an array of Slurm jobs of one core each, ``workers`` at a time; return the job's number. Raise
    ValueError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise ValueError("Slurm jobs need the command sbatch, which this machine does not have; try a login node.")
    executor = require("datatrove.executor", "cluster").SlurmPipelineExecutor(
        [TokenizingStep(plan.folder.resolve())], tasks=len(plan.tasks), workers=workers, partition=partition,
        time=f"{hours}:00:00", job_name="gecko-tokenize", qos="", **_common(plan),
        # datatrove's launcher is in the folder of this Python's commands.
        env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
    )  # fmt: skip
    executor.run()
    job = str(executor.job_id)
    # datatrove submits several arrays if there are more tasks than one may have. This is the last array, which starts
    # after the others.
    (plan.folder / RUN_FOLDER / SLURM_JOB).write_text(job, encoding="utf-8")
    return job


def unfinished_slurm_job(plan: TokenizingPlan) -> str | None:
    """Return the job that ``run_on_slurm`` submitted last if Slurm still has it; None also without Slurm."""
    record = plan.folder / RUN_FOLDER / SLURM_JOB
    if not record.is_file() or shutil.which("squeue") is None:
        return None
    job = record.read_text(encoding="utf-8", errors="replace")
    queue = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    # For a job that Slurm no longer knows, squeue fails without output.
    return job if queue.stdout.strip() else None


def run_on_ray(plan: TokenizingPlan, workers: int) -> None:
    """Run the plan on the Ray cluster of this machine, ``workers`` tasks at a time, and wait for its end. Raise OSError
    if some shards could not be written; the others are complete."""
    require("ray", "ray")
    executor = require("datatrove.executor", "ray").RayPipelineExecutor(
        [TokenizingStep(plan.folder.resolve())], tasks=len(plan.tasks), workers=workers, **_common(plan)
    )
    executor.run()
    # The executor retries a failed task, and then only logs the failure.
    if missing := len(plan.tasks) - len(plan.done()):
        raise OSError(
            None, f"{missing} of {len(plan.tasks)} shards could not be written; {plan.folder / RUN_FOLDER / 'logs'} "
            "has the reason. Correct it and run the command again: complete shards stay."
        )  # fmt: skip


def _common(plan: TokenizingPlan) -> dict[str, Any]:
    # The shards say which tasks are done: datatrove would not notice a deleted shard.
    return {"logging_dir": str(plan.folder.resolve() / RUN_FOLDER), "skip_completed": False}
