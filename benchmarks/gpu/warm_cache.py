"""Compiles the kernels of the other parts on all cores before they are needed; Triton keeps them in its cache.

Launches are recorded on the CPU and compiled for the card, which has nothing to do meanwhile. A launch finds what was
compiled if the recorded one has the same types, constants and alignment (``tests/kernels/recording.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu.compilations import BEGUN, ENDED, Compilations
from gpu.steps import Step
from gpu.timing import Bench
from torch import Tensor

from gecko.config import GeckoConfig

MOST_PROCESSES = 16


@dataclass(frozen=True)
class Warmed:
    """Kernels of one group of launches, compiled."""

    group: str
    kernels: int
    failed: int
    seconds: float
    reason: str = ""
    """Why the first one that failed did."""


Group = Callable[[], list[Any]]
"""Returns distinct ``Configuration``s; it can be sent to another process."""


def operators_of(preset: str, length: int) -> list[Any]:
    """Return the configurations of all operators forward and backward, in bfloat16."""
    from gpu.operators import forward_and_backward, operators
    from gpu.shapes import Shape
    from kernels.recording import recorded

    bench = _Unwritten(torch.device("cpu"), torch.bfloat16, 1, 1)

    def call() -> None:
        for operator in operators(Shape(preset, GeckoConfig.preset(preset), length), bench):
            forward_and_backward(operator)

    return recorded(call)


class _Unwritten(Bench):
    """A bench whose random numbers are unwritten memory, which takes neither time nor space."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)


def steps_of(preset: str, lengths: list[int]) -> list[Any]:
    """Return the configurations of training steps of one block, with rows of these lengths."""
    from kernels.recording import recorded

    steps = [Step(preset, length).prepare(torch.device("cpu")) for length in lengths]
    return recorded(lambda: [step() for step in steps])


def variants_of(preset: str, length: int) -> list[Any]:
    """Return the configurations that the sweep tries."""
    from gpu.sweep import places, variants
    from kernels.recording import Configuration

    launches = [one for launch in places(Step(preset, length)).values() for one in variants(launch)]
    return list(dict.fromkeys(map(Configuration.of, launches)))


def decoding_of(preset: str, counts: tuple[int, ...]) -> list[Any]:
    """Return the configurations of a decoded token of these numbers of rows in bfloat16."""
    from kernels.recording import decode, model_on_nothing, recorded

    config = replace(GeckoConfig.preset(preset), num_layers=1)
    model = model_on_nothing(config, torch.bfloat16)
    return recorded(lambda: [decode(model, rows) for rows in counts])


def sizes_of(preset: str) -> list[Any]:
    """Return the configurations of ``tests/gpu/test_sizes.py`` for a preset."""
    from kernels.recording import model_on_nothing, recorded

    from gecko.train.step import autocast

    config = replace(GeckoConfig.preset(preset), num_layers=1, vocab_size=264)
    model, text = model_on_nothing(config), torch.zeros(1, 2 * config.chunk_size + 14, dtype=torch.int64)
    documents = (torch.arange(text.shape[1] - 1) >= text.shape[1] // 3).long()[None]

    def call() -> None:
        for precision in ("float32", "bfloat16"):
            with autocast(precision, text.device):
                model.loss(text[:, :-1], text[:, 1:], documents).backward()

    return recorded(call)


def small_models_of(variants: list[str]) -> list[Any]:
    """Return most configurations of ``tests/gpu/test_models.py`` for these variants."""
    from kernels.recording import model_on_nothing, read, recorded, train
    from support import cases

    def call() -> None:
        for variant in variants:
            model = model_on_nothing(replace(cases.SMALL, **cases.VARIANTS[variant], num_layers=1))
            for precision in ("float32", "bfloat16"):
                train(model, 45, precision, documents=True)
            read(model, 3 * cases.CHUNK + 5, "float32", documents=False)

    return recorded(call)


def warm(name: str, group: Group, bench: Bench) -> Iterator[Warmed]:
    """Compile a group for the card, or for sm_90 if there is none, in as many processes as there are cores.

    Each process records the group and compiles its share.
    """
    begin, count = time.perf_counter(), min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        capability = _capability(bench.device)
        shares = [pool.submit(partial(_compile, group, i, count, capability, bench.compilations)) for i in range(count)]
        made = [share.result() for share in as_completed(shares)]
    reasons = [reason for _, found in made for reason in found]
    kernels, seconds = sum(kernels for kernels, _ in made), time.perf_counter() - begin
    yield Warmed(name, kernels, len(reasons), seconds, next(iter(reasons), ""))


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def _compile(group: Group, share: int, of: int, capability: int, compilations: Compilations) -> tuple[int, list[str]]:
    """Compile every ``of``-th configuration; return how many, and why some could not be."""
    from kernels.compiling import compiled

    reasons, mine = [], group()[share::of]
    for configuration in mine:
        compilations.append(BEGUN)
        try:
            compiled(configuration, capability)
        except Exception as error:
            reasons.append(f"{configuration.kernel.__name__}: {type(error).__name__}: {str(error)[:100]}")
        compilations.append(ENDED)
    return len(mine), reasons
