"""Compiles, without a card, what ``quarter_hour.py`` launches on one: kernels for sm_90.

Launches are recorded at the sizes of the card, and each goes to Triton as on the card, with a driver of a card that is
not there. So whatever is part of the key in Triton's cache is that of the launch itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.backends.nvidia.driver
from gpu import decoding, training
from gpu.items import of_a_card, operator_of
from gpu.operators import forward_and_backward
from gpu.quarter_hour import misses
from gpu.timing import DTYPE, Bench, Call
from gpu.variants import OF_DECODING, OPERATORS, WITHOUT_BARRIERS, applied, of_family
from kernels.recording import launches, model_on_nothing, train
from torch import Tensor
from triton.backends.compiler import GPUTarget

from gecko import Gecko
from gecko.config import GeckoConfig
from gecko.ops.backends.dispatch import Launch

TESTED = ("gecko-7b", "gecko-1b", "gecko-125m", "gecko-15m", "gecko-4m", "tiny", "megalodon-tiny")
"""Models of ``tests/gpu/test_sizes.py``."""


class Driver:
    """A driver of a card of compute capability 9.0 that is not there: kernels are compiled and not launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @property
    def utils(self) -> Any:
        """Triton 3.7 launches all kernels by this module."""
        return triton.backends.nvidia.driver.CudaUtils()


class Recording(Bench):
    """A bench that makes each call once; its random numbers and weights are unwritten, and take no time and space."""

    def random(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def model(self, config: GeckoConfig) -> Gecko:
        return model_on_nothing(config)

    def seconds(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        function()
        return Call(1.0, 1.0)


def groups() -> dict[str, Callable[[], Any]]:
    """Return what makes the launches of each group; what is needed first comes first."""
    bench = Recording(torch.device("cpu"))
    s = of_a_card(bench)
    block, wide = (replace(config, num_layers=1) for config in (s.config, s.shape.config))

    def step(rows: int, length: int, documents: bool = False) -> None:
        steps = training.Steps.of(block, rows, length, bench)
        steps.gradients(next(steps.batches()) if documents else None)

    def operator(name: str) -> None:
        forward_and_backward(operator_of(name, s.shape, bench))

    def varied(call: Callable[..., Any], *variants: Any) -> None:
        with applied(*variants):
            call()

    found: dict[str, Callable[[], Any]] = {}
    for rows, length in (*s.trained, (1, s.longest)):
        found[f"step, {rows} × {length:,}"] = partial(step, rows, length)
    for rows, length in s.trained:
        found[f"captured step, {rows} × {length:,}"] = partial(step, rows, length, documents=True)
    for name, config in ((s.model, block), (s.shape.name, wide)):
        for rows in s.decoded:
            decode = partial(decoding.measure, name, config, rows, bench)
            found[f"decoding {name}, {rows} rows"] = decode
            found |= {f"decoding {name}, {rows} rows, {x}": partial(varied, decode, x) for x in OF_DECODING}
    equal = partial(decoding.measure, s.model, s.equal_rows(), s.equal[0], bench)
    found |= {"equal rows": equal, "equal rows without barriers": partial(varied, equal, WITHOUT_BARRIERS)}
    variants = [x for family in OPERATORS for x in of_family(family)]
    found |= {f"variants: {x}": partial(varied, partial(operator, OPERATORS[x.family]), x) for x in variants}
    found |= {f"step with {x}": partial(varied, partial(step, *s.trained[0]), x) for x in variants}
    found["8 bits"] = partial(decoding.measure_in_8_bits, s.model, block, s.decoded[0], bench)
    return found | {f"tests: {preset}": partial(_tested, preset) for preset in TESTED}


def _tested(preset: str) -> None:
    config = replace(GeckoConfig.preset(preset), num_layers=1, vocab_size=264)
    for precision in ("float32", "bfloat16"):
        train(model_on_nothing(config), 2 * config.chunk_size + 14, precision, documents=True, rows=1)


def compile_all(only: Sequence[str]) -> None:
    """Compile the groups whose names begin with one of ``only``, and count what the cache did not have."""
    triton.runtime.driver.set_active(Driver())
    missing: list[str] = []
    for name, call in groups().items():
        if name.startswith(tuple(only)):
            begun, before, failed, found = time.time(), len(missing), Counter[str](), set[int]()

            def make(launch: Launch, failed: Counter[str] = failed, found: set[int] = found) -> None:
                try:
                    kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
                except Exception as error:  # a variant may not compile; the others shall
                    failed[f"{launch.kernel.__name__}: {type(error).__name__}: {str(error)[:80]}"] += 1
                    return
                found.add(id(kernel))

            with misses(missing):
                launches(call, make)
            new, seconds = len(missing) - before, time.time() - begun
            print(f"{name}: {len(found)} kernels, {new} not in the cache, {seconds:.0f} s", end="")
            print("".join(f"\n  failed {count} times: {what}" for what, count in failed.items()), flush=True)
    print(f"{len(missing)} kernels were not in the cache")
