"""The training session: from a ``Run`` to a trained model, its metrics and its report.

``train`` locks the run's folder, finds the checkpoint to resume from, loads data and model, runs the training loop, and
evaluates the finished model.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gecko.data.chat import TEMPLATE
from gecko.data.tokenizers import SETTINGS, TOKENIZERS, copy_tokenizer
from gecko.io.checkpoints import checkpoint_path, checkpoint_step, list_checkpoints
from gecko.io.files import locked, mend_lines, whole_file
from gecko.io.model_folder import CONFIG, WEIGHTS
from gecko.models import LanguageModel
from gecko.parallel.mesh import MeshSizes, Ranks, connected, launched, only_first_rank_reports
from gecko.runtime.process import flushed_denormals, keep_freed_memory
from gecko.train.batches import Prefetcher
from gecko.train.carried import carried_state
from gecko.train.checkpoints.checkpointer import (
    RECIPE,
    Checkpointer,
    TrainerState,
    checkpoints_folder,
    restore_snapshot,
    tokenizer_folder,
)
from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.checkpoints.node_copies import NodeCopies
from gecko.train.data import RunData, load_data
from gecko.train.evaluate import Evaluation
from gecko.train.float8 import check_float8
from gecko.train.health import LauncherWatch, StopSignal, TrainingNotice, Watchdog, reported_hangs
from gecko.train.metrics import (
    METRICS,
    SESSIONS,
    MetricsWriter,
    check_same_data,
    mend_metrics,
    read_metrics,
    record_session,
    row_layout,
)
from gecko.train.optimizers.build import build_optimizer
from gecko.train.overrides import flatten
from gecko.train.report import REPORT, RESULTS, SAMPLE, finish_run, remove_results
from gecko.train.run import Run
from gecko.train.setup import Budget, starting_model, steps_in_budget
from gecko.train.throughput import describe_hardware, multiplies_bfloat16, select_device
from gecko.train.trainer import Sinks, Trainer, TrainingProgress

_LOCK = ".training"
_SAME_ON_RESUME = (
    "model", "data", "batch_size", "sequence_length", "seed", "lora_rank", "optimizer.name",
    "schedule.initial_batch_size", "schedule.batch_size_steps", "schedule.initial_sequence_length",
    "schedule.sequence_length_steps",
)  # fmt: skip


@dataclass(frozen=True)
class TrainResult:
    run: Run
    """The run with its number of steps fixed."""
    checkpoint: Path
    """Folder of the newest checkpoint, for ``gecko.load`` (a Llama's for ``gecko.models.load_any``)."""
    step: int
    evaluation: Evaluation | None
    """Held-out loss of the finished model; None if Ctrl-C or SIGTERM stopped the run."""
    report: Path | None
    """HTML report of a finished run; None without matplotlib, and on all ranks but the first."""

    @property
    def finished(self) -> bool:
        return self.evaluation is not None


def train(run: Run, resume: bool = False) -> TrainResult:
    """Train ``run`` to its last step, or until Ctrl-C or SIGTERM, which save a checkpoint and return.

    A process that torchrun started trains as one of its ranks. If one rank fails, all do: the first rank raises the
    error and the others raise SystemExit. The last checkpoint is kept after every error.

    Args:
        resume: continue from the newest sound checkpoint in ``run.output``; start the run if there is none.

    Raises:
        FileExistsError: the folder holds a run and ``resume`` is not set, a finished run without checkpoints, or a
        model. ValueError: the folder holds another run, another session trains in it, or the run does not fit the
        ranks. NonFiniteError: too many steps in a row were skipped.
        OSError: a checkpoint or the metrics cannot be written.
    """
    begin = time.perf_counter()
    _, world, local = launched()
    with only_first_rank_reports():
        sizes = MeshSizes.of(world, run.parallel.replicate, run.parallel.shard, run.parallel.context)
        run.rows_per_rank(sizes.data_ranks)
    # Each rank reports its own device error, because the first rank may have none.
    device = select_device(run.device, local if world > 1 else None)
    # The watchdog must act before a collective times out, because it writes the stacks.
    timeout = None if run.hang_minutes is None else timedelta(minutes=2 * run.hang_minutes)
    with LauncherWatch(), flushed_denormals(), connected(sizes, device, timeout) as ranks, ExitStack() as stack:
        # Before the lock, which is a file in the folder: a model's folder must stay as it is.
        ranks.run_or_abort_all(lambda: _check_no_model(run) if ranks.is_main else None)
        ranks.run_or_abort_all(lambda: stack.enter_context(_lock(run, ranks)))
        return _train(run, resume, ranks, device, begin)


def _train(run: Run, resume: bool, ranks: Ranks, device: torch.device, begin: float) -> TrainResult:
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not ranks.is_main)
    run, checkpoint = _start(run, resume, ranks)
    if run.precision == "auto":
        run = run.with_precision(ranks.broadcast("bfloat16" if multiplies_bfloat16(device) else "float32"))
    ranks.run_or_abort_all(lambda: check_float8(run.precision, device))
    _set_up(run, ranks, console)
    data = ranks.run_or_abort_all(lambda: _load_data(run, checkpoint, ranks, console))
    model = starting_model(run, ranks, device, fresh=checkpoint is None)
    batches = Prefetcher(run, data.rows, ranks, pinned=device.type == "cuda")
    notice = TrainingNotice()
    with StopSignal(notice if ranks.is_main else None) as stop:
        if run.steps is None:
            notice.phase = "measuring"
            console.print(f"measuring how many steps fit into {run.minutes:g} minutes")
            budget = steps_in_budget(run, model, batches, data, ranks, begin)
            _print_budget(run, budget, console)
            run = run.with_steps(budget.steps)
        notice.phase = "training"
        position = _fit(run, model, data, batches, checkpoint, stop, ranks, console)
        newest = checkpoint_path(checkpoints_folder(run), position.step)
        if position.step == run.steps:
            notice.phase = "finishing"
            evaluation, report = finish_run(run, model, data, newest, ranks, console)
            return TrainResult(run, newest, position.step, evaluation, report)
    console.print(
        f"{stop.requested or 'a signal to another rank'}: saved after step {position.step} of {run.steps}. "
        f"Continue with:\n  {run.command()} --resume"
    )
    return TrainResult(run, newest, position.step, None, None)


