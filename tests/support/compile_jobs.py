"""Functions that ranks run in the tests of compiled blocks; processes import them by name."""

from typing import Any
from unittest import mock

import torch
from support import training_jobs as work
from torch import nn

from gecko.models.gecko import Gecko
from gecko.train import Run
from gecko.train.model import compile_block


def compiled_steps(runs: list[Run], steps: int) -> list[dict[str, Any]]:
    """Run ``exact_steps`` with blocks that are compiled before they are sharded, as in a training run.

    The backend aot_eager cuts and differentiates graphs as usual, but generates no code, which would take long.
    """
    shard, compile_module = work.empty_sharded_model, nn.Module.compile

    def sharded(model: Gecko, *arguments: Any, **settings: Any) -> Gecko:
        for block in model.blocks:
            compile_block(block)
        return shard(model, *arguments, **settings)

    def quickly(module: nn.Module, **settings: Any) -> None:
        compile_module(module, backend="aot_eager", **settings)

    with mock.patch.object(work, "empty_sharded_model", sharded), mock.patch.object(nn.Module, "compile", quickly):
        results = work.exact_steps(runs, steps)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.compiler.reset()
    return results
