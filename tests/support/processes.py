"""Worker processes that are reused for many cases, because starting them takes longer than most tests."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=30)
"""Timeout of a group: a rank that waits longer fails. New groups do not inherit the timeout of the world group."""


class Processes:
    """``size`` processes of one gloo world; ``run`` calls a function on all of them."""

    def __init__(self, size: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._ends, self._processes = [], []
        before, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        for rank in range(size):
            end, other = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, str(folder / "store"), other), daemon=True)
            process.start()
            other.close()  # so that the wait for an answer ends if the process dies
            self._ends.append(end)
            self._processes.append(process)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return ``function(*arguments)`` of every rank; raise if a rank fails. It must be importable by name."""
        for end in self._ends:
            end.send((function, arguments))
        answers = [end.recv() for end in self._ends]
        errors = [text for failed, text in answers if failed]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _work(rank: int, size: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=TIMEOUT)
    while (task := end.recv()) is not None:
        function, arguments = task
        try:
            end.send((False, function(*arguments)))
        except BaseException:
            end.send((True, f"rank {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()