def _print_budget(run: Run, budget: Budget, console: Console) -> None:
    console.print(
        f"{budget.steps} steps fit; the run ends in about {budget.seconds / 60:.1f} minutes"
        if budget.seconds <= budget.left
        else f"minutes={run.minutes:g} is too short for this run: a single step with its held-out losses, checkpoint, "
        f"sample and report takes about {budget.seconds / 60:.1f} more minutes. It is trained for that one"
    )


def _lock(run: Run, ranks: Ranks) -> AbstractContextManager[None]:
    """Return the lock of the run's folder: two sessions would mix metrics and remove each other's checkpoints."""
    return locked(run.folder / _LOCK, wait=False) if ranks.is_main else nullcontext()


def _start(run: Run, resume: bool, ranks: Ranks) -> tuple[Run, Path | None]:
    """Return the run with the settings that earlier sessions fixed, and its newest sound checkpoint or None."""
    ranks.run_or_abort_all(lambda: _check_overwrites_nothing(run, resume) if ranks.is_main else None)
    if resume:
        ranks.run_or_abort_all(lambda: _mend_records(run) if ranks.is_main else None)
    checkpoint = latest_checkpoint(checkpoints_folder(run), ranks)
    if checkpoint is None:
        return ranks.run_or_abort_all(lambda: _begun_run(run)) if resume else run, None
    return ranks.run_or_abort_all(lambda: _resumed_run(run, checkpoint)), checkpoint


def _check_no_model(run: Run) -> None:
    if (run.folder / CONFIG).exists():
        raise FileExistsError(
            f"a run must have a folder without a model; {run.folder} has a {CONFIG}, and no command could tell that "
            f"model from the run's. Choose another folder with output=, or move {CONFIG} and {WEIGHTS} away."
        )


def _check_overwrites_nothing(run: Run, resume: bool) -> None:
    """Raise FileExistsError if the folder holds a run that this session would overwrite."""
    if (folder := checkpoints_folder(run)).exists() and not folder.is_dir():
        raise FileExistsError(
            f"{folder} must be a folder, or the name of a new one; it is a file. Move it away, or choose another "
            "folder with output=."
        )
    saved = bool(list_checkpoints(folder))
    _check_files_of_others(run)
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


