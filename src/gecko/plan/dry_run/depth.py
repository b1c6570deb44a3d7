"""Memory of models of any depth, from dry runs of a few blocks.

All blocks are alike. A model of one more block changes the bytes in use at each moment of a step by the same number: in
the forward pass, in the loss, in the backward pass of the first and the last blocks, and in the update. The bytes in
the backward pass of the blocks between these lie on a line, so the most are at one of its ends.
``tests/plan/test_depth.py`` compares with whole models: the bytes are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from gecko.models import ModelConfig, meta_model
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.parallel.mesh import MeshSizes
from gecko.plan.dry_run.device import DEVICE, FakeGPU
from gecko.plan.dry_run.ledger import MemoryLedger, Peak
from gecko.plan.dry_run.rank import FORWARD, LOSS_MOMENT, UPDATE, backward_of, dry_step
from gecko.train import Run

DEPTHS = SHALLOW, DEEP = 3, 4
"""The fewest blocks of which two at each end, which may be the same, are unlike those between."""


def check_kernels() -> None:
    """Raise ImportError if Triton is missing; without it operators choose what they do not choose on a GPU."""
    if not triton_kernels_installed():
        raise ImportError("a dry run takes the operators of a GPU, which need Triton: pip install 'gecko-lm[kernels]'")


def step_peak(run: Run, sizes: MeshSizes, rank: int) -> Peak:
    """Return ``dry_step(run, sizes, rank).peak`` from steps of at most four blocks.

    Raises:
        ImportError: Triton is missing.
    """
    check_kernels()
    layers = run.model.num_layers
    if layers <= DEEP:
        return dry_step(run, sizes, rank).peak
    shallow, deep = (_peaks(run, sizes, rank, depth) for depth in DEPTHS)
    return max((_extended(shallow[moment], deep[moment], layers) for moment in deep), key=lambda peak: peak.total)


def _peaks(run: Run, sizes: MeshSizes, rank: int, depth: int) -> dict[str, Peak]:
    """Return the peak of each moment of a step of ``depth`` blocks, by the moment's name in the whole model."""
    memory = dry_step(replace(run, model=replace(run.model, num_layers=depth)), sizes, rank).memory
    names = _names(depth, run.model.num_layers)
    return {whole: replace(memory.peak(moment), moment=whole) for moment, whole in names}


def _names(depth: int, layers: int) -> Iterator[tuple[str, str]]:
    """Yield the names of each moment with ``depth`` and with ``layers`` blocks."""
    for moment in (FORWARD, LOSS_MOMENT, UPDATE):
        yield moment, moment
    for block in range(2):
        yield backward_of(block), backward_of(block)
        yield backward_of(depth - 1 - block), backward_of(layers - 1 - block)


def _extended(shallow: Peak, deep: Peak, layers: int) -> Peak:
    """Return the peak of ``layers`` blocks from those of ``DEPTHS`` at the same moment."""

    def line(before: int, after: int) -> int:
        return after + (layers - DEEP) * (after - before)

    uses = {use: line(shallow.uses.get(use, 0), deep.uses.get(use, 0)) for use in {**shallow.uses, **deep.uses}}
    return Peak(line(shallow.total, deep.total), uses, deep.moment)


class BlockMemory(NamedTuple):
    """Bytes of one block, besides its weights."""

    kept: int
    """Bytes that it keeps for backward."""
    work: int
    """The most bytes that are in use while it reads."""


@lru_cache(maxsize=4)
def block_memory(config: ModelConfig, dtype: torch.dtype, tokens: int) -> BlockMemory:
    """Measure a block of that dtype that reads a row of ``tokens`` tokens.

    Operators are those of a GPU where Triton is installed, and PyTorch's elsewhere.
    """
    one, two = (_read(config, depth, dtype, tokens, training=True) for depth in (1, 2))
    return BlockMemory(two.kept - one.kept, _read(config, 1, dtype, tokens, training=False).work)


def _read(config: ModelConfig, depth: int, dtype: torch.dtype, tokens: int, *, training: bool) -> BlockMemory:
    """Return the memory of a model of ``depth`` blocks that reads a row, and keeps its hidden states."""
    ledger = MemoryLedger()
    with FakeGPU(ledger).running(), torch.set_grad_enabled(training):
        model = meta_model(replace(config, num_layers=depth)).to(dtype).to_empty(device=DEVICE)
        model.sharded = True  # else states name the model by the numbers of its weights
        weights = ledger.in_use
        ledger.restart()
        hidden = model.hidden(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
        kept = ledger.in_use - weights
        del hidden
        return BlockMemory(kept, ledger.peak().total - weights)
