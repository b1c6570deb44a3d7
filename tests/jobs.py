"""Processes that stay up and take the place of what torchrun starts: any first n of them are the ranks of a job."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch


@dataclass(frozen=True)
class Answer:
    """What came of a rank's part of a job."""

    value: Any
    error: str | None
    """Type and message of what it raised, ..."""
    trace: str
    """... and where."""
    output: str
    """What it printed."""


class Jobs:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        before = os.environ.get("OMP_NUM_THREADS", "")
        os.environ["OMP_NUM_THREADS"] = "1"
        for _ in range(size):
            end, other = context.Pipe()
            process = context.Process(target=_work, args=(other,), daemon=True)
            process.start()
            self._ends.append(end)
            self._processes.append(process)
        os.environ["OMP_NUM_THREADS"] = before or "1"

    def answers(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Answer]:
        """``function(*arguments)``, importable by name, on every rank of a job of so many."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, end in enumerate(self._ends[:ranks]):
            end.send((rank, ranks, port, function, arguments))
        return [end.recv() for end in self._ends[:ranks]]

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The values of all ranks; RuntimeError where one failed."""
        answers = self.answers(ranks, function, *arguments)
        failed = [answer.trace for answer in answers if answer.error is not None]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [answer.value for answer in answers]

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.send(None)
            process.join(10)
            process.kill()


def _work(end: Connection) -> None:
    torch.set_num_threads(1)
    while (task := end.recv()) is not None:
        rank, ranks, port, function, arguments = task
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                value = function(*arguments)
            answer = Answer(value, None, "", output.getvalue())
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            answer = Answer(None, message, f"rank {rank}: {traceback.format_exc()}", output.getvalue())
        end.send(answer)
