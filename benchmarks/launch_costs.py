"""Time that a launch needs on an H200, predicted from its code, compiled for sm_90, and from its tensors.

The time of a launch is the longest of four:

- bytes of its tensors, each read or written once, over the bandwidth of a large copy; less bandwidth if too few bytes
  are in flight on a multiprocessor;
- instructions, issued by four schedulers per multiprocessor, one per cycle, and per warp one in two cycles;
- FLOPs of its tensor-core instructions over their rate;
- all of this only on the multiprocessors that have a program, in whole waves of programs.

An operation of PyTorch needs the longer of its bytes and its FLOPs. Every launch takes ``GAP`` besides. The latency of
barriers and of chains of dependent instructions is not in it: this is what the design allows, not a measured time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gpu.kernel_times import Operations, kernel_name
from kernels.compiling import compiled, usage
from kernels.recording import Configuration, launches
from kernels.sass import Code, Instruction
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gecko.experiments.rows import grouped
from gecko.ops.backends.dispatch import Launch, blocks

PROCESSORS, CLOCK = 132, 1.755e9
COPY = 4.3e12
"""Bytes per second of a large copy, nine tenths of the memory's rate."""
IN_FLIGHT = 23_000
"""Bytes of loads that a multiprocessor must have in flight to reach its share of ``COPY``: 0.7 µs of it."""
PRODUCTS = 700e12
"""FLOP/s of a large product in bfloat16 by cuBLAS, the reference rate of products."""
RATES = {"HGMMA.BF16": 989e12, "HGMMA.TF32": 494e12, "HMMA.BF16": 620e12, "HMMA.TF32": 310e12}
"""FLOP/s of tensor-core instructions."""
GAP = 1.5e-6
"""Seconds between two launches in a queue."""
THREADS, REGISTERS, SHARED, PROGRAMS = 2048, 65_536, 233_472, 32
"""Limits of a multiprocessor."""

_WIDTHS = {"8": 1, "U8": 1, "16": 2, "U16": 2, "64": 8, "128": 16}


def _average_trips(a: dict[str, Any]) -> list[float]:
    """Return the tiles of a row, and the chunks of a unit."""
    return [a["p_first"].numel() / a["items"] / (a["p_tiles"].numel() - 1), a["unit"] / a["chunk"]]


def _chain_trips(a: dict[str, Any]) -> list[float]:
    """Return the chunks, and the blocks of rows and of sums of one memory."""
    return [a["steps"], a["key_width"] / a["block_r"], a["key_width"] / a["block_s"]]


TRIPS: dict[str, Callable[[dict[str, Any]], list[float]]] = {
    "cema.filter_kernel": _average_trips,
    "cema.gradients_kernel": _average_trips,
    "cema.response_kernel": lambda a: [a["chunk"]],
    "cema.coefficient_gradients_kernel": lambda a: [a["batch"], a["chunk"] / a["lags"]],
    "timestep_norm.normalise_tiles": lambda _: [2.0],  # polls for the tiles before
    "timestep_norm.gradients": lambda _: [2.0],
    "loss._token": lambda a: [blocks(a["vocabulary"], a["block"])],
    "norms._gradients": lambda a: [blocks(a["rows"], a["steps"] * a["programs"])],
    "qk_scale_shift._gradients": lambda a: [blocks(a["batch"] * a["length"], a["steps"] * a["programs"])],
    "chunk_attention._log_sum_kernel": lambda a: [0.75 * a["chunk_size"] / a["block_k"]],
    "chunk_attention._row_dot_kernel": lambda a: [a["p_x"].shape[-1] / 1024],
    "working_memory._weigh_kernel": lambda a: [a["chunk_size"] / a["block_t"]],
    "working_memory._factor_kernel": lambda a: [(a["steps"] + 1) / 2],
    "working_memory._factor_backward_kernel": lambda a: [a["steps"]],
    "working_memory._chain_kernel": _chain_trips,
    "working_memory._chain_backward_kernel": _chain_trips,
}
"""How often loops run, by depth. Kernels without loops are left out."""

WINDOWED = ("_weights_kernel", "_score_grads_kernel")
"""Kernels over the windows of a piece of chunks. They read only these chunks, and skip keys after their queries."""


@dataclass(frozen=True)
class Cost:
    """One launch, or one operation of PyTorch, and what it needs."""

    name: str
    seconds: float
    bytes: float
    instructions: float = 0.0
    """Instructions of all warps."""
    flops: float = 0.0
    warps: int = 0
    registers: int = 0
    resident: int = 0
    """Programs that a multiprocessor holds."""
    waves: float = 0.0
    in_flight: int = 0
    """Bytes of loads in flight on a multiprocessor."""
    limit: str = "bytes"


def _operation(name: str, given: list[Any], made: list[Any]) -> Cost:
    read, written = ([x for x in found if isinstance(x, Tensor)] for found in (given, made))
    size = _bytes(read) + _bytes([x for x in written if all(x is not y for y in read)])
    flops = 0.0
    if name in ("bmm", "baddbmm", "baddbmm_", "mm", "addmm", "addmm_"):
        a, b = read[:2] if name in ("bmm", "mm") else read[1:3]
        flops = 2.0 * a.numel() * b.shape[-1]
    seconds = max(size / COPY, flops / PRODUCTS) + GAP
    limit = "products" if flops / PRODUCTS > size / COPY else "bytes"
    return Cost(f"torch.{name}", seconds, size, flops=flops, limit=limit)


