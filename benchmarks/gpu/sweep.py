"""Warps and stages of each kernel: whether others than the chosen ones give the same numbers in less time."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu.steps import Copies, Step, Visit, execute_on, kernel_name, visit_launches
from gpu.timing import Bench, why
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gecko.ops.backends.dispatch import Launch

STAGES = (1, 2, 3)
MOST_WARPS = 16
CALLS = 5
"""Timed calls, after two others."""


@dataclass(frozen=True)
class Swept:
    """A launch with some number of warps and stages; without ``seconds`` it did not run."""

    step: str
    kernel: str
    warps: int
    stages: int
    chosen: bool
    """Whether these are the operator's own."""
    seconds: float | None = None
    difference: float | None = None
    """Largest ‖x − chosen x‖ / ‖chosen x‖ over the floating-point tensors of the launch."""
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """A launch in a step: the launch number ``index``, from 0, of a kernel."""

    kernel: str
    index: int


def places(step: Step) -> dict[Place, Launch]:
    """Return the launch of each kernel of a step whose tensors have most bytes. They are not run; no card is needed."""
    counts: dict[str, int] = {}
    largest: dict[str, tuple[int, Place, Launch]] = {}

    def note(launch: Launch) -> None:
        name = kernel_name(launch)
        size = sum(x.nbytes for x in launch.arguments.values() if isinstance(x, Tensor))
        if name not in largest or size > largest[name][0]:
            largest[name] = size, Place(name, counts.get(name, 0)), launch
        counts[name] = counts.get(name, 0) + 1

    cpu = torch.device("cpu")
    visit_launches(step.prepare(cpu), cpu, note)
    return {place: launch for _, place, launch in largest.values()}


def variants(launch: Launch) -> list[Launch]:
    """Return the launch itself, and the same with half and twice the warps and 1 to 3 stages."""
    warps = [w for w in (launch.warps // 2, launch.warps, 2 * launch.warps) if 1 <= w <= max(MOST_WARPS, launch.warps)]
    others = [dataclasses.replace(launch, warps=w, stages=s, registers=None) for w in warps for s in STAGES]
    return [launch, *(x for x in others if (x.warps, x.stages) != (launch.warps, launch.stages))]


def sweep(step: Step, call: Callable[[], None], place: Place, bench: Bench) -> Iterator[Swept]:
    """Make the step, and try all variants of one of its launches at its place, on its real arguments.

    Raises:
        RuntimeError: the step does not reach the place.
    """
    found: list[Swept] = []
    execute, count = execute_on(bench.device), 0

    def visit(launch: Launch) -> None:
        nonlocal count
        if kernel_name(launch) == place.kernel:
            if count == place.index:
                with _disable_current_modes():
                    found.extend(swept(str(step), launch, bench, execute))
            count += 1
        execute(launch)

    visit_launches(call, bench.device, visit)
    if not found:
        raise RuntimeError(f"launch {place.index} of {place.kernel} must occur in the step; it has {count} of them.")
    yield from found


def swept(step: str, launch: Launch, bench: Bench, execute: Visit) -> Iterator[Swept]:
    """Yield the variants of a launch, each on the same arguments; afterwards they are as before."""
    before = Copies.of(launch)
    wanted: list[Tensor] = []
    for one in variants(launch):
        result = Swept(step, kernel_name(one), one.warps, one.stages, chosen=one is launch)
        try:
            before.restore()
            execute(one)
            bench.check()
            got = [x.clone() for x in _numbers(one)]
            wanted = wanted or got
            difference = max((_difference(*pair) for pair in zip(got, wanted, strict=True)), default=0.0)
            seconds = _median(one, before, bench, execute)
        except Exception as error:
            yield dataclasses.replace(result, reason=why(error))
            bench.check()  # after an error that CUDA does not recover from, this raises
            continue
        yield dataclasses.replace(result, seconds=seconds, difference=difference)
    before.restore()


def _numbers(launch: Launch) -> list[Tensor]:
    """Return floating-point tensors. Integers are flags, and counts that do not depend on the variant."""
    return [x for x in launch.arguments.values() if isinstance(x, Tensor) and x.is_floating_point()]


def _difference(got: Tensor, wanted: Tensor) -> float:
    """Return the relative difference where the two differ; what neither wrote, which may be NaN, is equal."""
    differs = (got != wanted) & ~(got.isnan() & wanted.isnan())
    if not differs.any():
        return 0.0
    size = wanted.float().where(wanted.isfinite(), torch.zeros((), device=wanted.device)).norm().clamp(min=1e-30)
    found = float((got.float() - wanted.float())[differs].norm() / size)
    return math.inf if math.isnan(found) else found


def _median(launch: Launch, before: Copies, bench: Bench, execute: Visit) -> float:
    times = []
    for _ in range(2 + CALLS):
        before.restore()
        times.append(bench.once(lambda: execute(launch), queued=True).seconds)
    return statistics.median(times[2:])
