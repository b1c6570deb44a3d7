"""Median times on any device, and the rates that they are compared with."""

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
"""Approximate seconds for all calls of one function: a long function is called less often, but at least three times."""
SCRATCH_BYTES, FILLS = 2**28, 48
"""Several times the size of a card's cache, and the number of fills before a call, which take some milliseconds."""
NO_ROOM = "does not fit into the memory"


def why(error: Exception) -> str:
    """Return in a few words why a measurement failed; it must not prevent other results."""
    # Failed allocations of cuBLAS and Triton raise other errors than PyTorch's OutOfMemoryError.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return NO_ROOM
    traceback.print_exception(error)
    first = str(error).strip().partition("\n")[0].replace("|", "/")
    return f"failed, {type(error).__name__}: {first[:100]}"


@dataclass(frozen=True)
class Call:
    """Times of one call."""

    seconds: float
    """Seconds on the device."""
    launching: float
    """Seconds until the host had launched all kernels; 0 on a CPU."""


@dataclass(frozen=True)
class Bench:
    """Device, dtype and number of repetitions of a measurement."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of activations."""
    repeats: int
    warm_ups: int

    def seconds(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """Return the median times of ``function`` after some warm-up calls; ``queued`` as for ``once``."""
        self.once(function)  # compiles kernels and fills the allocator
        calls = max(3, int(LONGEST / self.once(function).seconds))
        for _ in range(min(calls, self.warm_ups) - 2):
            self.once(function)
        timed = [self.once(function, queued=queued) for _ in range(min(calls, self.repeats))]
        return Call(*(statistics.median(getattr(call, kind) for call in timed) for kind in ("seconds", "launching")))

    def once(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """Return the times of one call.

        ``queued``: the GPU first gets other work, during which the host launches the call's kernels. Then the time is
        that of the kernels, as in a long step, and not that of the host, and the cache contains none of the call's
        data.
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
        """Raise RuntimeError if an earlier kernel failed; CUDA then no longer works in this process."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def memory(self) -> float:
        """Memory of the card in bytes; infinite for a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else math.inf

    def peak(self) -> int | None:
        """Return the largest memory in use since ``reset_peak``, in bytes; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


@dataclass(frozen=True)
class Rates:
    """Highest rates of the device, measured in the same run."""

    copy: float
    """Bytes per second, read and written, of a large copy."""
    products: float
    """FLOP/s of a product of large square matrices."""
    peak: float
    """FLOP/s of the card according to its vendor, if known."""

    @classmethod
    def measure(cls, bench: Bench, numbers: int, size: int) -> Rates:
        """Measure a copy of ``numbers`` numbers, and a product of ``size`` × ``size`` matrices."""
        source = bench.random(numbers)
        target = torch.empty_like(source)
        copied = bench.seconds(lambda: target.copy_(source), queued=True).seconds
        a, b = bench.random(size, size), bench.random(size, size)
        multiplied = bench.seconds(lambda: a @ b, queued=True).seconds
        peak = peak_flops(bench.device, bench.dtype)
        return cls(2 * numbers * source.element_size() / copied, 2 * size**3 / multiplied, peak)