def _check_files_of_others(run: Run) -> None:
    """Raise FileExistsError if the folder is not that of a run, but has a file that a run would replace or delete."""
    if (run.folder / METRICS).exists() or _holds_recipe(run.folder / RECIPE):
        return
    replaced = [run.folder / name for name in (RECIPE, SAMPLE, REPORT)]
    if tokenizer_folder(run).resolve() not in (path := Path(run.data.tokenizer).resolve(), path.parent):
        replaced += [tokenizer_folder(run) / name for name in (*TOKENIZERS, *SETTINGS)]
    found = next((path for path in replaced if path.exists()), None)
    if found is not None:
        raise FileExistsError(
            f"{run.folder} must be a new folder or that of a run; it has a {found.relative_to(run.folder)} that no run "
            "wrote, and the run would replace it. Choose another folder with output=, or move the file away."
        )


def _holds_recipe(path: Path) -> bool:
    try:
        Run.load(path)
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return True


def _mend_records(run: Run) -> None:
    """Remove torn and damaged lines from the metrics and sessions, so that lines can be appended."""
    mend_metrics(run.folder / METRICS)
    mend_lines(run.folder / SESSIONS)


def _begun_run(run: Run) -> Run:
    """Return ``run`` with the number of steps measured in its folder. ValueError if another run trained there."""
    recipe = run.folder / RECIPE
    if not recipe.is_file():
        return run
    begun = Run.load(recipe)
    if any(record["kind"] == "train" for record in read_metrics(run.folder / METRICS)):
        _check_same_run(run, begun, f"the run in {run.folder} was begun with")
    return _measured_run(run, begun)


