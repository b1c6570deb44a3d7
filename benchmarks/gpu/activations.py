"""Activations that a block keeps for the backward pass, compared with inputs and outputs of its matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from gpu.timing import Bench
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.models.gecko import Block
from gecko.segments import Segments
from gecko.train.step import autocast

MIXING = ("gecko.layers.gated_attention.chunk_attention", "gecko.layers.gated_attention.working_memory")


@dataclass(frozen=True)
class Activations:
    model: str
    length: int
    kept: int
    """Bytes kept for the backward pass."""
    needed: int
    """Bytes that linear layers, attention and memory read and write, each tensor once."""


class _Storages:
    """Counts storages once each, without those of parameters and of their copies by autocast."""

    def __init__(self, model: nn.Module) -> None:
        self._sizes: dict[int, int] = {}
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._shapes = {(*sorted(parameter.shape), parameter.dtype) for parameter in model.parameters()}
        self._alive: list[Tensor] = []

    def add(self, *found: Any) -> None:
        for tensor in found:
            if isinstance(tensor, Tensor) and not self._of_parameter(tensor):
                self._sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                self._alive.append(tensor)  # so that its address is not used again

    def _of_parameter(self, tensor: Tensor) -> bool:
        rounded = tensor.dtype == torch.bfloat16 and (*sorted(tensor.shape), torch.float32) in self._shapes
        return rounded or tensor.untyped_storage().data_ptr() in self._parameters

    @property
    def total(self) -> int:
        return sum(self._sizes.values())


def measure(name: str, length: int, bench: Bench) -> Activations:
    """Measure one block of a preset on one row."""
    config = GeckoConfig.preset(name)
    torch.manual_seed(0)
    block = Block(config, 0).to(bench.device)
    kept, needed = _Storages(block), _Storages(block)
    # Under autocast, embeddings and outputs of blocks are float32.
    x = bench.random(1, length, config.model_dim, dtype=torch.float32).requires_grad_()
    precision = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.add(tensor), tensor)[1], lambda x: x)
    with autocast(precision, bench.device), _watched(block, needed), hooks:
        block(x, None, Segments.build(1, length, device=bench.device))
    return Activations(name, length, kept.total, needed.total)


@contextmanager
def _watched(block: nn.Module, needed: _Storages) -> Iterator[None]:
    """Record what the products of a block read and write."""

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        needed.add(*inputs, output)

    handles = [module.register_forward_hook(note) for module in block.modules() if isinstance(module, nn.Linear)]
    with ExitStack() as stack:
        for target in MIXING:
            stack.enter_context(_watched_function(target, needed))
        yield
    for handle in handles:
        handle.remove()


def _watched_function(target: str, needed: _Storages) -> Any:
    package, _, name = target.rpartition(".")
    function = getattr(__import__(package, fromlist=[name]), name)

    def watched(*inputs: Any, **options: Any) -> Any:
        output = function(*inputs, **options)
        needed.add(*inputs, output[0])
        return output

    return patch(target, watched)
