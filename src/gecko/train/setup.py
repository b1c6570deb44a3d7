"""Preparation of a run: the starting model, and the number of steps in a time budget.

A time budget becomes a number of steps once, when the run starts, so that the schedule depends on steps alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gecko.data import IGNORED, Batch
from gecko.io.checkpoints import model_folder
from gecko.io.quantization import is_quantized
from gecko.models import LanguageModel, build_model, load_any, meta_model
from gecko.models.gecko import Block
from gecko.parallel.fsdp import empty_sharded_model, fill
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoints.lora import add_adapters
from gecko.train.data import Prefetcher, RunData
from gecko.train.evaluate import evaluate, sample_text
from gecko.train.float8 import use_float8
from gecko.train.optimizers.build import build_optimizer
from gecko.train.run import Run, is_half
from gecko.train.step import split_batch, train_step
from gecko.train.tokenizer import check_same_tokenizer


def starting_model(run: Run, ranks: Ranks, device: torch.device, *, fresh: bool) -> LanguageModel:
    """Return a new model or that of ``run.init_from``. Without ``fresh``, its weights are still to be loaded.

    With several ranks, only the first builds the whole model, on the CPU; each rank receives its shards.
    """
    if ranks.world == 1:
        # Adapters do not contain the weights that they change.
        model = (_initial(run) if fresh or run.lora_rank is not None else build_model(run.model)).to(device)
        if run.lora_rank is not None:
            add_adapters(model, run.lora_rank)
        return configured(model, run)
    if run.lora_rank is not None:
        raise ValueError(f"lora_rank trains adapters in one process; got {ranks.world}. Set lora_rank=none.")
    template = configured(meta_model(run.model), run)
    model = empty_sharded_model(template, ranks.sharding_mesh, device, bfloat16=is_half(run.precision))
    if fresh:
        weights = ranks.run_or_abort_all(lambda: dict(_initial(run).named_parameters()) if ranks.is_main else None)
        fill(model, weights)
    return model


def configured(model: LanguageModel, run: Run) -> LanguageModel:
    """Return ``model`` with the run's settings; its blocks are compiled if the run says so."""
    model.activation_checkpointing, model.z_loss = run.activation_checkpointing, run.z_loss
    use_float8(model, run.precision)
    if run.compile:
        for block in model.blocks:
            compile_block(block)
    return model


def compile_block(block: nn.Module, **settings: Any) -> None:
    """Compile a block by ``torch.compile`` with ``settings``, except the operators that mix tokens.

    The layout of these depends on the documents of each batch and is computed on the host. The rest has fixed shapes,
    so it is compiled once and recomputed by the same code. On a context rank the whole mixer is excepted.
    """
    if isinstance(block, Block):  # a Llama's attention is never compiled
        mixer: Any = block.mixer
        for module in (mixer.norm, mixer.cema):
            module.forward = torch.compiler.disable(module.forward)
        mixer._mix = torch.compiler.disable(mixer._mix)
        mixer._forward_on_rank = torch.compiler.disable(mixer._forward_on_rank)
    block.compile(dynamic=False, **settings)


def _initial(run: Run) -> LanguageModel:
    if run.init_from is None:
        return build_model(run.model)
    folder = model_folder(run.init_from)
    model = load_any(folder)
    found = model.config.to_dict()
    different = [name for name, value in run.model.to_dict().items() if found.get(name, ...) != value]
    if different:
        raise ValueError(
            f"init_from must hold a model of this run's architecture; {folder} differs in {', '.join(different)}. "
            "Set model.* to what its config.json says."
        )
    if any(map(is_quantized, model.state_dict().values())):
        raise ValueError(f"init_from must hold a model that is not quantised; {folder} is. Use the one it was made of.")
    check_same_tokenizer(folder, run.data.tokenizer)
    return model.float().train()


WARMUP_STEPS = 4
"""Steps that are not timed, because the first steps of a process are several times slower than the rest."""
TIMED_STEPS = 8
MEASURING_PART = 0.1
"""Maximum fraction of the time budget spent on measuring; at least one step is measured."""
WRITE_BYTES_PER_SECOND = 200e6
"""Assumed speed of saving a checkpoint: write, flush to disk and read for the checksums."""
REPORT_SECONDS = 4.0
"""Assumed time to draw the report and to end the process."""
SLACK_SECONDS = 20.0
SLACK_PART = 0.1
"""A run of one step may end this many seconds, or this fraction of the budget, after the budget."""
_SAMPLED = 8
"""Number of tokens generated to time the sample."""


