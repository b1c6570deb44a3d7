"""The training session: from a ``Run`` to a trained model, its metrics and its report.

A session starts a run in a new folder, or resumes the run of the folder, whose settings it then has to share. It
overwrites no file of a model, of another run, or of a user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gecko.data.tokenizers import SETTINGS, TEMPLATE, TOKENIZERS, copy_tokenizer
from gecko.io.checkpoints import checkpoint_path, checkpoint_step, list_checkpoints
from gecko.io.files import check_replaceable, locked, mend_lines, whole_file, write_text
from gecko.io.model_folder import CONFIG, WEIGHTS, check_one_model, run_or_checkpoint
from gecko.models import LanguageModel
from gecko.parallel.mesh import MeshSizes, Ranks, connected, launched, only_first_rank_reports
from gecko.runtime.process import flushed_denormals, keep_freed_memory
from gecko.runtime.terminal import Terminal, lasting_output
from gecko.train.budget import RunClock, measured
from gecko.train.capture import check_capture
from gecko.train.checkpoints import Checkpointer, latest_checkpoint
from gecko.train.data import Prefetcher, RunData, load_data
from gecko.train.evaluate import Evaluation
from gecko.train.finish import REPORT, RESULTS, SAMPLE, finish_run, remove_results
from gecko.train.health import NOTICES, STACKS, StopSignal, launcher_watched, watchdog, write_notice
from gecko.train.metrics import (
    FIELDS,
    METRICS,
    SESSIONS,
    MetricsWriter,
    check_same_data,
    read_metrics,
    record_session,
)
from gecko.train.model import check_float8, starting_model
from gecko.train.optimizer import build_optimizer
from gecko.train.run import RECIPE, Run, has_role
from gecko.train.settings import Role, flatten
from gecko.train.state import NodeCopies, TrainerState, restore_snapshot, write_recipe, write_tokenizer
from gecko.train.step import carried_state
from gecko.train.throughput import describe_hardware, multiplies_bfloat16, select_device
from gecko.train.trainer import Trainer, training_bar

_LOCK = ".training"


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

    A process that torchrun started trains as one of its ranks. If one rank fails, all do: the first raises the error,
    the others SystemExit. The last checkpoint is kept after every error.

    Args:
        resume: continue from the newest undamaged checkpoint in ``run.output``; start the run if there is none.
        begin: when the command began, for ``run.minutes``; None: with this call.
        now: returns the time in seconds.

    Raises:
        FileExistsError: the folder holds a run and ``resume`` is not set, a finished run without checkpoints, or a
        model. ValueError: the folder holds another run, another session trains in it, or the run does not fit the
        ranks. NonFiniteError: too many steps in a row were skipped, or what a checkpoint would hold is not finite.
        OSError: a checkpoint or the metrics cannot be written.
    """
    clock = RunClock(now, now() if begin is None else begin, run.minutes)
    with ExitStack() as stack:
        ranks, device = stack.enter_context(launch(run))
        run, checkpoint = _begin(run, resume, ranks, device, stack)
        ranks.run_or_abort_all(lambda: _set_up(run, ranks, device))
        data = load_data(run, ranks, checkpoint)
        if checkpoint is not None:
            ranks.main(lambda: check_same_data(run.folder, checkpoint, data.record.digest, ranks.console))
        model = starting_model(run, ranks, device, fresh=checkpoint is None)
        batches = Prefetcher(run, data.rows, ranks, pinned=device.type == "cuda")
        phase = "training"

        def notice(signal: str, again: bool) -> None:
            write_notice(signal, NOTICES[phase][again])

        with StopSignal(notice if ranks.is_main else None) as stop:
            if run.steps is None:
                phase = "measuring"
                run = measured(run, model, batches, data, ranks, clock, fresh=checkpoint is None)
                data, phase = data.evaluated_by(run.evaluation), "training"
            with _trainer(run, checkpoint, model, data, batches, ranks, clock) as trainer:
                trainer.fit(stop)
            run, step = trainer.run, trainer.position.step
            newest = checkpoint_path(run.checkpoints_folder, step)
            if step == run.steps:
                phase = "finishing"
                batches.close()
                return TrainResult(run, newest, step, *finish_run(run, model, data, newest, ranks))
        ranks.console.print(
            f"{stop.requested or 'a signal to another rank'}: saved after step {step} of "
            f"{run.steps or 'those that fit'}. Continue with:\n  {run.command()} --resume"
        )
        return TrainResult(run, newest, step, None, None)


