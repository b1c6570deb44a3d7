"""Memory of a step of many blocks and rows, from dry runs of a few.

All blocks are alike. A model of one more block changes the bytes in use at each moment of a step by the same number: in
the forward pass, in the loss, in the backward pass of the first and the last blocks, and in the update. The bytes in
the backward pass of the blocks between these lie on a line, so the most are at one of its ends.
``tests/plan/test_depth.py`` compares with whole models: the bytes are equal. Rows differ by their documents alone, so
one more row changes the bytes by nearly the same number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from gecko.models import ModelConfig, meta_model
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.parallel.mesh import MeshSizes
from gecko.plan.dry_run.device import DEVICE, FakeGPU, MemoryLedger, Peak
from gecko.plan.dry_run.rank import FORWARD, LOSS_MOMENT, UPDATE, backward_of, dry_step
from gecko.train import Run, ScheduleSettings

DEPTHS = SHALLOW, DEEP = 3, 4
"""The fewest blocks of which two at each end, which may be the same, are unlike those between."""
ROWS = FEW, MORE = 2, 4
PARTS = 2
"""Accumulated parts that are run of more."""


def check_kernels() -> None:
    """Raise ImportError if Triton is missing; without it operators choose what they do not choose on a GPU."""
    if not triton_kernels_installed():
        raise ImportError("a dry run takes the operators of a GPU, which need Triton: pip install 'gecko-lm[kernels]'")


def step_peak(run: Run, sizes: MeshSizes, rank: int) -> Peak:
    """Return ``dry_step(run, sizes, rank).peak`` from steps of at most four blocks and rows. Raise ImportError if
    Triton is missing."""
    check_kernels()
    run = replace(run, schedule=ScheduleSettings())  # batches of its final size
    if (parts := run.gradient_accumulation_steps) > PARTS and not run.data.carry_state:
        # What the second part finds, every later one does.
        run = replace(run, batch_size=run.batch_size // parts * PARTS, gradient_accumulation_steps=PARTS)
    return max(_peaks(run, sizes, rank).values(), key=lambda peak: peak.total)


def _peaks(run: Run, sizes: MeshSizes, rank: int) -> dict[str, Peak]:
    """Return the memory at its peak in each moment of a rank's step (forward pass, loss, backward pass of each block,
    optimizer). Many rows and many blocks are extended from few."""
    parts = sizes.data_ranks * run.gradient_accumulation_steps
    if (rows := run.batch_size // parts) > MORE:
        few, more = (_peaks(replace(run, batch_size=parts * number), sizes, rank) for number in ROWS)
        return {moment: _on_line(few[moment], more[moment], (rows - MORE) / (MORE - FEW), moment) for moment in more}
    if (layers := run.model.num_layers) > DEEP:
        shallow, deep = (_peaks(replace(run, model=replace(run.model, num_layers=n)), sizes, rank) for n in DEPTHS)
        ends = (0, 1, layers - 2, layers - 1)
        names = {name: (name, name) for name in (FORWARD, LOSS_MOMENT, UPDATE)} | {
            backward_of(block): tuple(backward_of(block if block < 2 else block - layers + depth) for depth in DEPTHS)
            for block in ends
        }
        return {
            whole: _on_line(shallow[before], deep[after], layers - DEEP, whole)
            for whole, (before, after) in names.items()
        }
    memory = dry_step(run, sizes, rank).memory
    moments = FORWARD, LOSS_MOMENT, UPDATE, *map(backward_of, range(layers))
    return {moment: memory.peak(moment) for moment in moments}


def _on_line(before: Peak, after: Peak, steps: float, moment: str) -> Peak:
    """Return the peak that lies ``steps`` times further than ``after`` on the line from ``before`` to it."""

    def line(first: int, second: int) -> int:
        return second + round(steps * (second - first))

    uses = {use: line(before.uses.get(use, 0), after.uses.get(use, 0)) for use in {**before.uses, **after.uses}}
    return Peak(line(before.total, after.total), uses, moment)


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