@dataclass(frozen=True)
class Costs:
    """Seconds that each part of a run takes."""

    step: float
    evaluation: float
    """Seconds of one evaluation of ``evaluation.rows``."""
    checkpoint: float
    end: float
    """Seconds after the last step: the final held-out loss, the sample and the report."""

    def seconds(self, run: Run, steps: int) -> float:
        """Return the seconds of a run of ``steps`` steps, with evaluations before the first and after the last step."""
        evaluations = 1 + -(-steps // run.evaluation.every)
        checkpoints = -(-steps // run.checkpoint.every)
        return steps * self.step + evaluations * self.evaluation + checkpoints * self.checkpoint + self.end


@dataclass(frozen=True)
class Budget:
    steps: int
    seconds: float
    """Expected seconds from now until the command ends."""
    left: float
    """Seconds left of ``run.minutes``."""


def steps_in_budget(
    run: Run, model: LanguageModel, batches: Prefetcher, data: RunData, ranks: Ranks, begin: float
) -> Budget:
    """Return the number of steps, at least 1, for which the whole command takes at most ``run.minutes``.

    All ranks measure together, and all use the first rank's times.
    The measured steps use a learning rate of 0 and a separate optimizer, so the model does not change.

    Args:
        begin: ``time.perf_counter()`` at the start of the command.
    """
    if run.minutes is None:
        raise ValueError("minutes must be set to measure how many steps fit into them; got None.")
    end = begin + run.minutes * 60
    step = _step_seconds(run, model, batches, ranks, MEASURING_PART * (end - time.perf_counter()))
    costs = ranks.broadcast(_costs(run, model, data, ranks, step))
    left = ranks.broadcast(end - time.perf_counter())
    _check_one_step_fits(run, costs.seconds(run, 1), left)
    steps = most_steps(run, costs, left)
    return Budget(steps, costs.seconds(run, steps), left)


def _check_one_step_fits(run: Run, needed: float, left: float) -> None:
    """Raise ValueError if a run of one step ends much later than ``run.minutes``."""
    assert run.minutes is not None
    if needed - left <= max(SLACK_SECONDS, SLACK_PART * run.minutes * 60):
        return
    enough = math.ceil(2 * (needed + run.minutes * 60 - left) / 60)
    raise ValueError(
        f"minutes={run.minutes:g} is too short for this run: a single step with its held-out losses, checkpoint, "
        f"sample and report takes about {needed / 60:.1f} minutes. Nothing was trained. Try minutes={enough}, or "
        "fewer evaluation.rows, evaluation.final_rows, sample.tokens and rows in a batch."
    )


def _step_seconds(run: Run, model: LanguageModel, batches: Prefetcher, ranks: Ranks, limit: float) -> float:
    """Return the median time of a step after warm-up; the shortest time if ``limit`` seconds pass during warm-up.

    If a step takes longer than ``limit``, estimate it from one row: measuring it would use up the time for training.
    """
    device, full = next(model.parameters()).device, run.first_full_step
    optimizer = build_optimizer(model, run.optimizer)

    def step_of(batch: Batch, parts: int) -> None:
        train_step(
            model, optimizer, split_batch(batch, parts, device, ranks), learning_rate=0.0, clip=run.optimizer.clip,
            precision=run.precision, ranks=ranks,
        )  # fmt: skip

    def one_step(step: int) -> None:
        step_of(batches.batch(full + step), run.gradient_accumulation_steps)

    if not run.compile:  # a compiler would compile the model for batches of one row too
        first = batches.batch(full)
        row = _fullest_row(first)
        # The first call is slower than the rest: kernels are built and memory is allocated.
        estimate = len(first.tokens) * min(_timed(lambda: step_of(row, 1)) for _ in range(2))
        if ranks.broadcast(estimate > limit):
            model.zero_grad(set_to_none=True)
            return estimate
    seconds: list[float] = []
    while len(seconds) < WARMUP_STEPS + TIMED_STEPS and (not seconds or ranks.broadcast(sum(seconds) < limit)):
        seconds.append(_timed(lambda: one_step(len(seconds))))
    model.zero_grad(set_to_none=True)
    return statistics.median(seconds[WARMUP_STEPS:]) if len(seconds) > WARMUP_STEPS else min(seconds)


def _fullest_row(batch: Batch) -> Batch:
    """Return the row with the most targets, as a batch."""
    at = int((batch.targets != IGNORED).sum(1).argmax())
    return Batch(*(x[at : at + 1] for x in (batch.tokens, batch.targets, batch.segment_ids)))


def _costs(run: Run, model: LanguageModel, data: RunData, ranks: Ranks, step: float) -> Costs:
    """Estimate the costs from one batch of held-out rows and a few tokens of a sample."""
    at_once = data.held_out.batch_size * ranks.data_ranks
    batch = _timed(lambda: evaluate(model, data.held_out.spread(at_once), run.precision, ranks))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    final, curve = (-(-len(held_out.rows.tokens) // at_once) for held_out in (data.final, data.held_out))
    return Costs(
        step, curve * batch, 3 * size / WRITE_BYTES_PER_SECOND,
        final * batch + _sample_seconds(run, model, data, ranks) + REPORT_SECONDS,
    )  # fmt: skip


def _sample_seconds(run: Run, model: LanguageModel, data: RunData, ranks: Ranks) -> float:
    """Return the seconds of the sample; 0 with several ranks, which cannot generate from a sharded model."""
    count = min(_SAMPLED, run.sample.tokens)
    if not count or ranks.world > 1:
        return 0.0
    short = dataclasses.replace(run, sample=dataclasses.replace(run.sample, tokens=count))
    return _timed(lambda: sample_text(short, model, data.tokenizer, data.prompt)) * run.sample.tokens / count


def most_steps(run: Run, costs: Costs, left: float) -> int:
    """Return the largest number of steps of a run that takes at most ``left`` seconds; at least 1."""
    low, high = 1, max(2, int(left / costs.step) + 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs.seconds(run, middle) <= left else (low, middle)
    return low


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
