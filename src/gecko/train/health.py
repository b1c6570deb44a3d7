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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gecko.parallel.mesh import ALONE, Ranks
from gecko.runtime.private import recorded_collectives
from gecko.train.optimizer import named_parameters
from gecko.train.state import TrainerState


class NonFiniteError(RuntimeError):
    """Raised after too many skipped steps in a row."""


def skip_failure(position: TrainerState, limit: int, cause: str, advice: str) -> NoReturn:
    """Raise NonFiniteError for the last steps up to ``position``, all skipped, the last one for ``cause``."""
    first = position.step - position.consecutive_skips + 1
    raise NonFiniteError(
        f"steps {first} to {position.step} were all skipped for their loss or gradient, and max_skips={limit}; the "
        f"last: {cause}. Try a lower optimizer.learning_rate, a longer schedule.warmup or precision=float32, and "
        f"{advice}"
    )


def find_nonfinite(model: nn.Module, compute: Callable[[], Tensor], ranks: Ranks = ALONE) -> str:
    """Run ``compute`` (loss and gradients of the batch) again and name the first value that is not finite.

    The order is: parameters, outputs of modules (innermost first, in order of the forward pass), the loss, gradients of
    parameters (in order of the backward pass). Gradients are cleared. All ranks get the same answer.
    """
    names = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    cause = _first(ranks, f"the parameter {names[0]} is not finite" if names else None)
    return cause or _first(ranks, _find_in_step(model, compute)) or (
        "the gradient's norm overflowed, or the step's numbers do not repeat"
    )  # fmt: skip


def _find_in_step(model: nn.Module, compute: Callable[[], Tensor]) -> str | None:
    """Return a description of the first non-finite value on this rank, or None."""
    outputs, gradients = list[str](), list[str]()

    def check_output(label: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # A streaming state may hold -inf on purpose (an empty memory's log weight): only the first tensor counts.
        first = _first_tensor(output)
        if first is not None and not _is_finite(first):
            outputs.append(label)

    def check_gradient(label: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not _is_finite(parameter.grad):
            gradients.append(label)

    handles = list[Any]()
    for name, module in model.named_modules():
        label = f"the output of {name or 'the model'} ({type(module).__name__.removeprefix('FSDP')}) is not finite"
        handles.append(module.register_forward_hook(partial(check_output, label)))
    for name, parameter in named_parameters(model):
        label = f"the gradient of {name} is not finite"
        hooked: Any = parameter  # the method has no annotations
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


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; of a sharded tensor, those of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


_STDERR = 2
"""File descriptor of stderr. The object ``sys.stderr`` may have been replaced by one that takes a lock."""


def write_notice(signal: str, text: str) -> None:
    """Write what a signal does to stderr. The console is not used, because the main thread may hold its lock."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"\n{signal}: {text}\n".encode())


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


class StopSignal:
    """Context in which SIGINT and SIGTERM set ``requested``. A second Ctrl-C raises KeyboardInterrupt.

    A thread calls ``notice(name, again)`` as soon as a signal arrives; ``again`` is true for a second Ctrl-C. Python
    runs signal handlers only between two bytecode instructions, and one call into a kernel may take a minute.
    """

    def __init__(self, notice: Callable[[str, bool], None] | None = None) -> None:
        self.requested: str | None = None
        self._notice, self._interrupts = notice, 0
        self._previous: dict[signal.Signals, object] = {}
        self._arrivals: _Arrivals | None = None

    def __enter__(self) -> StopSignal:
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
            if self._notice is not None:
                self._arrivals = _Arrivals(self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._interrupts > 1:
                # Two signals arrived during one long call; Python calls the handler once for both.
                raise KeyboardInterrupt

    def _arrived(self, number: int) -> None:
        if number in self._previous:
            self._interrupts += number == signal.SIGINT
            assert self._notice is not None
            self._notice(signal.Signals(number).name, number == signal.SIGINT and self._interrupts > 1)


class _Arrivals:
    """Thread that calls ``arrived`` with the number of each signal as soon as the system delivers it."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived = arrived
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while number := os.read(self._read, 1):
            self._arrived(number[0])

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)


STACKS = "stacks"
"""Folder in that of a run with the files of ``Watchdog``."""
LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""Seconds between writing the stacks and the end. Once one rank ends, the others fail without a stack."""


class Watchdog:
    """Context that ends a process which makes no progress.

    Without a ``beat`` for ``minutes``, the stacks of all threads are written to ``folder/rank-N.txt``, and soon after
    the process ends by SIGALRM. So do ranks that wait for a hanging one. One timer is a C thread and the other one the
    kernel's, so neither needs the hanging interpreter. If that runs, a thread also writes the last collectives of the
    rank to ``folder/flight-N``. Without ``minutes`` there is no watch.
    """

    def __init__(self, folder: Path, rank: int, minutes: float | None) -> None:
        self.path, self._flight = folder / f"rank-{rank:05d}.txt", folder / f"flight-{rank}"
        self._seconds = None if minutes is None else minutes * 60
        self._end = threading.Event()

    def beat(self) -> None:
        """Report progress, which restarts the timers."""
        if self._seconds is not None:
            self._beaten = time.monotonic()
            faulthandler.dump_traceback_later(self._seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + GRACE_SECONDS)

    def __enter__(self) -> Watchdog:
        if self._seconds is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self.beat()
        threading.Thread(target=self._record, name="flight recorder", daemon=True).start()
        return self

    def _record(self) -> None:
        """Write the last collectives once there was no beat for too long."""
        while not self._end.wait(LOOK_SECONDS):
            if self._seconds is not None and time.monotonic() - self._beaten > self._seconds:
                self._flight.write_bytes(recorded_collectives())
                return

    def __exit__(self, *_: object) -> None:
        if self._seconds is None:
            return
        self._end.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


def reported_hangs(folder: Path) -> list[Path]:
    """Return the files with the stacks of ranks of an earlier session."""
    return sorted(path for path in folder.glob("rank-*.txt") if path.stat().st_size)


_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


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

    if _STARTED_BY_TORCHRUN in os.environ:
        threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        end.set()