@contextmanager
def launch(run: Run) -> Iterator[tuple[Ranks, torch.device]]:
    """Context in which the processes that were started are connected as the ranks of ``run``.

    It yields the ranks and this rank's device.
    """
    _, world, local = launched()
    with only_first_rank_reports():
        sizes = MeshSizes.of(world, run.parallel.replicate, run.parallel.shard, run.parallel.context)
        run.rows_per_rank(sizes.data_ranks)
    # Each rank reports its own device error, because the first rank may have none.
    device = select_device(run.device, local if world > 1 else None)
    # The watchdog must act before a collective times out, because it writes the stacks.
    timeout = None if run.hang_minutes is None else timedelta(minutes=2 * run.hang_minutes)
    with lasting_output(), launcher_watched(), flushed_denormals(), connected(sizes, device, timeout) as ranks:
        yield replace(ranks, console=Terminal(soft_wrap=True, quiet=not ranks.is_main)), device


def _begin(run: Run, resume: bool, ranks: Ranks, device: torch.device, stack: ExitStack) -> tuple[Run, Path | None]:
    """Claim the run's folder until ``stack`` is closed. Return the run with what its first session fixed, and its
    newest undamaged checkpoint (None: it starts).

    All ranks call it together. Only the first rank reads and writes files, but for the checksums of a checkpoint, which
    all ranks share. Ranks may differ in settings of their machines, such as ``checkpoint.memory_folder``: each gets its
    own run.
    """
    ranks.main(lambda: _claim(run, resume, stack))
    checkpoint = latest_checkpoint(run.checkpoints_folder, ranks)

    def found() -> tuple[Run, list[str]]:
        fixed = [] if not resume else _fixed_at_begin(run) if checkpoint is None else _fixed_until(run, checkpoint)
        if run.with_settings(*fixed).precision == "auto":
            fixed.append(f"precision={'bfloat16' if multiplies_bfloat16(device) else 'float32'}")
        return run.with_settings(*fixed), fixed

    first, fixed = ranks.main(found)

    def of_this_rank() -> Run:
        own = run.with_settings(*fixed)
        if checkpoint is not None:
            _check_same_run(own, first, "the first rank has")
        return own

    return ranks.run_or_abort_all(of_this_rank), checkpoint


def _claim(run: Run, resume: bool, stack: ExitStack) -> None:
    """Lock the run's folder, and refuse one in which the run would mix with or overwrite anything."""
    folder, checkpoints = run.folder, run.checkpoints_folder
    # Before the lock, which is a file in the folder: a model's folder must stay as it is.
    check_one_model(folder)
    if (folder / CONFIG).exists() and run_or_checkpoint(folder) != "a training run":
        raise FileExistsError(
            f"a run must have a folder without a model; {folder} has a {CONFIG}, and no command could tell that "
            f"model from the run's. Choose another folder with output=, or move {CONFIG} and {WEIGHTS} away."
        )
    check_replaceable(folder / CONFIG)  # each session writes it
    # Two sessions would mix metrics and remove each other's checkpoints.
    stack.enter_context(locked(folder / _LOCK, wait=False))
    if checkpoints.exists() and not checkpoints.is_dir():
        raise FileExistsError(
            f"{checkpoints} must be a folder, or the name of a new one; it is a file. Move it away, or choose another "
            "folder with output=."
        )
    saved, begun = bool(list_checkpoints(checkpoints)), (folder / METRICS).exists()
    if not begun and not _holds_recipe(folder / RECIPE):
        _check_files_of_others(run)
    if (folder / RESULTS).exists() and not saved:
        raise FileExistsError(
            f"{folder} must hold the checkpoints of its run, which is finished; they are gone, and nothing there "
            "is overwritten. Choose another folder with output=, or move it away."
        )
    if (saved or begun) and not resume:
        raise FileExistsError(
            f"{folder} already holds a run, and nothing there is overwritten. Continue it with --resume, "
            "or choose another folder with output=."
        )
    if resume:  # torn and damaged lines go, so that lines can be appended
        mend_lines(folder / METRICS, FIELDS)
        mend_lines(folder / SESSIONS)


