"""What ranks do in the tests of compiled blocks; importable by name, as other processes must."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from support import training_jobs as work
from torch import nn

from gecko.models.gecko import Gecko
from gecko.train import Run
from gecko.train.setup import compile_block


def compiled_steps(runs: list[Run], steps: int) -> list[dict[str, Any]]:
    """``exact_steps`` of models whose blocks are compiled before they are sharded, as a run does it.

    Graphs are cut and differentiated as for the device, but nothing is made of them that takes long to compile.
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
