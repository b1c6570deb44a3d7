"""Traces steps of ranks on CPUs: numbers that the host reads, and collectives of values on the host."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.training_jobs import train_run
from torch.utils._python_dispatch import TorchDispatchMode

from gecko.train import Run
from gecko.train.trainer import Trainer

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class Trace(TorchDispatchMode):
    """Records the names of operations that read numbers, and of collectives of a group."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        super().__init__()
        self._control = control.group_name
        self.reads: list[str] = []
        self.control: list[str] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in READS:
            self.reads.append(name)
        if name.startswith("c10d::"):
            if any(_group_name(x) == self._control for x in args):
                self.control.append(name)
            else:
                self.others.add(name)
        return function(*args, **(kwargs or {}))


def _group_name(x: Any) -> str | None:
    if not isinstance(x, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(x).group_name
    except (RuntimeError, TypeError):
        return None


def traced_run(run: Run) -> dict[str, Any]:
    """Run training; return what happens between a batch's arrival and the optimizer, and once per step around it."""
    start, proceed = Trainer._start, Trainer._should_continue
    within, around = [], []

    def starting(self: Trainer, number: int) -> Any:
        with Trace(self.ranks.control) as trace:
            within.append(trace)
            return start(self, number)

    def proceeding(self: Trainer, stop: Any) -> bool:
        with Trace(self.ranks.control) as trace:
            around.append(trace)
            return proceed(self, stop)

    with (
        mock.patch.object(Trainer, "_start", starting),
        mock.patch.object(Trainer, "_should_continue", proceeding),
        mock.patch("gecko.models.gecko.check_tokens"),  # of tokens on a CPU only
    ):
        train_run(run)
    return {
        "steps": len(within),
        "reads": [name for trace in within for name in trace.reads],
        "control": [name for trace in within for name in trace.control],
        "others": {name for trace in within for name in trace.others},
        "around": [trace.control for trace in around],
    }
