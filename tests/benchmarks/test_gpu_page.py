"""A measurement on a GPU loses only the tasks that crashed, hung or were not reached, and the page lists them."""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import operators
import pytest
import torch
from gpu.operators import Operator, compare
from gpu.page import page
from gpu.parts import LONG, full, small
from gpu.processes import Runner
from gpu.record import Record
from gpu.shapes import Floor
from gpu.timing import Bench, Rates
from gpu.training import CHECKPOINTING, train

from gecko.config import GeckoConfig
from gecko.ops.backends import dispatch

FAKE = Path(__file__).parent / "fake_part.py"
FASTER = 1_000
"""Factor by which time passes faster while a part hangs."""
ORDER = ["rates", "good", "wrong", "fails", "aborts", "aborts once", "hangs", "dies"]


@pytest.fixture
def record(tmp_path, monkeypatch):
    found = os.pathsep.join(path for path in sys.path if path)
    monkeypatch.setenv("PYTHONPATH", found)
    record = Record(tmp_path / "card.json")
    record.describe("a command", hardware="Card; 1 core", dtype="bfloat16", repeats=20, warm_ups=5)
    return record


class Clock:
    """In place of the module ``time``: time passes faster while the file ``hangs`` exists.

    So a test waits neither for the whole limit, nor does it take a process that starts slowly for one that hangs.
    """

    def __init__(self, hangs: Path) -> None:
        self._hangs, self._real, self._now = hangs, time.monotonic(), 0.0

    def monotonic(self) -> float:
        real = time.monotonic()
        self._now += (real - self._real) * (FASTER if self._hangs.exists() else 1)
        self._real = real
        return self._now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def command(self, record: Path, part: str) -> list[str]:
        """Return the command of a part's new process, which does not hang yet."""
        self._hangs.unlink(missing_ok=True)
        return [sys.executable, str(FAKE), str(record), part]


def measured(record: Record, *parts: str, seconds: float = 10**6, stalled_after: float = 300) -> str:
    """Measure these parts and return the page."""
    path = record.path.with_suffix(".md")
    clock = Clock(record.path.with_name("hangs"))
    runner = Runner(
        record, partial(clock.command, record.path), ORDER, lambda: path.write_text("\n".join(page(record))),
        clock.monotonic() + seconds, stalled_after, least=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.processes.time", clock)
        for part in parts:
            runner.run(part)
    return path.read_text()


def test_parts_of_several_commands_stand_on_one_page_once(record):
    measured(record, "good")
    first = measured(record, "fails")
    assert "copy and a large product reach was not measured" in first
    record.describe("another command")
    text = measured(record, "rates", "good")
    assert "moves 1,000 GB/s" in text and "| 0.2% / 0.2% |" in text
    assert (
        text.count("| moving average | gecko | gecko-7b | 1.000 / 2.000 | 2.000 / 1.000 **host-bound** | 1.0e-03") == 1
    )
    assert "| fails | first: failed, ValueError: a / b |" in text and "| kept |" in text and "| second |" in text
    assert list(record.parts()) == ["rates", "good", "fails"] and "`a command`, `another command`" in text
    assert "WRONG**" not in text


def test_wrong_kernels_are_marked(record):
    text = measured(record, "wrong")
    assert "**Not what the eager form computes: SwiGLU (gecko-7b), gate (gecko-7b). Their times mean nothing.**" in text
    assert "**WRONG** 5.0e-01 / 2.0e-03" in text and "**WRONG** inf / 2.0e-03" in text


def test_a_crash_loses_the_task_at_hand(record):
    text = measured(record, "aborts")
    assert "| before the abort |" in text and "| after the abort |" in text
    assert "| aborts | first: ended by SIGABRT: illegal / access |" in text


def test_a_killed_task_is_tried_once_more(record):
    text = measured(record, "aborts once")
    assert "| the second time |" in text and "SIGABRT" not in text
    assert record.tasks("aborts once") == {"first": ""} and record.parts() == {"aborts once": ""}


def test_a_hang_loses_the_task_at_hand(record):
    text = measured(record, "hangs")
    assert "| after the hang |" in text
    assert "| hangs | first: stopped after 300 seconds without a result |" in text


def test_what_is_out_of_time_is_named(record):
    text = measured(record, "hangs", "good", seconds=3_000, stalled_after=30_000)
    assert "| hangs | first: stopped, for no time was left; what was left: no time was left |" in text
    assert "| good | not measured: no time was left |" in text


def test_a_part_that_does_not_begin_says_why(record):
    assert "| dies | not measured: exit status 1: RuntimeError: no card |" in measured(record, "dies")


def test_parts_are_chosen_by_name_in_their_order():
    parts = full()
    assert operators.chosen(parts, ["activations", "operators"]) == [
        "operators:gecko-7b", "operators:gecko-1b", "activations", "operators:gecko-125m",
    ]  # fmt: skip
    assert operators.chosen(parts, ["compiled:gecko-7b"]) == ["compiled:gecko-7b"]
    assert set(parts) - set(operators.chosen(parts, [])) == {"compiled:gecko-7b", "compiled:gecko-1b"}
    with pytest.raises(ValueError, match="nothing"):
        operators.chosen(parts, ["nothing"])


def test_what_is_planned_beyond_the_card_is_not_tried(monkeypatch):
    bench = Bench(torch.device("cpu"), torch.bfloat16, 2, 1)
    tried = []
    monkeypatch.setattr("gpu.training._step_seconds", lambda *given: (tried.append(given[2]), 1.0)[1])
    monkeypatch.setattr(Bench, "memory", 50 * 10**9)
    found = train("gecko-1b", GeckoConfig.preset("gecko-1b"), 131_072, bench)
    assert found.speed is None and not tried
    assert found.checkpointing == f"does not fit ({LONG / 1e9:.0f} GB planned, recomputing: full)"
    monkeypatch.setattr(Bench, "memory", 85 * 10**9)
    found = train("gecko-1b", GeckoConfig.preset("gecko-1b"), 32_768, bench)
    assert found.checkpointing == "selective" and tried == ["selective"] and CHECKPOINTING[0] == "none"


def test_a_kernel_is_compared_with_the_eager_form(monkeypatch):
    exact = torch.arange(1.0, 5.0)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if dispatch.triton_kernels_installed() else x * 2

    monkeypatch.setattr(dispatch, "triton_kernels_installed", lambda: True)
    found = compare(Operator("doubled", doubled, [exact], Floor(1, 1)), "a shape")
    assert found.outputs == pytest.approx(0.5) and found.gradients == pytest.approx(0.5)
    nothing = compare(Operator("NaN", lambda x: x * math.nan, [exact], Floor(1, 1)), "a shape")
    assert nothing.outputs == math.inf


def test_every_small_part_has_results(record):
    bench = Bench(torch.device("cpu"), torch.float32, 2, 1)
    parts = small()
    record.begin("rates", parts)
    operators.measure("rates", parts["rates"], bench, record)
    assert record.tasks("rates") == {"copy and product": ""} and next(record.results(Rates)).copy > 0
