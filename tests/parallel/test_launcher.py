"""Processes of a job: how they start, meet and end."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.whole_runs import steps_in

from gecko.parallel.mesh import fresh_rendezvous

# ---- Processes whose parent was killed end.

PATIENCE = 120.0
STEPS = 100_000


def until(true: Callable[[], bool], what: str, log: Path | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what if log is None else f"{what}; their log:\n{log.read_text()}"
        time.sleep(0.1)


def alive(process: int) -> bool:
    """Return whether the process runs. A zombie, which a container may never reap, does not count."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are found in /proc")


@needs_proc
def test_ranks_save_and_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    """Otherwise they would train to the end, unnoticed."""
    text, out = tmp_path / "texts", tmp_path / "run"
    text.mkdir()
    for number in range(9):
        (text / f"{number}.txt").write_text(f"text {number} " * 200)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gecko", "train",
        "tiny", f"data.source={text}", f"steps={STEPS}", "device=cpu", "batch_size=2", "sequence_length=32", "--out",
        str(out),
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ranks: list[int] = []
    try:
        until(lambda: len(steps_in(out)) > 2, "the ranks must train", tmp_path / "log")
        ranks = children(launcher.pid)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        until(lambda: not any(map(alive, ranks)), "the ranks must end", tmp_path / "log")
    finally:
        launcher.kill()
        for rank in filter(alive, ranks):
            os.kill(rank, signal.SIGKILL)
    last = steps_in(out)[-1]["step"]
    assert last < STEPS and (out / "checkpoints" / f"step-{last:08d}").is_dir()
    said = (tmp_path / "log").read_text()
    assert "torchrun, which started it, is gone" in said and "saved after step" in said


POOL = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from gecko.data import tokenize
if __name__ == "__main__":
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver"), initializer=tokenize.SETUP) as pool:
        print(*{pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
        sys.stdin.read()
"""


@needs_proc
def test_tokenizing_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL.replace("SETUP", "_set_up_worker"))
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        workers = [int(number) for number in one.stdout.readline().split()]
        one.kill()
    try:
        assert workers
        until(lambda: not any(map(alive, workers)), "the workers must end")
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


# ---- Ranks of one job find each other, whatever an earlier job left in the store.

LIMIT = timedelta(seconds=20)


def start(store: dist.Store, world: int, seed: int) -> list[str]:
    """Start all ranks with random delays; return the address that each one reads in the store they agreed on."""
    choose = random.Random(seed)
    delays = [choose.uniform(0, 0.1) for _ in range(world)]
    found: list[str] = [""] * world

    def rank_of(rank: int) -> None:
        time.sleep(delays[rank])
        part = fresh_rendezvous(store, rank, world, LIMIT)
        assert not part.check(["address"]) or rank != 0
        if rank == 0:
            part.set("address", f"start {seed}")
        found[rank] = part.get("address").decode()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world", [2, 8])
def test_every_start_in_one_store_is_by_itself(world: int) -> None:
    store = dist.HashStore()
    for seed in range(6):
        assert start(store, world, seed) == [f"start {seed}"] * world


def test_a_rank_that_waits_for_others_gives_up() -> None:
    """Of a first start, and of one after an earlier start."""
    used, new = dist.HashStore(), dist.HashStore()
    start(used, 2, 0)
    new.set_timeout(timedelta(seconds=1))
    for store, rank in ((used, 1), (new, 0), (new, 1)):
        with pytest.raises(RuntimeError, match="all ranks of the job must start"):
            fresh_rendezvous(store, rank, 2, timedelta(seconds=0.2))
