"""Measured time of every kernel and operation of a training step, each alone on the card."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu.steps import Copies, Step, Visit, execute_on, kernel_name, visit_launches
from gpu.timing import Bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from gecko.ops.backends.dispatch import Launch

CALLS = 7
"""Timed calls of a kernel, after two others."""


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel, or all calls of one operation of PyTorch, in a step."""

    step: str
    kernel: str
    launches: int
    seconds: float
    """Of all launches together."""


def measure(step: Step, bench: Bench) -> Iterator[KernelTime]:
    """Yield kernels and operations in the order of their first call."""
    meter = Meter(bench, execute_on(bench.device))
    call = step.prepare(bench.device)

    def watched() -> None:
        with _Operations(meter):
            call()

    visit_launches(watched, bench.device, meter.launch)
    for name, (count, seconds) in meter.found.items():
        yield KernelTime(str(step), name, count, seconds)


class Meter:
    """Times each distinct launch and operation once, and adds the time at each of its calls."""

    def __init__(self, bench: Bench, execute: Visit) -> None:
        self._bench, self._execute = bench, execute
        self._known: dict[Any, float] = {}
        self.found: dict[str, tuple[int, float]] = {}
        """Number of calls, and seconds of all, by name."""

    def launch(self, launch: Launch) -> None:
        """Run a launch; time it first if it is new, on the arguments that it really has."""
        with _disable_current_modes():
            name = kernel_name(launch)
            key = (name, launch.grid, launch.warps, launch.stages, *map(_kind, launch.arguments.values()))
            if key not in self._known:
                self._known[key] = self._median(lambda: self._execute(launch), Copies.of(launch))
            self._execute(launch)
        self._add(name, key)

    def operation(self, func: Any, args: Any, kwargs: Any) -> None:
        """Time an operation if it is new; its arguments do not change."""
        name = f"torch.{func._opname}"
        key = (name, *map(_kind, tree_leaves((args, kwargs))))
        if key not in self._known:
            if func._schema.is_mutable:
                args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            self._known[key] = self._median(lambda: func(*args, **kwargs), Copies([]))
        self._add(name, key)

    def _median(self, call: Callable[[], Any], copies: Copies) -> float:
        times = []
        for _ in range(2 + CALLS):
            copies.restore()
            times.append(self._bench.once(call, queued=True).seconds)
        copies.restore()
        return statistics.median(times[2:])

    def _add(self, name: str, key: Any) -> None:
        count, seconds = self.found.get(name, (0, 0.0))
        self.found[name] = count + 1, seconds + self._known[key]


def _kind(x: Any) -> Any:
    """Return what the time of a call depends on: a tensor's shape, strides and dtype, or any other argument."""
    return (*x.shape, *x.stride(), x.dtype) if isinstance(x, Tensor) else repr(x)


class _Operations(TorchDispatchMode):
    """Gives the operations of PyTorch that read or write memory to a meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and "empty" not in func._opname:
            self._meter.operation(func, args, kwargs)
        return func(*args, **kwargs)
