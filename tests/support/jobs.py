"""Worker processes that stay alive and replace torchrun: the first n of them are the ranks of a job."""

import contextlib
import faulthandler
import functools
import io
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from gecko.runtime.process import keep_existing_objects

Exact = Callable[[Any], dict[str, Any]]
"""Function from a run to its steps on one rank; see ``tests/parallel/conftest.py``."""
LIMIT = 300.0
"""Seconds within which a rank must answer."""
TIMEOUT = timedelta(seconds=30)
"""Timeout of connected ranks: one that waits longer fails. Groups that they make do not inherit it."""


@dataclass(frozen=True)
class Answer:
    """Result of a rank's part of a job."""

    value: Any
    error: str | None
    """Type and message of the exception."""
    trace: str
    """Traceback of the exception."""
    output: str
    """Printed output."""


class Worker:
    """One worker process."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # Workers are forked from a process that has imported what nearly all need, which takes longer than most jobs.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gecko.train.session"])
        self._end, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(other,), daemon=True)
        before = os.environ.get("OMP_NUM_THREADS", "")
        os.environ["OMP_NUM_THREADS"] = "1"
        self._process.start()
        os.environ["OMP_NUM_THREADS"] = before or "1"
        other.close()  # so that the wait for an answer ends if the process dies

    def send(self, task: Any) -> None:
        self._end.send(task)

    def answer(self, rank: int, deadline: float) -> Answer:
        """Return the process's answer, or an error if it dies or exceeds the deadline; then start a new process."""
        try:
            if self._end.poll(max(0.0, deadline - time.monotonic())):
                return self._end.recv()
            error = f"rank {rank} did not answer within {LIMIT:g} seconds; its stack is in the captured stderr"
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            time.sleep(1)
        except EOFError:
            self._process.join()
            error = f"rank {rank} ended with exit code {self._process.exitcode}"
        self._process.kill()
        self._start()
        return Answer(None, error, error, "")

    def close(self) -> None:
        self._end.send(None)
        self._process.join(10)
        self._process.kill()


class Jobs:
    def __init__(self, size: int) -> None:
        self._workers = [Worker() for _ in range(size)]

    def answers(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Answer]:
        """Run ``function(*arguments)`` on each of ``ranks`` ranks; the function must be importable by name."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        workers, deadline = self._workers[:ranks], time.monotonic() + LIMIT
        for rank, worker in enumerate(workers):
            worker.send((rank, ranks, port, function, arguments))
        return [worker.answer(rank, deadline) for rank, worker in enumerate(workers)]

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the values of all ranks; raise RuntimeError if a rank failed."""
        answers = self.answers(ranks, function, *arguments)
        failed = [answer.trace for answer in answers if answer.error is not None]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [answer.value for answer in answers]

    @contextlib.contextmanager
    def connected(self, ranks: int) -> Iterator[Callable[..., list[Any]]]:
        """Context with a function like ``run``, whose ranks stay connected from call to call."""
        self.run(ranks, _connect)
        try:
            yield functools.partial(self.run, ranks)
        finally:
            self.run(ranks, dist.destroy_process_group)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _connect() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)


def _work(end: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    while (task := end.recv()) is not None:
        rank, ranks, port, function, arguments = task
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        output = io.StringIO()
        keep_existing_objects()
        try:
            with contextlib.redirect_stdout(output):
                value = function(*arguments)
            answer = Answer(value, None, "", output.getvalue())
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
            answer = Answer(None, message, f"rank {rank}: {traceback.format_exc()}", output.getvalue())
        end.send(answer)
