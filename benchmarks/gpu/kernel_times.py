"""The time of each kernel and operation of a training step, alone on a card."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

from gpu.record import Row
from gpu.timing import Bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch

CALLS = 7
"""Most timed calls of a kernel, after two others."""


def kernel_name(launch: Launch) -> str:
    """Return the operator's and the kernel's name."""
    return f"{launch.kernel.fn.__module__.removeprefix('gecko.ops.').partition('.')[0]}.{launch.kernel.__name__}"


class Operations(TorchDispatchMode):
    """Gives the operations of PyTorch that read or write memory to ``visit``, with their arguments and results."""

    def __init__(self, visit: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._visit = visit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and "empty" not in func._opname:
            self._visit(func, args, kwargs, result)
        return result


def measure(name: str, step: Callable[[], Any], bench: Bench) -> Iterator[Row]:
    """Yield kernels and operations in the order of their first call: the number of calls, and the time of all."""
    meter = Meter(bench)
    # Dispatch modes, which see operations, must not change the way in which kernels are called.
    with (
        patch.object(Launch, "run", lambda launch: meter.launch(launch)),
        patch.object(dispatch, "is_watched", lambda: False),
        Operations(meter.operation),
    ):
        step()
    for kernel, (count, seconds) in meter.found.items():
        yield {"table": "kernels", "step": name, "kernel": kernel, "launches": count, "seconds": seconds}


class Meter:
    """Times each distinct launch and operation once, and adds the time at each of its calls.

    Launches run as they did when the meter was made: on a card, in the interpreter, or not at all.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self._run = bench, Launch.run
        self._known: dict[Any, float] = {}
        self.found: dict[str, tuple[int, float]] = {}
        """Number of calls, and seconds of all, by name."""

    def launch(self, launch: Launch) -> None:
        """Run a launch; time it first if it is new, on the arguments that it really has, which are restored."""
        with _disable_current_modes():
            # Autograd does not see that data is restored: it would take tensors that it keeps for changed ones.
            tensors = [x.data for x in launch.arguments.values() if isinstance(x, Tensor)]
            given = launch.grid, launch.warps, launch.stages, *launch.arguments.values()
            self._add(kernel_name(launch), given, lambda: self._run(launch), tensors)
            self._run(launch)

    def operation(self, func: Any, args: Any, kwargs: Any, _: Any) -> None:
        """Time an operation if it is new; its arguments do not change."""
        given = tree_leaves((args, kwargs))
        changed = [x for x in given if isinstance(x, Tensor)] if func._schema.is_mutable else []
        self._add(f"torch.{func._opname}", given, lambda: func(*args, **kwargs), [x.data for x in changed])

    def _add(self, name: str, given: Iterable[Any], call: Callable[[], Any], changed: list[Tensor]) -> None:
        """Record a call; time the first of its kind. The tensors ``changed`` are restored after each repetition."""
        key = (name, *map(_kind, given))
        if key not in self._known:
            self._known[key] = self._median(call, changed)
        count, seconds = self.found.get(name, (0, 0.0))
        self.found[name] = count + 1, seconds + self._known[key]

    def _median(self, call: Callable[[], Any], tensors: list[Tensor]) -> float:
        kept, times = [x.clone() for x in tensors], []
        for _ in range(2 + min(CALLS, self._bench.repeats)):
            times.append(self._bench.once(call, queued=True).seconds)
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
        return statistics.median(times[2:])


def _kind(x: Any) -> Any:
    """Return what the time of a call depends on: a tensor's shape, strides and dtype, or any other argument."""
    return (*x.shape, *x.stride(), x.dtype) if isinstance(x, Tensor) else repr(x)
