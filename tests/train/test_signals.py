"""A signal prints its notice at once, even while the main thread is in a long call."""

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from gecko.train import Run, session, train
from gecko.train.health import StopSignal


def test_the_notice_comes_while_one_call_lasts() -> None:
    """During the call, which takes seconds, Python runs no signal handler; the handler runs right after it."""
    sent: list[float] = []
    arrived: list[float] = []

    def send() -> None:
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGTERM)

    matrix = torch.eye(1400, dtype=torch.float64)
    with StopSignal(lambda *_: arrived.append(time.perf_counter())) as stop:
        Timer(0.2, send).start()
        matrix.matrix_power(2**8 - 1)
        ended = time.perf_counter()
    assert stop.requested == "SIGTERM"
    assert arrived and arrived[0] - sent[0] < ended - arrived[0]


def test_a_second_interrupt_says_that_it_stops_at_once() -> None:
    told: list[tuple[str, bool]] = []
    with StopSignal(lambda name, again: told.append((name, again))) as stop:
        signal.raise_signal(signal.SIGINT)
        while not told:
            time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        while len(told) < 2:
            time.sleep(0.001)
    assert told == [("SIGINT", False), ("SIGINT", True)] and stop.requested == "SIGINT"


def test_what_was_before_is_there_again() -> None:
    handler = signal.getsignal(signal.SIGINT)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with StopSignal(lambda *_: None):
        pass
    assert signal.getsignal(signal.SIGINT) is handler and signal.set_wakeup_fd(-1) == -1
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("measured", "the measurement in progress is finished"),
        ("_trainer", "the step in progress is finished, then saved; a second Ctrl-C"),
        ("finish_run", "all steps are saved"),
    ],
)
def test_the_notice_says_what_comes_of_a_signal_in_each_phase(
    part: str, said: str, small_run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original, told = getattr(session, part), list[str]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        end = time.monotonic() + 10
        while not any(told) and time.monotonic() < end:
            told.append(capfd.readouterr().err)
            time.sleep(0.01)
        return original(*arguments, **options)

    monkeypatch.setattr(session, part, interrupted)
    run = replace(small_run, steps=None, minutes=0.2) if part == "measured" else small_run
    train(run, now=itertools.count().__next__)
    assert f"SIGINT: {said}" in "".join(told)
