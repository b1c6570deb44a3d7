"""Compiles, without a card, what ``quarter_hour.py`` launches on one: kernels for sm_90, and the code to launch them.

Launches are recorded at the sizes of the card, and each goes to Triton as on the card, with a driver of a card that is
not there. So whatever is part of the key in Triton's cache is that of the launch itself.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from gpu.items import Sizes, of_a_card, operator_of
from gpu.operators import forward_and_backward
from gpu.quarter_hour import Misses
from gpu.steps import Step
from gpu.timing import Bench
from gpu.variants import OPERATORS, applied, of_decoding, without_barriers
from kernels.recording import decode, launches, model_on_nothing, train
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_manager

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


class _Unwritten(Bench):
    """A bench whose random numbers are unwritten memory, which takes neither time nor space."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)


def groups() -> dict[str, Callable[[], Any]]:
    """Return what makes the launches of each group; what is needed first comes first."""
    cpu = torch.device("cpu")
    s = of_a_card(_Unwritten(cpu, torch.bfloat16, 1, 1))
    found: dict[str, Callable[[], Any]] = {
        "step": lambda: [call() for call in _steps(s)],
        "decoding": lambda: _decode(s),
        "equal rows": lambda: [_equal(s), _with((without_barriers(),), lambda: _equal(s))],
    }
    for family, (make, name) in OPERATORS.items():
        found[f"variants: {family}"] = lambda make=make, name=name: [
            _with(variants, lambda: forward_and_backward(operator_of(name, s.shape, s.bench)))
            for variants in ((), *((x,) for x in make()))
        ]
    for family, (make, _) in OPERATORS.items():
        found[f"step with variants: {family}"] = lambda make=make: [
            _with((x,), Step(s.model, s.trained[0][1], s.config).prepare(cpu)) for x in make()
        ]
    found["8 bits"] = lambda: _decode_in_8_bits(s)
    for preset in TESTED:
        found[f"tests: {preset}"] = lambda preset=preset: _tested(preset)
    return found


def _with(variants: Any, call: Callable[[], Any]) -> Any:
    with applied(*variants):
        return call()


def _steps(s: Sizes) -> Iterator[Callable[[], Any]]:
    for rows, length in (*s.trained, (1, s.longest)):
        yield Step(s.model, length, s.config, rows).prepare(torch.device("cpu"))


def _decode(s: Sizes) -> None:
    for config, rows in ((s.config, 1), (s.config, 32), (s.shape.config, 1), (s.shape.config, 32)):
        model = model_on_nothing(replace(config, num_layers=1), torch.bfloat16)
        for variants in ((), *((x,) for x in of_decoding())):
            _with(variants, lambda model=model, rows=rows: decode(model, rows))


def _equal(s: Sizes) -> None:
    decode(model_on_nothing(s.shallow(chunk_size=64), torch.bfloat16), s.equal[0])


def _decode_in_8_bits(s: Sizes) -> None:
    from gpu.items import in_8_bits

    with in_8_bits():
        decode(model_on_nothing(replace(s.config, num_layers=1), torch.bfloat16), 1)


def _tested(preset: str) -> None:
    config = replace(GeckoConfig.preset(preset), num_layers=1, vocab_size=264)
    for precision in ("float32", "bfloat16"):
        train(model_on_nothing(config), 2 * config.chunk_size + 14, precision, documents=True, rows=1)


def compile_all(only: list[str], check: bool) -> int:
    """Compile the groups whose names contain one of the words, or count what the cache does not have; return how many
    of these there are."""
    triton.runtime.driver.set_active(Driver())
    launchers, missing = _Launchers(), 0
    for name, call in groups().items():
        if only and not any(word in name for word in only):
            continue
        begun, failed, found = time.time(), Counter[str](), set()

        def make(launch: Launch, failed: Counter[str] = failed, found: set[Any] = found) -> None:
            try:
                kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
            except Exception as error:  # a variant may not compile; the others shall
                failed[f"{launch.kernel.__name__}: {type(error).__name__}: {str(error)[:80]}"] += 1
                return
            if id(kernel) not in found:
                found.add(id(kernel))
                launchers.make(kernel)

        with Misses() as misses:
            launches(call, make)
        missing += misses.count
        print(f"{name}: {len(found)} kernels, {misses.count} not in the cache, {time.time() - begun:.0f} s", end="")
        print("".join(f"\n  failed {count} times: {what}" for what, count in failed.items()), flush=True)
    print(f"{len(launchers.seen)} launchers; {missing} kernels and {launchers.missing} of these were not in the cache")
    return int(check and missing + launchers.missing > 0)


class _Launchers:
    """Builds the C code by which Triton launches each signature of kernels, against a library of CUDA that is empty."""

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        self._driver, self.seen, self.missing = driver, set[str](), 0
        folder = tempfile.mkdtemp()
        source = Path(folder, "empty.c")
        source.write_text("int nothing_;\n")
        library = str(Path(folder, "libcuda.so.1"))
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, str(source)], check=True)
        triton.knobs.nvidia.libcuda_path = folder
        self._compile, driver.compile_module_from_src = driver.compile_module_from_src, self._build
        with suppress(ImportError):
            driver.CudaUtils()

    def make(self, kernel: Any) -> None:
        with suppress(ImportError):
            self._driver.CudaLauncher(kernel.src, kernel.metadata)

    def _build(self, src: str, name: str, **options: Any) -> Any:
        """Build what the cache does not have, in the place of Triton's function, which goes on to load it."""
        key = hashlib.sha256((src + platform_key()).encode()).hexdigest()
        self.seen.add(key)
        if get_cache_manager(key).get_file(name + sysconfig.get_config_var("EXT_SUFFIX")) is None:
            self.missing += 1
            self._compile(src=src, name=name, **options)
        raise ImportError("it is stored, and cannot be loaded where CUDA is not there")


if __name__ == "__main__":
    sys.exit("Run quarter_hour.py --compile CACHE.")