def _check_files_of_others(run: Run) -> None:
    """Refuse the folder if it has a file that the run would replace or delete."""
    replaced = [run.folder / name for name in (RECIPE, SAMPLE, REPORT)]
    if run.tokenizer_folder.resolve() not in (path := Path(run.data.tokenizer).resolve(), path.parent):
        replaced += [run.tokenizer_folder / name for name in (*TOKENIZERS, *SETTINGS)]
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


def _fixed_at_begin(run: Run) -> list[str]:
    """Return what a session fixed that was killed before its first checkpoint, if all else is equal. ValueError if
    another run trained in the folder."""
    if not (run.folder / RECIPE).is_file():
        return []
    begun = Run.load(run.folder / RECIPE)
    if _last_step(run):
        _check_same_run(run, begun, f"the run in {run.folder} was begun with")
    fixed = _fixed_by(run, begun)
    same = replace(run.with_settings(*fixed), overrides=()) == replace(begun, overrides=())
    return fixed if same else []


_FIXED_BY_TIME = (
    "profile", "schedule.kind", "schedule.warmup_steps", "schedule.decay_steps", "evaluation.rows",
    "evaluation.final_rows", "sample.tokens",
)  # fmt: skip
"""Settings that a session with ``minutes`` may fix, and then adds to its run's overrides, besides ``steps``."""


def _fixed_by(run: Run, begun: Run) -> list[str]:
    """Return, as overrides, what a resumed run takes from its first session, ``begun``: the precision if it is "auto",
    and, unless ``run`` gives ``steps``, the steps and sizes that were chosen for ``minutes``."""
    fixed = [f"precision={begun.precision}"] if run.precision == "auto" else []
    if run.steps is None:
        given = {override.partition("=")[0] for override in run.overrides}
        recorded = {override.partition("=")[0]: override for override in begun.overrides}
        fixed += [recorded[name] for name in _FIXED_BY_TIME if name in recorded and name not in given]
        fixed += [] if begun.steps is None else [f"steps={begun.steps}"]
    return fixed


def _fixed_until(run: Run, checkpoint: Path) -> list[str]:
    """Return what the sessions before ``checkpoint`` fixed. ValueError if it is of another run."""
    saved, recipe = Run.load(checkpoint / RECIPE), run.folder / RECIPE
    _check_same_run(run, saved, "the checkpoint was trained with")
    if run.steps is None:
        if saved.steps is None and _holds_recipe(recipe):  # the clock may have fixed the steps since
            newest = Run.load(recipe)
            if newest.schedule.decay_steps is not None and newest.minutes == run.minutes:
                saved = newest
        if saved.steps is not None and run.minutes != saved.minutes:
            raise ValueError(
                f"minutes become steps once, and this run's are fixed at {saved.steps}; "
                f"got minutes={run.minutes:g}. Set steps= for another length, or start a new run with another output=."
            )
        if saved.steps is None and not run.follows_clock:
            raise ValueError(
                f"schedule.kind must be wsd to resume a run that follows the clock; got {run.schedule.kind}. Set "
                "steps= for another schedule, or start a new run with another output=."
            )
    fixed = _fixed_by(run, saved)
    steps, done = run.with_settings(*fixed).steps, checkpoint_step(checkpoint)
    if steps is not None and steps < done:
        raise ValueError(f"steps must be at least the {done} that are done; got {steps}. Start a new run for fewer.")
    return fixed


