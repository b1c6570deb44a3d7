"""Medians of times on whatever device is there, and the rates that they are held against."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gecko.train.throughput import peak_flops

LONGEST = 5.0
"""Seconds that the calls of one function take, about: of long ones there are fewer, but three."""
SCRATCH_BYTES, FILLS = 2**28, 48
"""Several times a card's cache, and how often it is filled before a call: some milliseconds of work."""
NO_ROOM = "does not fit into the memory"


def why(error: Exception) -> str:
    """Why something was not measured, in a few words. One failure must not take the other results with it."""
    # What cuBLAS and Triton cannot get is no OutOfMemoryError of PyTorch.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return NO_ROOM
    traceback.print_exception(error)
    first = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"failed, {type(error).__name__}: {first[:100]}"


@dataclass(frozen=True)
class Call:
    """Seconds."""

    seconds: float
    """Of the device."""
    launching: float
    """Until the host had launched it all; 0 on a CPU, which launches nothing."""


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured."""

    device: torch.device
    dtype: torch.dtype
    """Of activations."""
    repeats: int
    warm_ups: int

    def seconds(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """The median times of ``function``, which is called a few times before; ``queued`` as for ``once``."""
        self.once(function)  # kernels are compiled, memory is found
        calls = max(3, int(LONGEST / self.once(function).seconds))
        for _ in range(min(calls, self.warm_ups) - 2):
            self.once(function)
        timed = [self.once(function, queued=queued) for _ in range(min(calls, self.repeats))]
        return Call(*(statistics.median(getattr(call, kind) for call in timed) for kind in ("seconds", "launching")))

    def once(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """The times of one call.

        ``queued``: a GPU is given work before it, behind which the host can launch the call's kernels: what is
        measured is their time, as in a long step, and not the host's. Nor is anything of the call in the cache.
        """
        if self.device.type != "cuda":
            begin = time.perf_counter()
            function()
            return Call(time.perf_counter() - begin, 0.0)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if queued:
            self._occupy()
        first.record()
        begin = time.perf_counter()
        function()
        launching = time.perf_counter() - begin
        last.record()
        torch.cuda.synchronize(self.device)
        return Call(first.elapsed_time(last) / 1e3, launching)

    def _occupy(self) -> None:
        """Give the device some milliseconds of work."""
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(FILLS):
            scratch.zero_()

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def reset_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def check(self) -> None:
        """RuntimeError where a kernel of before has failed, after which CUDA does nothing more in this process."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def memory(self) -> float:
        """Bytes of the card; of a CPU none are counted."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else math.inf

    def peak(self) -> int | None:
        """Bytes of the card's memory since ``reset_peak``; None on a CPU, where processes do not know."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


@dataclass(frozen=True)
class Rates:
    """What the device does at its best in this very run."""

    copy: float
    """Bytes a second, read and written, of a large copy."""
    products: float
    """FLOPs a second of a large product of square matrices."""
    peak: float
    """FLOPs a second of the card, by its vendor where known."""

    @classmethod
    def measure(cls, bench: Bench, numbers: int, size: int) -> Rates:
        """By copying ``numbers`` numbers, and a product of ``size`` × ``size``."""
        source = bench.random(numbers)
        target = torch.empty_like(source)
        copied = bench.seconds(lambda: target.copy_(source), queued=True).seconds
        a, b = bench.random(size, size), bench.random(size, size)
        multiplied = bench.seconds(lambda: a @ b, queued=True).seconds
        peak = peak_flops(bench.device, bench.dtype)
        return cls(2 * numbers * source.element_size() / copied, 2 * size**3 / multiplied, peak)
