"""Host time of one block on a GPU, measured without a GPU.

    python benchmarks/host.py --write           # writes benchmarks/results/host_PROCESSOR.md

A GPU waits for its host if a step has few tokens. Here operators use their Triton kernels for CPU tensors, and a launch
is only counted, so that the measured time is that of Python, PyTorch's dispatcher and autograd. Tensors are tiny,
because PyTorch's own operations run, products in bfloat16 slowly on many processors. The time is that of the thread's
processor, so that other processes hardly change it. A block is the difference between models of six layers and of two.

A rank of a context group is measured alone: PyTorch's fake process group takes what it sends, and zeros arrive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from gpu.training import equal_llama
from kernels.recording import launches
from measuring import in_turns, of_processor, parsed, parser_of, publish, table
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gecko.config import GeckoConfig
from gecko.models import ModelConfig, build_model
from gecko.ops.backends import dispatch
from gecko.parallel.context import ContextGroup

DEPTHS = 2, 6
WARMING = 3
TOKENS = 64

LONGER = 16, 64
"""The number of launches is also counted for these multiples of ``TOKENS``."""

SMALL = GeckoConfig(
    vocab_size=256, model_dim=16, key_dim=16, value_dim=16, num_heads=1, ffn_dim=16, num_layers=1, chunk_size=32,
    cema_modes=4, timestep_groups=4,
)  # fmt: skip

NO_LAUNCH = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "promote_types",
)  # fmt: skip
"""PyTorch's operations that start nothing on a GPU and are no views."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One variant of the step; ``context``: as the second rank of a context group of two."""

    config: ModelConfig
    way: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    tokens: int = TOKENS
    context: bool = False


class LoneRank(ContextGroup):
    """A rank of a context group whose other ranks make the same calls."""

    def _gather(self, values: Tensor) -> Tensor:
        return torch.stack([values] * self.size)


class Step:
    """Loss and backward of one model on one row, as in training."""

    def __init__(self, case: Case, depth: int) -> None:
        self._model = build_model(dataclasses.replace(case.config, num_layers=depth))
        self._tokens = torch.randint(256, (1, case.tokens + 1))
        self._options = {"context": LoneRank(dist.group.WORLD)} if case.context else {}

    def __call__(self) -> tuple[float, float]:
        """Return the seconds of forward and backward."""
        begin = time.thread_time()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = self._model.loss(self._tokens[:, :-1], self._tokens[:, 1:], **self._options)
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        self._model.zero_grad()
        return middle - begin, end - middle


@contextlib.contextmanager
def kernels_counted() -> Iterator[list[object]]:
    """Make operators use Triton kernels for plain tensors; yield the kernels that would be launched."""
    launched: list[object] = []

    def run(launch: dispatch.Launch) -> None:
        launched.append(launch.kernel)

    with (
        patch.object(dispatch, "triton_kernels_run_on", lambda x: x.dtype in dispatch.DTYPES),
        patch.object(dispatch, "_cpu_kernels_installed", lambda: False),
        patch.object(dispatch.Launch, "run", run),
    ):
        yield launched


class OperationsCounted(TorchDispatchMode):
    """Mode that counts PyTorch's own operations that would be launches on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        self.count += namespace == "aten" and not func.is_view and name not in NO_LAUNCH
        return func(*args, **(kwargs or {}))


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of forward and backward of one block, and the launches of our kernels and of PyTorch's.

    All variants take turns; medians count, after some rounds for imports and compilation.
    """
    steps = {(name, depth): Step(case, depth) for name, case in cases.items() for depth in DEPTHS}

    def counted(step: Step, case: Case) -> tuple[float, ...]:
        with case.way(), kernels_counted() as launched:
            forward, backward = step()
        return 1e3 * forward, 1e3 * backward, len(launched)

    def operations(step: Step, case: Case) -> int:
        """Return the number of PyTorch's launches of a step, as recorded for a GPU."""
        found = OperationsCounted()

        def watched() -> None:
            with case.way(), found:
                step()

        launches(watched, lambda _: None)
        return found.count

    turns = in_turns({key: partial(counted, step, cases[key[0]]) for key, step in steps.items()}, WARMING + rounds)
    of = {
        key: [*map(statistics.median, zip(*turns[key][WARMING:], strict=True)), operations(step, cases[key[0]])]
        for key, step in steps.items()
    }
    few, many = DEPTHS
    return {
        name: [(b - a) / (many - few) for a, b in zip(of[name, few], of[name, many], strict=True)] for name in cases
    }


def main() -> None:
    given = parsed(parser_of(__doc__, rounds=(30, "in turns")))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    # As if the call were traced, operators are those that ``torch.library`` registers.
    traced = partial(patch.object, dispatch, "is_watched", lambda: True)
    cases = {
        "Gecko": Case(SMALL),
        "Gecko, every operator by PyTorch's dispatcher": Case(SMALL, traced),
        "Llama of the same depth and width": Case(equal_llama(SMALL)),
        "Gecko, a context rank": Case(SMALL, context=True),
    }
    for times in LONGER:
        longer = Case(SMALL, tokens=times * TOKENS)
        cases[f"Gecko, {times} × the tokens"] = longer
        cases[f"Gecko, a context rank, {times} × the tokens"] = dataclasses.replace(longer, context=True)
    found = measure(cases, given.rounds)
    own = sum(found["Gecko"][:2])
    publish(
        of_processor("host"), given, "What the host does for a block on a GPU", "One thread used.",
        "Milliseconds of the thread's processor for loss and backward a block, in bfloat16 by autocast; medians of "
        f"{given.rounds}, all in turns. PyTorch's launches are its operations that are neither views nor allocations. "
        "**No GPU: launches of kernels are counted, not made, and take some microseconds each beside this; PyTorch's "
        f"own operations are computed, on one row of {TOKENS} tokens and {SMALL.model_dim} features, so that it takes "
        "them hardly longer than to be dispatched.** In the longer rows, which are here for their launches, PyTorch's "
        "operations take most of the time.",
        table(
            ["", "forward|.2f", "backward|.2f", "both|.2f", "of the first row|.2f", "our kernels launched|.0f",
             "PyTorch's launches|.0f"],
            ((name, forward, backward, forward + backward, (forward + backward) / own, ours, theirs)
             for name, (forward, backward, ours, theirs) in found.items()),
        ),
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