def _check_same_run(run: Run, earlier: Run, what: str) -> None:
    """Raise ValueError if ``run`` cannot continue or replace ``earlier``, which ``what`` names in the message."""
    given = fixed_settings(run)
    for name, value in fixed_settings(earlier).items():
        if value != given.get(name):
            raise ValueError(
                f"{name} must be what {what}, {value!r}; got {given.get(name)!r}. Leave it as it was, or start a new "
                "run with another output=."
            )


def fixed_settings(run: Run) -> dict[str, Any]:
    """Return the settings that all sessions of a run have in common."""
    return {name: value for name, value in flatten(run.to_dict()).items() if has_role(name, Role.FIXED)}


def _set_up(run: Run, ranks: Ranks, device: torch.device) -> None:
    console = ranks.console
    check_float8(run.precision, device)
    if run.capture:
        check_capture(device)
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    keep_freed_memory()
    if missing := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        lacking = " and ".join(missing)
        console.print(f"no report will be written: it needs {lacking}. Run: pip install 'gecko-lm[train]'")
    if ranks.world > 1:
        console.print(
            f"{ranks.world} ranks: {ranks.sizes.replicate} replicas × {ranks.sizes.shard} shards × "
            f"{ranks.sizes.context} parts of a row"
        )
    for path in sorted((run.folder / STACKS).glob("rank-*.txt")):
        if path.stat().st_size:
            console.print(f"an earlier session hung; the stack of one of its ranks is in {path}")


@contextmanager
def _trainer(
    run: Run, checkpoint: Path | None, model: LanguageModel, data: RunData, batches: Prefetcher, ranks: Ranks,
    clock: RunClock,
) -> Iterator[Trainer]:  # fmt: skip
    """Context with a trainer that continues where the run stands; at its end all checkpoints are on the disk."""
    console, optimizer = ranks.console, build_optimizer(model, run.optimizer)
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
            source = "the memory of the nodes" if recovered else checkpoint
            done = ": the run is complete, and only its final loss, sample and report are made anew"
            console.print(f"continuing after step {went_on}, from {source}{done * (went_on == run.steps)}")
            if run.profile is not None and run.profile[1] <= went_on:
                console.print(f"profile={run.profile[0]},{run.profile[1]} lies before that: no trace is written")
        metrics = stack.enter_context(ranks.run_or_abort_all(lambda: _records(run, model, data, went_on, ranks)))
        display = stack.enter_context(training_bar(console, position.step, run.steps))
        # No watchdog for one process, because a laptop may sleep during a run. It covers the wait for the disk, when
        # the checkpointer exits, also after an error.
        minutes = None if ranks.world == 1 else run.hang_minutes
        beat = stack.enter_context(watchdog(run.folder / STACKS, ranks.rank, minutes))
        saver = stack.enter_context(Checkpointer(run, ranks, beat, data.record, carried))
        if recovered is not None:  # a state that is in memory only would be lost with the next node
            saver.save(model, optimizer, position)
        yield Trainer(
            run, model, optimizer, carried, position, batches, data.held_out, ranks, clock, saver, display, metrics,
            beat, copies,
        )  # fmt: skip
        if copies is not None:
            copies.clear()


def _last_step(run: Run) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    return max((r["step"] for r in read_metrics(run.folder / METRICS) if r["kind"] == "train"), default=0)


def _records(
    run: Run, model: LanguageModel, data: RunData, step: int | None, ranks: Ranks
) -> MetricsWriter | nullcontext[None]:
    """Write recipe, tokenizer, config and a line about this session, which resumes after ``step`` (None: starts), and
    return the writer of the metrics. Ranks other than the first write nothing."""
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
