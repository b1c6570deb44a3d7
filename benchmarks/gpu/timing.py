"""Medians of times on whatever device is there, and the rates that they are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured."""

    device: torch.device
    dtype: torch.dtype
    """Of activations."""
    repeats: int
    warm_ups: int

    def seconds(self, function: Callable[[], Any]) -> float:
        """The median time of ``function``, which is called a few times before."""
        for _ in range(self.warm_ups):
            function()
        return statistics.median(self._once(function) for _ in range(self.repeats))

    def _once(self, function: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

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

    @classmethod
    def measure(cls, bench: Bench, numbers: int, size: int) -> Rates:
        """By copying ``numbers`` numbers, and a product of ``size`` × ``size``."""
        source = bench.random(numbers)
        target = torch.empty_like(source)
        copied = bench.seconds(lambda: target.copy_(source))
        a, b = bench.random(size, size), bench.random(size, size)
        multiplied = bench.seconds(lambda: a @ b)
        return cls(2 * numbers * source.element_size() / copied, 2 * size**3 / multiplied)
