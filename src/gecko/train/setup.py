"""Preparation of a run: the starting model, and what a time budget fixes before the first step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from gecko.data import IGNORED, Batch
from gecko.io.checkpoints import model_folder
from gecko.io.quantization import is_quantized
from gecko.models import LanguageModel, build_model, load_any, meta_model
from gecko.models.gecko import Block
from gecko.ops.backends import cpu as native
from gecko.parallel.fsdp import empty_sharded_model, fill
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoints.lora import add_adapters
from gecko.train.clock import Clock, Costs
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
        mixer.mix = torch.compiler.disable(mixer.mix)
        alone, on_rank = mixer.forward, torch.compiler.disable(mixer.forward)
        mixer.forward = lambda x, state, segments: (on_rank if segments.exchange else alone)(x, state, segments)
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
EVALUATING_PART = 0.1
"""Maximum fraction of the time budget for the final held-out loss, for those before it together, and for the sample."""
WRITE_BYTES_PER_SECOND = 200e6
"""Assumed speed of saving a checkpoint: write, flush to disk and read for the checksums."""
REPORT_SECONDS = 6.0
"""Assumed time to draw the report and to end the process."""
SLACK_SECONDS = 20.0
SLACK_PART = 0.1
"""A run of one step may end this many seconds, or this fraction of the budget, after the budget."""
_SAMPLED = 8
"""Number of tokens generated to time the sample."""


def measured(
    run: Run, model: LanguageModel, batches: Prefetcher, data: RunData, ranks: Ranks, clock: Clock, console: Console,
    *, fresh: bool,
) -> Run:  # fmt: skip
    """Measure what the run does for the clock, and return the run with what has to be known before its first step.

    If the run follows the clock, these are the steps of its warm-up; else the steps, at least 1, for which the whole
    command takes at most ``run.minutes``. The final evaluation may take ``EVALUATING_PART`` of them, and so may the
    others together, and the sample; else they get fewer rows or tokens. Without ``fresh``, this was fixed before.

    All ranks measure together, and all use the first rank's times.
    The measured steps use a learning rate of 0 and a separate optimizer, so the model does not change.
    """
    assert run.minutes is not None
    if next(model.parameters()).device.type == "cpu":  # else GCC would build the kernels in a call that is timed
        native.library("operators"), native.library("decoding")
    step = _step_seconds(run, model, batches, ranks, clock, MEASURING_PART * clock.left)
    at_once = data.held_out.batch_size * ranks.data_ranks
    rows = data.held_out.spread(at_once)
    batch = _warm(lambda: evaluate(model, rows, run.precision, ranks), clock)
    token = _token_seconds(run, model, data, ranks, clock)
    step, batch, token, left = ranks.broadcast((step, batch, token, clock.left))
    most = EVALUATING_PART * run.minutes * 60
    final, curve = (len(held_out.rows.tokens) for held_out in (data.final, data.held_out))
    bounded = {
        "evaluation.final_rows": (final, _bounded(final, most / batch, at_once)),
        "evaluation.rows": (curve, _bounded(curve, most / batch / (2 + left / step / run.evaluation.every), at_once)),
        "sample.tokens": (run.sample.tokens, _bounded(run.sample.tokens, most / max(token, 1e-9), 1)),
    }
    (_, final), (_, curve), (_, tokens) = bounded.values()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    saving, end = 3 * size / WRITE_BYTES_PER_SECOND, -(-final // at_once) * batch + tokens * token + REPORT_SECONDS
    clock.expect(Costs(step, -(-curve // at_once) * batch, saving, end))
    if not fresh:
        return run
    fixed = [f"{name}={few}" for name, (all_of_them, few) in bounded.items() if few < all_of_them]
    for line in fixed:
        console.print(f"{line}: more would take more than {EVALUATING_PART:.0%} of the time")
    return run.with_settings(*fixed, *_planned(run, clock.costs, left, console))


def _bounded(count: int, batches: float, at_once: int) -> int:
    """Return how many of ``count`` rows or tokens so many batches hold, at least those of one batch."""
    return min(count, max(1, int(batches)) * at_once)


def _planned(run: Run, costs: Costs, left: float, console: Console) -> list[str]:
    """Return the settings that follow from the number of steps that fit into ``left`` seconds."""
    _check_one_step_fits(run, costs.seconds(run, 1), left)
    steps = most_steps(run, costs, left)
    minutes = costs.seconds(run, steps) / 60
    if minutes * 60 > left:
        console.print(
            f"minutes={run.minutes:g} is too short for this run: a single step with its held-out losses, checkpoint, "
            f"sample and report takes about {minutes:.1f} more minutes. It is trained for that one"
        )
    elif run.follows_clock:
        console.print(f"about {steps} steps fit; their number is fixed when the learning rate has to fall")
    else:
        console.print(f"{steps} steps fit; the run ends in about {minutes:.1f} minutes")
    if not run.follows_clock:
        return [f"steps={steps}"]
    warmup = run.schedule.warmup_steps
    warmup = round(run.schedule.warmup * steps) if warmup is None else warmup
    return ["schedule.kind=wsd", f"schedule.warmup_steps={warmup}"]


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


def _step_seconds(
    run: Run, model: LanguageModel, batches: Prefetcher, ranks: Ranks, clock: Clock, limit: float
) -> float:
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
        estimate = len(first.tokens) * _warm(lambda: step_of(row, 1), clock)
        if ranks.broadcast(estimate > limit):
            model.zero_grad(set_to_none=True)
            return estimate
    seconds: list[float] = []
    while len(seconds) < WARMUP_STEPS + TIMED_STEPS and (not seconds or ranks.broadcast(sum(seconds) < limit)):
        seconds.append(_timed(lambda: one_step(len(seconds)), clock))
    model.zero_grad(set_to_none=True)
    return statistics.median(seconds[WARMUP_STEPS:]) if len(seconds) > WARMUP_STEPS else min(seconds)


def _fullest_row(batch: Batch) -> Batch:
    """Return the row with the most targets, as a batch."""
    at = int((batch.targets != IGNORED).sum(1).argmax())
    return Batch(*(x[at : at + 1] for x in (batch.tokens, batch.targets, batch.segment_ids)))


def _token_seconds(run: Run, model: LanguageModel, data: RunData, ranks: Ranks, clock: Clock) -> float:
    """Return the seconds per token of the sample; 0 with several ranks, which cannot generate from a sharded model."""
    count = min(_SAMPLED, run.sample.tokens)
    if not count or ranks.world > 1:
        return 0.0
    short = dataclasses.replace(run, sample=dataclasses.replace(run.sample, tokens=count))
    return _warm(lambda: sample_text(short, model, data.tokenizer, data.prompt), clock) / count


def most_steps(run: Run, costs: Costs, left: float) -> int:
    """Return the largest number of steps of a run that takes at most ``left`` seconds; at least 1."""
    numbers = range(1, max(2, int(left / costs.step) + 2))
    return max(1, bisect_right(numbers, left, key=lambda steps: costs.seconds(run, steps)))


def _warm(work: Callable[[], object], clock: Clock) -> float:
    """Return the time of the faster of two calls: in the first, kernels are built and memory is allocated."""
    return min(_timed(work, clock) for _ in range(2))


def _timed(work: Callable[[], object], clock: Clock) -> float:
    begin = clock.now()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock.now() - begin
