"""``train(run)``: from a recipe to a trained model, its metrics and its report."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gecko.allocator import keep_freed_memory
from gecko.baselines import LanguageModel, load_any
from gecko.data.tokenizer_files import copy_tokenizer
from gecko.denormals import flushed_denormals
from gecko.files import whole_file
from gecko.lock import locked
from gecko.parallel.mesh import MeshSizes, Ranks, connected, launched, only_first_rank_reports
from gecko.train.batches import Batches
from gecko.train.budget import steps_in_budget
from gecko.train.checkpoint import checkpoint_path, checkpoint_step, latest_checkpoint, list_checkpoints
from gecko.train.evaluate import Evaluation, evaluate
from gecko.train.fields import flatten
from gecko.train.hardware import describe_hardware, multiplies_bfloat16, select_device
from gecko.train.loop import Outlets, Trainer
from gecko.train.metrics import METRICS, MetricsWriter, read_metrics
from gecko.train.optimizer import build_optimizer
from gecko.train.progress import TrainingProgress
from gecko.train.provenance import check_same_data, record_session
from gecko.train.report import REPORT, RunFacts, write_report
from gecko.train.run import Run
from gecko.train.sample import sample_text
from gecko.train.saver import Saver
from gecko.train.signals import StopSignal
from gecko.train.snapshot import RECIPE, Position, checkpoints_folder, restore_snapshot, tokenizer_folder, write_model
from gecko.train.start import starting_model
from gecko.train.texts import RunData, load_data
from gecko.train.watchdog import Watchdog, reported_hangs

RESULTS, SAMPLE = "results.json", "sample.txt"
_LOCK = ".training"
_SAME_ON_RESUME = ("model", "data", "batch_size", "sequence_length", "seed")


@dataclass(frozen=True)
class TrainResult:
    run: Run
    """As it was trained: with its number of steps."""
    checkpoint: Path
    """The newest checkpoint, a folder for ``gecko.load``; for ``gecko.baselines.load_any`` if it may be a Llama's."""
    step: int
    evaluation: Evaluation | None
    """Of the finished model; None where the run was stopped early, by Ctrl-C or SIGTERM."""
    report: Path | None
    """The HTML report of a finished run; None where matplotlib is not installed, and on all ranks but the first."""

    @property
    def finished(self) -> bool:
        return self.evaluation is not None


def train(run: Run, resume: bool = False) -> TrainResult:
    """Train ``run`` to its end, or until Ctrl-C or SIGTERM, which save a checkpoint and return.

    In a process started by torchrun, as one of its ranks. ``resume`` continues from the newest sound checkpoint in
    ``run.output``, and starts where there is none. Raises FileExistsError where the folder holds a run and ``resume``
    is not set, or a finished one without checkpoints, ValueError where it holds another run than this, another session
    trains there or the ranks do not suit it, NonFiniteError after too many skipped steps, OSError where a checkpoint
    cannot be written; the last checkpoint stays in each case. Where one rank fails so, all do: the first raises, the
    others raise SystemExit.
    """
    _, world, local = launched()
    with only_first_rank_reports():
        sizes = MeshSizes.of(world, run.parallel.replicate, run.parallel.shard, run.parallel.context)
        run.rows_per_rank(sizes.data_ranks)
    # Each rank says what it lacks: on the first one's GPU all may be well.
    device = select_device(run.device, local if world > 1 else None)
    # The watchdog, which writes stacks, comes before a collective's own time limit.
    timeout = None if run.hang_minutes is None else timedelta(minutes=2 * run.hang_minutes)
    with flushed_denormals(), connected(sizes, device, timeout) as ranks, ExitStack() as stack:
        ranks.agree(lambda: stack.enter_context(_lock(run, ranks)))
        return _train(run, resume, ranks, device)


def _train(run: Run, resume: bool, ranks: Ranks, device: torch.device) -> TrainResult:
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not ranks.first)
    run, checkpoint = _start(run, resume, ranks)
    if run.precision == "auto":
        run = run.with_precision(ranks.share("bfloat16" if multiplies_bfloat16(device) else "float32"))
    _set_up(run, ranks, console)
    data = ranks.agree(lambda: _load_data(run, checkpoint, ranks, console))
    model = starting_model(run, ranks, device, fresh=checkpoint is None)
    batches = Batches(data.rows, ranks)
    with StopSignal() as stop:
        if run.steps is None:
            console.print(f"measuring how many steps fit into {run.minutes:g} minutes")
            run = run.with_steps(steps_in_budget(run, model, batches, data.held_out, ranks))
        position = _fit(run, model, data, batches, checkpoint, stop, ranks, console)
        newest = checkpoint_path(checkpoints_folder(run), position.step)
        if position.step == run.steps:
            return _finish(run, model, data, newest, ranks, console)
    console.print(
        f"{stop.requested or 'a signal to another rank'}: saved after step {position.step} of {run.steps}. "
        f"Continue with:\n  {run.command()} --resume"
    )
    return TrainResult(run, newest, position.step, None, None)


