"""Supervision of a run: non-finite values, signals, ranks that hang, and a launcher that was killed."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gecko.parallel.mesh import ALONE, Ranks
from gecko.parallel.sharding import local
from gecko.runtime.private import recorded_collectives
from gecko.train.optimizer import named_parameters


class NonFiniteError(RuntimeError):
    """Raised after too many skipped steps in a row, and in place of a checkpoint that is not finite."""


def find_nonfinite(model: nn.Module, compute: Callable[[], Tensor], ranks: Ranks = ALONE) -> str:
    """Run ``compute`` (loss and gradients of the batch) again and name the first value that is not finite.

    The order is: parameters, outputs of modules (innermost first, in order of the forward pass), the loss, gradients of
    parameters (in order of the backward pass). Gradients are cleared. All ranks get the same answer.
    """
    cause = first_nonfinite({f"the parameter {name}": x for name, x in model.named_parameters()}, ranks)
    return cause or _first(ranks, _find_in_step(model, compute)) or (
        "the gradient's norm overflowed, or the step's numbers do not repeat"
    )  # fmt: skip


def first_nonfinite(tensors: Mapping[str, Tensor], ranks: Ranks) -> str | None:
    """Return the name of the first tensor that is not finite, in a sentence that is the same on all ranks, or None."""
    names = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    return _first(ranks, f"{names[0]} is not finite" if names else None)


def _find_in_step(model: nn.Module, compute: Callable[[], Tensor]) -> str | None:
    """Return a description of the first non-finite value on this rank, or None."""
    outputs, gradients, handles = list[str](), list[str](), list[Any]()

    def check_output(label: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # A streaming state may hold -inf on purpose (an empty memory's log weight): only the first tensor counts.
        if not _is_finite(_first_tensor(output)):
            outputs.append(label)

    def check_gradient(label: str, parameter: Tensor) -> None:
        if not _is_finite(parameter.grad):
            gradients.append(label)

    for name, module in model.named_modules():
        label = f"the output of {name or 'the model'} ({type(module).__name__.removeprefix('FSDP')}) is not finite"
        handles.append(module.register_forward_hook(partial(check_output, label)))
    for name, parameter in named_parameters(model):
        hooked: Any = parameter  # the method has no annotations
        label = f"the gradient of {name} is not finite"
        handles.append(hooked.register_post_accumulate_grad_hook(partial(check_gradient, label)))
    model.zero_grad(set_to_none=True)
    try:
        loss = compute()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    if not outputs and not math.isfinite(float(loss)):
        return "the loss is not finite, though every module's output is"
    return next(iter([*outputs, *gradients]), None)


def _first(ranks: Ranks, cause: str | None) -> str | None:
    """Return the cause that the first rank found; an output comes first, because a NaN spreads from there."""
    causes = [(rank, found) for rank, found in enumerate(ranks.gather(cause)) if found is not None]
    if not causes or ranks.world == 1:
        return cause
    rank, found = min(causes, key=lambda pair: not pair[1].startswith("the output"))
    return f"{found}, on rank {rank}"


def _first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of an output: a tensor, or tuples, lists and dictionaries of outputs."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((one for one in map(_first_tensor, parts) if one is not None), None)


def _is_finite(tensor: Tensor | None) -> bool:
    """Return whether all values are finite; of a sharded tensor, those of this rank's part."""
    return tensor is None or bool(torch.isfinite(local(tensor)).all())


