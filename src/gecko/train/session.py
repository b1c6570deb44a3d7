"""The training session: from a ``Run`` to a trained model, its metrics and its report.

``train`` claims the run's folder, loads data and model, runs the training loop, and evaluates the finished model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from gecko.data.tokenizers import TEMPLATE, copy_tokenizer
from gecko.io.checkpoints import checkpoint_path, checkpoint_step
from gecko.io.files import whole_file, write_text
from gecko.io.model_folder import CONFIG
from gecko.models import LanguageModel
from gecko.parallel.mesh import Ranks
from gecko.runtime.process import keep_freed_memory
from gecko.train import prepare
from gecko.train.budget import RunClock, measured
from gecko.train.capture import check_capture
from gecko.train.checkpoints.checkpointer import Checkpointer
from gecko.train.checkpoints.content import TrainerState, restore_snapshot, write_recipe, write_tokenizer
from gecko.train.checkpoints.node_copies import NodeCopies
from gecko.train.data import Prefetcher, RunData, load_data
from gecko.train.evaluate import Evaluation
from gecko.train.finish import finish_run, remove_results
from gecko.train.health import StopSignal, TrainingNotice, Watchdog, reported_hangs
from gecko.train.metrics import METRICS, SESSIONS, MetricsWriter, check_same_data, read_metrics, record_session
from gecko.train.model import check_float8, starting_model
from gecko.train.optimizer import build_optimizer
from gecko.train.prepare import Beginning, Process, fixed_settings, launch
from gecko.train.run import Run
from gecko.train.step import carried_state
from gecko.train.throughput import describe_hardware
from gecko.train.trainer import Trainer, TrainingProgress


@dataclass(frozen=True)
class TrainResult:
    run: Run
    """The run with its number of steps, unless it was stopped before they were fixed."""
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


def train(
    run: Run, resume: bool = False, *, begin: float | None = None, now: Callable[[], float] = time.perf_counter
) -> TrainResult:
    """Train ``run`` to its last step, or until Ctrl-C or SIGTERM, which save a checkpoint and return.

    A process that torchrun started trains as one of its ranks. If one rank fails, all do: the first rank raises the
    error and the others raise SystemExit. The last checkpoint is kept after every error.

    Args:
        resume: continue from the newest undamaged checkpoint in ``run.output``; start the run if there is none.
        begin: when the command began, for ``run.minutes``; None: with this call.
        now: returns the time in seconds.

    Raises:
        FileExistsError: the folder holds a run and ``resume`` is not set, a finished run without checkpoints, or a
        model. ValueError: the folder holds another run, another session trains in it, or the run does not fit the
        ranks. NonFiniteError: too many steps in a row were skipped.
        OSError: a checkpoint or the metrics cannot be written.
    """
    clock = RunClock(now, now() if begin is None else begin, run.minutes)
    with ExitStack() as stack:
        process = stack.enter_context(launch(run))
        ranks, console = process.ranks, process.console
        start = prepare.begin(run, resume, process, stack)
        ranks.run_or_abort_all(lambda: _set_up(start.run, process))
        data = load_data(start.run, ranks, console, start.layout, start.started)
        ranks.main(lambda: _check_same_texts(start, data, console))
        model = starting_model(start.run, ranks, process.device, fresh=start.checkpoint is None)
        batches = Prefetcher(start.run, data.rows, ranks, pinned=process.device.type == "cuda")
        notice = TrainingNotice()
        with StopSignal(notice if ranks.is_main else None) as stop:
            if start.run.steps is None:
                notice.phase = "measuring"
                start = measured(start, model, batches, data, process, clock)
                data = replace(data, evaluation=start.run.evaluation)
            notice.phase = "training"
            run, position = _fit(start, model, data, batches, stop, process, clock)
            newest = checkpoint_path(run.checkpoints_folder, position.step)
            if position.step == run.steps:
                notice.phase = "finishing"
                batches.close()
                evaluation, report = finish_run(run, model, data, newest, ranks, console)
                return TrainResult(run, newest, position.step, evaluation, report)
        console.print(
            f"{stop.requested or 'a signal to another rank'}: saved after step {position.step} of "
            f"{run.steps or 'those that fit'}. "
            f"Continue with:\n  {run.command()} --resume"
        )
        return TrainResult(run, newest, position.step, None, None)


def _check_same_texts(start: Beginning, data: RunData, console: Console) -> None:
    """Raise ValueError if the texts are other ones than those that the run started with."""
    folder, checkpoint = start.run.folder, start.checkpoint
    if checkpoint is not None and not check_same_data(folder, checkpoint, data.record.digest):
        console.print(
            f"cannot check that the texts are those that the run started with: neither {checkpoint} nor "
            f"{folder / SESSIONS} has their digest"
        )


def _set_up(run: Run, process: Process) -> None:
    ranks, console = process.ranks, process.console
    check_float8(run.precision, process.device)
    if run.capture:
        check_capture(process.device, ranks.world)
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    keep_freed_memory()
    if missing := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        lacking = " and ".join(missing)
        console.print(f"no report will be written: it needs {lacking}. Run: pip install 'gecko-lm[train]'")
    if ranks.world > 1:
        sizes = ranks.sizes
        console.print(
            f"{ranks.world} ranks: {sizes.replicate} replicas × {sizes.shard} shards × {sizes.context} parts of a row"
        )
    for path in reported_hangs(_stacks(run)):
        console.print(f"an earlier session hung; the stack of one of its ranks is in {path}")


def _fit(
    start: Beginning, model: LanguageModel, data: RunData, batches: Prefetcher, stop: StopSignal, process: Process,
    clock: RunClock,
) -> tuple[Run, TrainerState]:  # fmt: skip
    """Restore the state of the run and train. Return the run with its number of steps, and where it stands."""
    run, checkpoint, ranks, console = start.run, start.checkpoint, process.ranks, process.console
    optimizer = build_optimizer(model, run.optimizer)
    carried = carried_state(run, model, ranks)
    with ExitStack() as stack:
        copies = recovered = None
        if run.checkpoint.memory_every is not None:
            identity = ranks.main(lambda: f"{fixed_settings(run)} {data.record.digest}")
            copies = stack.enter_context(NodeCopies(run, ranks, identity))
            # Newer than the checkpoint, and not without a record in the metrics: the curve would have a hole.
            after = 0 if checkpoint is None else checkpoint_step(checkpoint)
            recovered = copies.restore(model, optimizer, after, ranks.main(lambda: _last_step(run)))
        position = recovered or TrainerState()
        if recovered is None and checkpoint is not None:
            position = restore_snapshot(checkpoint, model, optimizer, carried)
        went_on = None if position == TrainerState() and checkpoint is None else position.step
        clock.begin -= position.elapsed
        if went_on is not None:
            _print_position(run, went_on, "the memory of the nodes" if recovered else str(checkpoint), console)
        metrics = stack.enter_context(ranks.run_or_abort_all(lambda: _records(run, model, data, went_on, ranks)))
        display = stack.enter_context(TrainingProgress(console, position.step, run.steps))
        # The checkpointer waits for the disk when it exits, also after an error; the watchdog covers this wait.
        watchdog = stack.enter_context(_watchdog(run, ranks))
        beat = (lambda: None) if watchdog is None else watchdog.beat
        saver = stack.enter_context(Checkpointer(run, ranks, beat, data.record, carried))
        if recovered is not None:  # a state that is in memory only would be lost with the next node
            saver.save(model, optimizer, position)
        trainer = Trainer(
            run, model, optimizer, carried, position, batches, data.held_out, ranks, clock, saver, display, metrics,
            beat, copies,
        )  # fmt: skip
        trainer.fit(stop)
        if copies is not None:
            copies.clear()
    return trainer.run, trainer.position


def _last_step(run: Run) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    path = run.folder / METRICS
    return max((r["step"] for r in read_metrics(path) if r["kind"] == "train"), default=0) if path.exists() else 0


def _print_position(run: Run, step: int, source: str, console: Console) -> None:
    done = (
        "" if step != run.steps else ": the run is complete, and only its final loss, sample and report are made anew"
    )
    console.print(f"continuing after step {step}, from {source}{done}")
    if run.profile is not None and run.profile[1] <= step:
        console.print(f"profile={run.profile[0]},{run.profile[1]} lies before that: no trace is written")


def _records(
    run: Run, model: LanguageModel, data: RunData, step: int | None, ranks: Ranks
) -> MetricsWriter | nullcontext[None]:
    """Write recipe, tokenizer, config and a line about this session, which resumes after ``step`` (None: starts).

    Return the writer of the metrics. Ranks other than the first write nothing.
    """
    if not ranks.is_main:
        return nullcontext()
    write_recipe(run)
    copy_tokenizer(run.data.tokenizer, run.tokenizer_folder)
    if data.chat_template is not None:
        write_text(run.tokenizer_folder / TEMPLATE, data.chat_template)
    if step != run.steps:
        remove_results(run)
    parameters = list(model.parameters())
    hardware = describe_hardware(parameters[0].device, ranks.world)
    record_session(run.folder, step, sum(map(torch.numel, parameters)), hardware, data.record.digest)
    # For transformers, and last: without the line about a session, the folder would be that of a model.
    write_tokenizer(run, run.folder)
    with whole_file(run.folder / CONFIG) as temporary:
        run.model.save(temporary)
    return MetricsWriter(run.folder, step, run.wandb, run.to_dict())


def _watchdog(run: Run, ranks: Ranks) -> Watchdog | nullcontext[None]:
    """Return the watchdog; no watchdog for one process, because a laptop may sleep during a run."""
    if ranks.world == 1 or run.hang_minutes is None:
        return nullcontext()
    return Watchdog(_stacks(run), ranks.rank, run.hang_minutes)


def _stacks(run: Run) -> Path:
    return run.folder / "stacks"
