"""A process that compiles is told apart from one that hangs, and kernels that were compiled before are not compiled."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from gpu.compilations import BEGUN, ENDED, Compilations
from gpu.processes import Runner
from gpu.record import Record
from kernels.compiling import compiled
from kernels.recording import Configuration
from triton.backends.compiler import GPUTarget

from gecko.ops.backends.dispatch import Launch

COMPILES = """
import sys, time
def mark(which):
    with open(sys.argv[1], "ab", buffering=0) as file:
        file.write(which)
for _ in range(2):
    mark(b"(")
    time.sleep(float(sys.argv[2]))
    mark(b")")
time.sleep(float(sys.argv[3]))
"""
"""Script of a process that compiles twice, and then has no result for a while: its arguments are file and seconds."""


def ending(folder: Path, compiles_for: float, silent_for: float, compiled_after: float) -> str:
    """Return how the part ends that this process measures, if it may be silent for three seconds."""
    record = Record(folder / "card.json")
    path, given = str(record.compilations.path), (str(compiles_for), str(silent_for))
    runner = Runner(
        record, lambda _: [sys.executable, "-c", COMPILES, path, *given], ["part"], lambda: None,
        time.monotonic() + 90, stalled_after=3.0, compiled_after=compiled_after, least=0,
    )  # fmt: skip
    runner.run("part")
    assert not record.compilations.path.exists()
    return record.parts()["part"]


def test_a_process_that_compiles_does_not_hang(tmp_path):
    assert ending(tmp_path, compiles_for=4, silent_for=0, compiled_after=40) == ""


def test_a_process_that_has_compiled_may_hang(tmp_path):
    assert ending(tmp_path, 0.1, 60, compiled_after=40) == "stopped after 3 seconds without a result"


def test_a_compilation_may_hang(tmp_path):
    assert ending(tmp_path, 60, 0, compiled_after=4) == "stopped after 4 seconds of one compilation"


@triton.jit
def _copy(p_x, p_y, size: tl.constexpr):
    tl.store(p_y + tl.arange(0, size), tl.load(p_x + tl.arange(0, size)))


class Driver:
    """A driver of a card of compute capability 9.0 that is not there: kernels are compiled and not launched."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def card(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(Driver())
    yield
    driver._active = before


def test_compilations_are_noted(tmp_path, card, monkeypatch):
    compilations = Compilations(tmp_path / "card.compilations")
    compilations.note()
    arguments = {"p_x": torch.empty(64), "p_y": torch.empty(64), "size": 64}
    _copy.warmup(**arguments, grid=(1,), num_warps=1, num_stages=1)
    assert compilations.marks() == BEGUN + ENDED
    _copy.warmup(**arguments, grid=(1,), num_warps=1, num_stages=1)
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert compilations.marks() == 2 * (BEGUN + ENDED)


def test_what_was_recorded_and_compiled_is_found_by_a_launch(tmp_path, card):
    arguments = {"p_x": torch.empty(128), "p_y": torch.empty(128), "size": 128}
    compiled(Configuration.of(Launch(_copy, (1,), arguments, warps=2)), 90)
    made = sorted(tmp_path.rglob("*"))
    assert made
    _copy.warmup(**arguments, grid=(1,), num_warps=2, num_stages=1)
    assert sorted(tmp_path.rglob("*")) == made
    _copy.warmup(**arguments, grid=(1,), num_warps=4, num_stages=1)
    assert sorted(tmp_path.rglob("*")) != made