def _lock(run: Run, ranks: Ranks) -> AbstractContextManager[None]:
    """Two sessions in one folder would mix their numbers and remove each other's checkpoints."""
    return locked(run.folder / _LOCK, wait=False) if ranks.first else nullcontext()


def _start(run: Run, resume: bool, ranks: Ranks) -> tuple[Run, Path | None]:
    """The run, with what was fixed before, and its newest sound checkpoint; None where there is none."""
    ranks.agree(lambda: _check_overwrites_nothing(run, resume) if ranks.first else None)
    checkpoint = latest_checkpoint(checkpoints_folder(run), ranks)
    if checkpoint is None:
        return ranks.agree(lambda: _begun_run(run)) if resume else run, None
    return ranks.agree(lambda: _resumed_run(run, checkpoint)), checkpoint


def _check_overwrites_nothing(run: Run, resume: bool) -> None:
    """FileExistsError where the folder holds a run that is not gone on with."""
    saved = bool(list_checkpoints(checkpoints_folder(run)))
    begun, finished = (run.folder / METRICS).exists(), (run.folder / RESULTS).exists()
    if finished and not saved:
        raise FileExistsError(
            f"{run.folder} must hold the checkpoints of its run, which is finished; they are gone, and nothing there "
            "is overwritten. Choose another folder with output=, or move it away."
        )
    if (saved or begun) and not resume:
        raise FileExistsError(
            f"{run.folder} already holds a run, and nothing there is overwritten. Continue it with --resume, "
            "or choose another folder with output=."
        )


def _begun_run(run: Run) -> Run:
    """``run``, if its folder holds no steps of another, with the number of steps that was measured there."""
    recipe = run.folder / RECIPE
    if not recipe.is_file():
        return run
    begun = Run.load(recipe)
    if any(record["kind"] == "train" for record in read_metrics(run.folder / METRICS)):
        _check_same_run(run, begun, f"the run in {run.folder} was begun with")
    return _measured_run(run, begun)


def _measured_run(run: Run, begun: Run) -> Run:
    """``run`` with the steps that were found to fit into its minutes, if it was killed before its first checkpoint."""
    if run.steps is not None or begun.steps is None:
        return run
    measured = (run.with_precision(begun.precision) if run.precision == "auto" else run).with_steps(begun.steps)
    return measured if _settings(measured) == _settings(begun) else run


def _settings(run: Run) -> dict[str, Any]:
    """Without how they were given."""
    return {**run.to_dict(), "overrides": None}


def _resumed_run(run: Run, checkpoint: Path) -> Run:
    """``run`` with the steps its checkpoint fixed; ValueError where the two are different runs."""
    saved = Run.load(checkpoint / RECIPE)
    _check_same_run(run, saved, "the checkpoint was trained with")
    if run.precision == "auto":
        run = run.with_precision(saved.precision)
    if run.steps is None and saved.steps is not None:
        _check_same_minutes(run, saved)
        run = run.with_steps(saved.steps)
    done = checkpoint_step(checkpoint)
    if run.steps is not None and run.steps < done:
        raise ValueError(
            f"steps must be at least the {done} that are done; got {run.steps}. Start a new run for fewer."
        )
    return run


def _check_same_minutes(run: Run, saved: Run) -> None:
    """ValueError where ``run`` has minutes of its own, which nothing would come of: steps were fixed by others."""
    if run.minutes != saved.minutes:
        raise ValueError(
            f"minutes become steps once, when a run starts, and this one's are fixed at {saved.steps}; "
            f"got minutes={run.minutes:g}. Set steps= for another length, or start a new run with another output=."
        )


def _check_same_run(run: Run, earlier: Run, what: str) -> None:
    """ValueError where ``run`` cannot go on with ``earlier``, or in its place; ``what`` names that in the message."""
    given = flatten(run.to_dict())
    for name, value in flatten(earlier.to_dict()).items():
        if name.partition(".")[0] in _SAME_ON_RESUME and value != given.get(name):
            raise ValueError(
                f"{name} must be what {what}, {value!r}; got {given.get(name)!r}. "
                "Leave it as it was, or start a new run with another output=."
            )


def _load_data(run: Run, checkpoint: Path | None, ranks: Ranks, console: Console) -> RunData:
    data = load_data(run, ranks, console)
    if checkpoint is not None and ranks.first:
        check_same_data(run.folder, data.digest)
    return data