def _measured_run(run: Run, begun: Run) -> Run:
    """Return ``run`` with the measured number of steps of a session that was killed before its first checkpoint."""
    if run.steps is not None or begun.steps is None:
        return run
    measured = (run.with_precision(begun.precision) if run.precision == "auto" else run).with_steps(begun.steps)
    return measured if _settings(measured) == _settings(begun) else run


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings without ``overrides``, which only say how they were given."""
    return {**run.to_dict(), "overrides": None}


def _resumed_run(run: Run, checkpoint: Path) -> Run:
    """Return ``run`` with the number of steps of its checkpoint. ValueError if the checkpoint is of another run."""
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
    """Raise ValueError if ``minutes`` changed: it has no effect on a resumed run, whose number of steps is fixed."""
    if run.minutes != saved.minutes:
        raise ValueError(
            f"minutes become steps once, when a run starts, and this one's are fixed at {saved.steps}; "
            f"got minutes={run.minutes:g}. Set steps= for another length, or start a new run with another output=."
        )


def _check_same_run(run: Run, earlier: Run, what: str) -> None:
    """Raise ValueError if ``run`` cannot continue or replace ``earlier``, which ``what`` names in the message."""
    given = _fixed_settings(run)
    for name, value in _fixed_settings(earlier).items():
        if value != given.get(name):
            raise ValueError(
                f"{name} must be what {what}, {value!r}; got {given.get(name)!r}. "
                "Leave it as it was, or start a new run with another output=."
            )


def _fixed_settings(run: Run) -> dict[str, Any]:
    """Return the settings that all sessions of a run have in common."""
    names = set(_SAME_ON_RESUME)
    return {name: x for name, x in flatten(run.to_dict()).items() if {name, name.partition(".")[0]} & names}


def _load_data(run: Run, checkpoint: Path | None, ranks: Ranks, console: Console) -> RunData:
    data = load_data(run, ranks, console, row_layout(checkpoint))
    if checkpoint is not None and ranks.is_main and not check_same_data(run.folder, checkpoint, data.record.digest):
        console.print(
            f"cannot check that the texts are those that the run started with: neither {checkpoint} nor "
            f"{run.folder / SESSIONS} has their digest"
        )
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
    batches: Prefetcher,
    checkpoint: Path | None,
    stop: StopSignal,
    ranks: Ranks,
    console: Console,
) -> TrainerState:
    optimizer = build_optimizer(model, run.optimizer)
    carried = carried_state(run, model, ranks)
    assert run.steps is not None
    with ExitStack() as stack:
        copies = None if run.checkpoint.memory_every is None else stack.enter_context(_copies(run, data, ranks))
        recovered = None if copies is None else _recovered(run, model, optimizer, checkpoint, copies, ranks)
        position = recovered or TrainerState()
        if recovered is None and checkpoint is not None:
            position = restore_snapshot(checkpoint, model, optimizer, carried)
        went_on = None if position == TrainerState() and checkpoint is None else position.step
        if went_on is not None:
            _print_position(run, went_on, "the memory of the nodes" if recovered else str(checkpoint), console)
        ranks.run_or_abort_all(lambda: _save_recipe(run, model, data, went_on, ranks))
        display = stack.enter_context(TrainingProgress(console, position.step, run.steps))
        metrics = stack.enter_context(ranks.run_or_abort_all(lambda: _metrics(run, went_on, ranks)))
        # The checkpointer waits for the disk when it exits, also after an error; the watchdog covers this wait.
        watchdog = stack.enter_context(_watchdog(run, ranks))
        beat = _nothing if watchdog is None else watchdog.beat
        saver = stack.enter_context(Checkpointer(run, ranks, beat, data.record, carried))
        if recovered is not None:  # a state that is in memory only would be lost with the next node
            saver.save(model, optimizer, position)
        sinks = Sinks(saver, display, metrics, beat, copies)
        trainer = Trainer(run, model, optimizer, batches, data.held_out, position, sinks, ranks, carried)
        trainer.fit(stop)
        if copies is not None:
            copies.clear()
    return trainer.position


def _copies(run: Run, data: RunData, ranks: Ranks) -> NodeCopies:
    return NodeCopies(run, ranks, ranks.broadcast(f"{_fixed_settings(run)} {data.record.digest}"))


def _recovered(
    run: Run, model: LanguageModel, optimizer: torch.optim.Optimizer, checkpoint: Path | None, copies: NodeCopies,
    ranks: Ranks,
) -> TrainerState | None:  # fmt: skip
    """Load the state from the nodes' memory if it is newer than the checkpoint. None: it is not, or incomplete.

    A step without a record in the metrics is not taken: the curve would have a hole.
    """
    after = 0 if checkpoint is None else checkpoint_step(checkpoint)
    return copies.restore(model, optimizer, after, ranks.broadcast(_last_step(run) if ranks.is_main else 0))


def _last_step(run: Run) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    path = run.folder / METRICS
    return max((r["step"] for r in read_metrics(path) if r["kind"] == "train"), default=0) if path.exists() else 0


def _print_position(run: Run, step: int, source: str, console: Console) -> None:
    console.print(f"continuing after step {step}, from {source}")
    if run.profile is not None and run.profile[1] <= step:
        console.print(f"profile={run.profile[0]},{run.profile[1]} lies before that: no trace is written")


def _save_recipe(run: Run, model: LanguageModel, data: RunData, step: int | None, ranks: Ranks) -> None:
    """Write recipe, tokenizer and a line about this session, which resumes after ``step`` (None: starts)."""
    if ranks.is_main:
        with whole_file(run.folder / RECIPE) as temporary:
            run.save(temporary)
        copy_tokenizer(run.data.tokenizer, tokenizer_folder(run))
        if data.chat_template is not None:
            with whole_file(tokenizer_folder(run) / TEMPLATE) as temporary:
                temporary.write_text(data.chat_template, encoding="utf-8")
        if step != run.steps:
            remove_results(run)
        parameters = list(model.parameters())
        hardware = describe_hardware(parameters[0].device, ranks.world)
        record_session(
            run.folder, step, sum(parameter.numel() for parameter in parameters), hardware, data.record.digest
        )


def _metrics(run: Run, step: int | None, ranks: Ranks) -> MetricsWriter | nullcontext[None]:
    return MetricsWriter(run.folder, step, run.wandb, run.to_dict()) if ranks.is_main else nullcontext()


def _watchdog(run: Run, ranks: Ranks) -> Watchdog | nullcontext[None]:
    """Return the watchdog; no watchdog for one process, because a laptop may sleep during a run."""
    if ranks.world == 1 or run.hang_minutes is None:
        return nullcontext()
    return Watchdog(_stacks(run), ranks.rank, run.hang_minutes)


def _nothing() -> None:
    """Do nothing: the ``beat`` of a process without a watchdog."""


def _stacks(run: Run) -> Path:
    return run.folder / "stacks"