def write_notice(signal: str, text: str) -> None:
    """Write what a signal does to stderr: not by the console, because the main thread may hold its lock, nor by
    ``sys.stderr``, which may have been replaced by an object that takes one."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{signal}: {text}\n".encode())


NOTICES = {
    "measuring": (
        "the measurement in progress is finished, then the run is saved; a second Ctrl-C stops at once",
        "stopping now: nothing was trained",
    ),
    "training": (
        "the step in progress is finished, then saved; a second Ctrl-C stops at once and loses the steps since the "
        "last checkpoint",
        "stopping now: the steps since the last checkpoint are lost",
    ),
    "finishing": (
        "all steps are saved; the final loss, sample and report are finished; a second Ctrl-C stops at once",
        "stopping now: all steps are saved, and --resume writes the final loss, sample and report",
    ),
}
"""What the first signal and a second Ctrl-C do, by phase of a run."""
_STOPS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context in which SIGINT and SIGTERM set ``requested``. A second Ctrl-C raises KeyboardInterrupt.

    A thread calls ``notice(name, again)`` as soon as a signal arrives; ``again`` is true for a second Ctrl-C. Python
    runs signal handlers only between two bytecode instructions, and one call into a kernel may take a minute.
    """

    def __init__(self, notice: Callable[[str, bool], None] | None = None) -> None:
        self.requested: str | None = None
        self._notice, self._interrupts, self._stack = notice, 0, ExitStack()

    def __enter__(self) -> StopSignal:
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                self._stack.callback(signal.signal, number, signal.signal(number, self._request))
            if self._notice is not None:
                self._stack.enter_context(_arrivals(self._arrived))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._interrupts > 1:
                # Two signals arrived during one long call; Python calls the handler once for both.
                raise KeyboardInterrupt

    def _arrived(self, number: int) -> None:
        if number in _STOPS and self._notice is not None:
            self._interrupts += number == signal.SIGINT
            self._notice(signal.Signals(number).name, number == signal.SIGINT and self._interrupts > 1)


@contextmanager
def _arrivals(arrived: Callable[[int], None]) -> Iterator[None]:
    """Context in which a thread calls ``arrived`` with the number of each signal as soon as the system delivers it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        while number := os.read(read, 1):
            arrived(number[0])

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join()
        os.close(read)


STACKS = "stacks"
"""Folder in that of a run with the files of ``watchdog``."""
LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""Seconds between writing the stacks and the end. Once one rank ends, the others fail without a stack."""


@contextmanager
def watchdog(folder: Path, rank: int, minutes: float | None) -> Iterator[Callable[[], None]]:
    """Context that ends a process which makes no progress: which does not call what the context yields for ``minutes``.

    Then the stacks of all threads are written to ``folder/rank-N.txt``, and soon after the process ends by SIGALRM. So
    do ranks that wait for a hanging one. One timer is a C thread and the other one the kernel's, so neither needs the
    hanging interpreter. If that runs, a thread also writes the last collectives of the rank to ``folder/flight-N``.
    Without ``minutes`` there is no watch.
    """
    if minutes is None:
        yield lambda: None
        return
    seconds, end, last = minutes * 60, threading.Event(), [0.0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank:05d}.txt").open("a", encoding="utf-8") as file:

        def beat() -> None:
            last[0] = time.monotonic()
            faulthandler.dump_traceback_later(seconds, file=file)
            signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)

        def record() -> None:
            while not end.wait(LOOK_SECONDS):
                if time.monotonic() - last[0] > seconds:
                    (folder / f"flight-{rank}").write_bytes(recorded_collectives())
                    return

        beat()
        threading.Thread(target=record, name="flight recorder", daemon=True).start()
        try:
            yield beat
        finally:
            end.set()
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def launcher_watched() -> Iterator[None]:
    """Context that sends SIGTERM to a rank once the torchrun that started it is gone.

    The ranks then finish their step, save and end, as after a SIGTERM from the scheduler. Until then the first rank
    holds the lock of the run's folder, so a job that is restarted meanwhile is refused. A process gets another parent
    when its launcher dies. Launchers other than torchrun may start ranks in the background and end first.
    """
    parent, end = os.getppid(), threading.Event()

    def watch() -> None:
        while not end.wait(LOOK_SECONDS):
            if os.getppid() != parent:
                with contextlib.suppress(OSError):  # the reader of standard error may have been killed with torchrun
                    rank = os.environ.get("RANK", "0")
                    print(f"rank {rank}: torchrun, which started it, is gone; stopping", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    if "TORCHELASTIC_RUN_ID" in os.environ:  # which torchrun sets
        threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        end.set()
