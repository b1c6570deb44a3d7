"""A process that measures parts which succeed, fail or hang as their names say: ``python fake_part.py RECORD PART``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu.operators import GECKO, Agreement, Timing
from gpu.parts import Part, Task, measure
from gpu.record import Record, Result
from gpu.shapes import Floor
from gpu.timing import Bench, Rates

FLOOR = Floor(1e6, 2e6, 1e9)


def rates() -> Iterator[Result]:
    yield Rates(1e12, 5e14, 1e15)


def timed(operator: str, output: float = 1e-3) -> Iterator[Result]:
    yield Timing(operator, GECKO, "gecko-7b", FLOOR, 1e-3, 2e-3, 2e-3, 1e-3)
    yield Agreement(operator, "gecko-7b", output, 2e-3)


def fails() -> Iterator[Result]:
    yield from timed("kept")
    raise ValueError("a | b")


def aborts() -> Iterator[Result]:
    yield from timed("before the abort")
    print("illegal | access", file=sys.stderr, flush=True)
    os.abort()


def hangs() -> Iterator[Result]:
    Path(sys.argv[1]).with_name("hangs").touch()
    time.sleep(1_000)
    yield from ()


def aborts_once(again: Path) -> Iterator[Result]:
    if not again.exists():
        again.touch()
        os.abort()
    yield from timed("the second time")


def dies(_: Bench) -> Iterator[Task]:
    raise RuntimeError("no card")
    yield


PARTS = {
    "rates": Part(lambda _: iter([Task("rates", rates())])),
    "good": Part(lambda _: iter([Task("moving average", timed("moving average"))])),
    "wrong": Part(lambda _: iter([Task("SwiGLU", timed("SwiGLU", 0.5)), Task("gate", timed("gate", float("inf")))])),
    "fails": Part(lambda _: iter([Task("first", fails()), Task("second", timed("second"))])),
    "aborts": Part(lambda _: iter([Task("first", aborts()), Task("second", timed("after the abort"))])),
    "hangs": Part(lambda _: iter([Task("first", hangs()), Task("second", timed("after the hang"))])),
    "aborts once": Part(lambda _: iter([Task("first", aborts_once(Path(sys.argv[1]).with_name("again")))])),
    "dies": Part(dies),
}

if __name__ == "__main__":
    bench = Bench(torch.device("cpu"), torch.float32, 2, 1)
    measure(sys.argv[2], PARTS[sys.argv[2]], bench, Record(Path(sys.argv[1])))
