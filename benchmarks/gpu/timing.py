"""Median times on any device, and the rates that they are compared with."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gpu.record import Row
from torch import Tensor

from gecko.models import LanguageModel, ModelConfig, build_model
from gecko.train.throughput import peak_flops

DTYPE = torch.bfloat16
"""Dtype of activations, and of the weights that decode."""
LONGEST = 3.0
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
    first = str(error).strip().partition("\n")[0]
    return f"failed, {type(error).__name__}: {first[:100]}"


class Call(NamedTuple):
    """Times of one call."""

    seconds: float
    """Seconds on the device."""
    launching: float
    """Seconds until the host had launched all kernels; 0 on a CPU."""


@dataclass(frozen=True)
class Bench:
    """Device and number of repetitions of a measurement."""

    device: torch.device
    repeats: int = 1
    warm_ups: int = 1

    @property
    def is_card(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """Return the median times of ``function`` after some warm-up calls; ``queued`` as for ``once``."""
        self.once(function)  # compiles kernels and fills the allocator
        calls = max(3, int(LONGEST / self.once(function).seconds))
        for _ in range(min(calls, self.warm_ups) - 2):
            self.once(function)
        timed = [self.once(function, queued=queued) for _ in range(min(calls, self.repeats))]
        return Call(*map(statistics.median, zip(*timed, strict=True)))

    def once(self, function: Callable[[], Any], *, queued: bool = False) -> Call:
        """Return the times of one call.

        ``queued``: the GPU first gets other work, during which the host launches the call's kernels. Then the time is
        that of the kernels, as in a long step, and not that of the host, and the cache contains none of the call's
        data.
        """
        if not self.is_card:
            begin = time.perf_counter()
            function()
            return Call(time.perf_counter() - begin, 0.0)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if queued:
            scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)
            for _ in range(FILLS):
                scratch.zero_()
        first.record()
        begin = time.perf_counter()
        function()
        launching = time.perf_counter() - begin
        last.record()
        torch.cuda.synchronize(self.device)
        return Call(first.elapsed_time(last) / 1e3, launching)

    def random(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def model(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, the same at each call."""
        torch.manual_seed(0)
        with self.device:
            return build_model(config)

    def settle(self) -> None:
        """Wait for the device and free memory. Raise RuntimeError if a kernel failed: then CUDA no longer works."""
        gc.collect()
        if self.is_card:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def memory(self) -> float:
        """Memory of the card in bytes; infinite for a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.is_card else math.inf

    def peak(self) -> int | None:
        """Return the largest memory in use since ``settle``, in bytes; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_card else None


def rates(bench: Bench, numbers: int, size: int) -> Row:
    """Measure the highest rates of the device: bytes per second, read and written, of a copy of ``numbers`` numbers,
    and FLOP/s of a product of ``size`` × ``size`` matrices. The peak is that of the vendor, if known."""
    source = bench.random(numbers)
    target = torch.empty_like(source)
    copied = bench.seconds(lambda: target.copy_(source), queued=True).seconds
    a, b = bench.random(size, size), bench.random(size, size)
    multiplied = bench.seconds(lambda: a @ b, queued=True).seconds
    found = {"copy": 2 * source.nbytes / copied, "products": 2 * size**3 / multiplied}
    return {"table": "rates", **found, "peak": peak_flops(bench.device, DTYPE)}