def _set_up(run: Run, ranks: Ranks, console: Console) -> None:
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    keep_freed_memory()
    if ranks.world > 1:
        sizes = ranks.sizes
        console.print(
            f"{ranks.world} ranks: {sizes.replicate} replicas × {sizes.shard} shards × {sizes.context} parts of a row"
        )
    for path in reported_hangs(_stacks(run)):
        console.print(f"an earlier session hung; the stack of one of its ranks is in {path}")


def _fit(
    run: Run,
    model: LanguageModel,
    data: RunData,
    batches: Batches,
    checkpoint: Path | None,
    stop: StopSignal,
    ranks: Ranks,
    console: Console,
) -> Position:
    optimizer = build_optimizer(model, run.optimizer)
    position = Position() if checkpoint is None else restore_snapshot(checkpoint, model, optimizer)
    if checkpoint is not None:
        console.print(f"continuing after step {position.step}, from {checkpoint}")
        if run.profile is not None and run.profile[1] <= position.step:
            console.print(f"profile={run.profile[0]},{run.profile[1]} lies before that: no trace is written")
    went_on = None if checkpoint is None else position.step
    ranks.agree(lambda: _save_recipe(run, model, data, went_on, ranks))
    assert run.steps is not None
    with ExitStack() as stack:
        display = stack.enter_context(TrainingProgress(console, position.step, run.steps))
        metrics = stack.enter_context(ranks.agree(lambda: _metrics(run, went_on, ranks)))
        # The saver waits for the disk at its end, after an error too, and that is watched.
        watchdog = stack.enter_context(_watchdog(run, ranks))
        beat = _nothing if watchdog is None else watchdog.beat
        saver = stack.enter_context(Saver(run, ranks, beat))
        outlets = Outlets(saver, display, metrics, beat)
        trainer = Trainer(run, model, optimizer, batches, data.held_out, position, outlets, ranks)
        trainer.fit(stop)
    return trainer.position


def _save_recipe(run: Run, model: LanguageModel, data: RunData, step: int | None, ranks: Ranks) -> None:
    """The recipe, its tokenizer, and what this session runs on; ``step`` is the one it goes on after."""
    if ranks.first:
        with whole_file(run.folder / RECIPE) as temporary:
            run.save(temporary)
        copy_tokenizer(run.data.tokenizer, tokenizer_folder(run))
        if step != run.steps:
            _remove_results(run)
        parameters = list(model.parameters())
        hardware = describe_hardware(parameters[0].device, ranks.world)
        record_session(run.folder, step, sum(parameter.numel() for parameter in parameters), hardware, data.digest)


def _remove_results(run: Run) -> None:
    """Those of the length that a longer run had before, if it was finished: they would be taken for its own."""
    if (run.folder / RESULTS).is_file():
        for name in (SAMPLE, REPORT, RESULTS):
            (run.folder / name).unlink(missing_ok=True)


def _metrics(run: Run, step: int | None, ranks: Ranks) -> MetricsWriter | nullcontext[None]:
    return MetricsWriter(run.folder, step, run.wandb, run.to_dict()) if ranks.first else nullcontext()


def _watchdog(run: Run, ranks: Ranks) -> Watchdog | nullcontext[None]:
    """None for one process: a laptop that sleeps over a run must find it again."""
    if ranks.world == 1 or run.hang_minutes is None:
        return nullcontext()
    return Watchdog(_stacks(run), ranks.rank, run.hang_minutes)


def _nothing() -> None:
    """The beat of ranks that nobody watches."""


def _stacks(run: Run) -> Path:
    return run.folder / "stacks"


def _finish(
    run: Run, model: LanguageModel, data: RunData, checkpoint: Path, ranks: Ranks, console: Console
) -> TrainResult:
    """Final loss, and on the first rank the model in one file, a sample and the report."""
    with console.status("final held-out loss, sample and report"):
        result = evaluate(model, data.final, run.precision, ranks)
        if not ranks.first:
            return TrainResult(run, checkpoint, run.steps or 0, result, None)
        with whole_file(run.folder / RESULTS) as temporary:
            temporary.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        device = next(model.parameters()).device
        if ranks.world > 1:
            write_model(checkpoint, checkpoint)
            model = load_any(checkpoint).to(device)
        sample = sample_text(run, model, data.tokenizer)
        (run.folder / SAMPLE).write_text(run.sample.prompt + sample, encoding="utf-8")
    console.print(
        f"final held-out loss over {result.tokens:,} tokens: "
        f"{result.nats_per_byte:.4f} nats a byte, {result.loss:.4f} a token"
    )
    facts = RunFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        evaluation=result,
        sample=sample,
        hardware=describe_hardware(device, ranks.world),
    )
    return TrainResult(run, checkpoint, run.steps or 0, result, _report(run, facts, console))


def _report(run: Run, facts: RunFacts, console: Console) -> Path | None:
    try:
        path = write_report(run, facts)
    except ImportError as error:
        console.print(f"no report: {error}")
        return None
    console.print(f"report: {path}")
    return path