def costs(call: Callable[[], Any]) -> list[Cost]:
    """Return the costs of everything that ``call`` does on the device."""
    found: list[Cost | Launch] = []

    def visit(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found.append(_operation(func._opname, tree_leaves((args, kwargs)), tree_leaves(result)))

    def watched() -> None:
        with Operations(visit):
            call()

    launches(watched, lambda launch: found.append(launch))
    return [x if isinstance(x, Cost) else of_launch(x) for x in found]


@cache
def _code(configuration: Configuration) -> tuple[Code, dict[str, str], int]:
    kernel = compiled(configuration, 90)
    binary = kernel.asm["cubin"]
    return Code.of(binary), usage(binary), kernel.metadata.shared


def of_launch(launch: Launch) -> Cost:
    """Predict the time of a launch."""
    code, used, shared = _code(Configuration.of(launch))
    name = kernel_name(launch)
    arguments = dict(launch.arguments)
    trips = TRIPS[name](arguments) if name in TRIPS else []
    registers, programs = int(used["REG"]), math.prod(launch.grid)
    resident = _resident(registers, shared, launch.warps)
    waves = programs / (resident * PROCESSORS)
    busy = _share_of_keys(launch) * programs
    size = _moved(launch)
    executed = code.executed(trips) * launch.warps * busy
    flops = {kind: busy * launch.warps * code.executed(trips, of(kind)) for kind in RATES}
    loads = resident * 32 * launch.warps * _loads(code)
    per_processor = math.ceil(programs / PROCESSORS)
    # The processor with most programs ends last; its schedulers share its warps, and a warp issues every other cycle.
    held = min(resident, per_processor) * launch.warps
    cycles = busy / programs * per_processor * launch.warps * code.executed(trips) / min(4.0, held / 2)
    idle = min(1.0, min(programs, PROCESSORS * resident) * loads / resident / (PROCESSORS * IN_FLIGHT))
    times = {
        "bytes": size / COPY, "bytes in flight": size / COPY / max(idle, 1e-9) if loads else 0.0,
        "instructions": cycles / CLOCK,
        "products": sum(amount / RATES[kind] for kind, amount in flops.items()) * max(1.0, PROCESSORS / programs),
    }  # fmt: skip
    limit = max(times, key=lambda kind: times[kind])
    return Cost(
        name, times[limit] + GAP, size, executed, sum(flops.values()), launch.warps, registers, resident, waves,
        loads, limit,
    )  # fmt: skip


def of(kind: str) -> Callable[[Instruction], float]:
    """Return a function that gives the FLOPs that one warp's instruction does, if it is of this kind."""
    unit, _, dtype = kind.partition(".")

    def flops(x: Instruction) -> float:
        if x.kind != unit or (("TF32" in x.name) != (dtype == "TF32")):
            return 0.0
        if unit == "HGMMA":
            shape = re.search(r"\.(\d+)x(\d+)x(\d+)", x.name)
            return 2.0 * math.prod(map(int, shape.groups())) / 4 if shape else 0.0  # four warps issue it together
        return 2.0 * 16 * 8 * (8 if "1688" in x.name else 4 if "1684" in x.name else 16)

    return flops


def _resident(registers: int, shared: int, warps: int) -> int:
    """Return the number of programs that fit on a multiprocessor."""
    of_a_warp = 256 * blocks(registers * 32, 256)  # registers are given to warps in pieces of 256
    return max(1, min(PROGRAMS, THREADS // (32 * warps), REGISTERS // (of_a_warp * warps), SHARED // (shared + 1024)))


def _loads(code: Code) -> int:
    """Return the bytes that a thread loads from device memory before it must wait: those of the loop, or of straight
    code, that loads most. Asynchronous copies are counted wherever they are."""

    def size(x: Instruction) -> int:
        return next((_WIDTHS[part] for part in x.name.split(".") if part in _WIDTHS), 4)

    streams = [x for x in code.instructions if x.kind in ("LDG", "LDGSTS")]
    outside = [x for x in streams if not any(loop.holds(x.address) for loop in code.loops)]
    inner = [[x for x in streams if loop.holds(x.address)] for loop in code.loops if code.innermost(loop)]
    return max(sum(map(size, group)) for group in [outside, *inner])


def _moved(launch: Launch) -> float:
    """Return the bytes that a launch reads and writes, each once; caches serve what is read again."""
    tensors = {x.data_ptr(): x for x in launch.arguments.values() if isinstance(x, Tensor) and x.numel()}
    if launch.kernel.__name__ not in WINDOWED:
        return _bytes(list(tensors.values()))
    arguments = launch.arguments
    piece = arguments["p_weights"].shape[0] / (arguments["p_near"].shape[0] * arguments["chunks"])
    whole = [x for name, x in arguments.items() if isinstance(x, Tensor) and name not in ("p_weights", "p_scores")]
    own = [x for name, x in arguments.items() if name in ("p_weights", "p_scores")]
    return piece * _bytes(whole) + _share_of_keys(launch) * _bytes(own)


def _share_of_keys(launch: Launch) -> float:
    """Return the share of a launch's programs that have a key before one of their queries."""
    if launch.kernel.__name__ not in WINDOWED:
        return 1.0
    return 0.78 if launch.arguments["previous"] else 0.56


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(x.numel() * x.element_size() for x in tensors))


def merged(found: list[Cost]) -> Iterator[tuple[int, Cost]]:
    """Yield the launches of each name, in their order, as one: how many, and their sums."""
    for group in grouped(found, lambda cost: (cost.name, cost.registers)).values():
        first = group[0]
        sums = {name: sum(getattr(x, name) for x in group) for name in ("seconds", "bytes", "instructions", "flops")}
        limit = max(group, key=lambda x: x.seconds).limit
        yield len(group), replace(first, **sums, waves=max(x.waves for x in group), limit=limit)
