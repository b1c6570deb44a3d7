"""The beginning of a session: the first rank claims the run's folder and finds what the session trains.

A session starts a run in a new folder, or resumes the run of the folder, whose settings it then has to share. It
overwrites no file of a model, of another run, or of a user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gecko.data.tokenizers import SETTINGS, TOKENIZERS
from gecko.io.checkpoints import checkpoint_step, list_checkpoints
from gecko.io.files import locked, mend_lines
from gecko.io.model_folder import CONFIG, WEIGHTS, check_one_model, run_or_checkpoint
from gecko.parallel.mesh import MeshSizes, Ranks, connected, launched, only_first_rank_reports
from gecko.runtime.process import flushed_denormals
from gecko.runtime.terminal import Terminal, lasting_output
from gecko.train.checkpoints import latest_checkpoint
from gecko.train.finish import REPORT, RESULTS, SAMPLE
from gecko.train.health import launcher_watched
from gecko.train.metrics import METRICS, SESSIONS, mend_metrics, read_metrics, row_layout, run_start
from gecko.train.run import RECIPE, Run, has_role
from gecko.train.settings import Role, flatten
from gecko.train.throughput import multiplies_bfloat16, select_device

_LOCK = ".training"


@dataclass(frozen=True)
class Process:
    """The process that trains."""

    ranks: Ranks
    device: torch.device
    console: Console
    """Prints on the first rank only."""


@contextmanager
def launch(run: Run) -> Iterator[Process]:
    """Context in which the processes that were started are connected as the ranks of ``run``."""
    _, world, local = launched()
    with only_first_rank_reports():
        sizes = MeshSizes.of(world, run.parallel.replicate, run.parallel.shard, run.parallel.context)
        run.rows_per_rank(sizes.data_ranks)
    # Each rank reports its own device error, because the first rank may have none.
    device = select_device(run.device, local if world > 1 else None)
    # The watchdog must act before a collective times out, because it writes the stacks.
    timeout = None if run.hang_minutes is None else timedelta(minutes=2 * run.hang_minutes)
    with lasting_output(), launcher_watched(), flushed_denormals(), connected(sizes, device, timeout) as ranks:
        yield Process(ranks, device, Terminal(soft_wrap=True, quiet=not ranks.is_main))


@dataclass(frozen=True)
class Beginning:
    """What a session trains, as the first rank found it."""

    run: Run
    fixed: tuple[str, ...]
    """Overrides of the run: what earlier sessions fixed, and the precision. They are in ``run``."""
    checkpoint: Path | None
    """The newest undamaged checkpoint; None if the run starts."""
    layout: int
    """Row layout that the run started with."""
    started: datetime
    """When the run started."""


def begin(run: Run, resume: bool, process: Process, stack: ExitStack) -> Beginning:
    """Claim the run's folder until ``stack`` is closed, and return what to train. All ranks call it together.

    Only the first rank reads and writes files, but for the checksums of a checkpoint, which all ranks share. Ranks may
    differ in settings of their machines, such as ``checkpoint.memory_folder``: each gets its own run.
    """
    ranks = process.ranks
    ranks.main(lambda: _claim(run, resume, stack))
    checkpoint = latest_checkpoint(run.checkpoints_folder, ranks)
    first = ranks.main(lambda: _start(run, resume, checkpoint, process.device))
    return ranks.run_or_abort_all(lambda: _on_this_rank(run, first))


def _claim(run: Run, resume: bool, stack: ExitStack) -> None:
    # Before the lock, which is a file in the folder: a model's folder must stay as it is.
    _check_no_model(run)
    # Two sessions would mix metrics and remove each other's checkpoints.
    stack.enter_context(locked(run.folder / _LOCK, wait=False))
    _check_overwrites_nothing(run, resume)
    if resume:  # torn and damaged lines go, so that lines can be appended
        mend_metrics(run.folder / METRICS)
        mend_lines(run.folder / SESSIONS)


def _start(run: Run, resume: bool, checkpoint: Path | None, device: torch.device) -> Beginning:
    fixed = [] if not resume else _fixed_at_begin(run) if checkpoint is None else _fixed_until(run, checkpoint)
    if run.with_settings(*fixed).precision == "auto":
        fixed.append(f"precision={'bfloat16' if multiplies_bfloat16(device) else 'float32'}")
    run = run.with_settings(*fixed)
    return Beginning(run, tuple(fixed), checkpoint, row_layout(checkpoint), run_start(checkpoint))


def _on_this_rank(run: Run, first: Beginning) -> Beginning:
    run = run.with_settings(*first.fixed)
    if first.checkpoint is not None:
        _check_same_run(run, first.run, "the first rank has")
    return replace(first, run=run)


def _check_no_model(run: Run) -> None:
    """Raise FileExistsError if the run's folder holds a model, ValueError if it has one beside those of a run."""
    check_one_model(run.folder)
    if (run.folder / CONFIG).exists() and run_or_checkpoint(run.folder) != "a training run":
        raise FileExistsError(
            f"a run must have a folder without a model; {run.folder} has a {CONFIG}, and no command could tell that "
            f"model from the run's. Choose another folder with output=, or move {CONFIG} and {WEIGHTS} away."
        )


def _check_overwrites_nothing(run: Run, resume: bool) -> None:
    """Raise FileExistsError if the folder holds a run that this session would overwrite."""
    if (folder := run.checkpoints_folder).exists() and not folder.is_dir():
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
    """Return what a session fixed that was killed before its first checkpoint, if all else is equal.

    Raise ValueError if another run trained in the folder.
    """
    recipe = run.folder / RECIPE
    if not recipe.is_file():
        return []
    begun = Run.load(recipe)
    if any(record["kind"] == "train" for record in read_metrics(run.folder / METRICS)):
        _check_same_run(run, begun, f"the run in {run.folder} was begun with")
    fixed = _fixed_by(run, begun)
    return fixed if _settings(run.with_settings(*fixed)) == _settings(begun) else []


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


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings without ``overrides``, which only say how they were given."""
    return {**run.to_dict(), "overrides": None}


def _fixed_until(run: Run, checkpoint: Path) -> list[str]:
    """Return what the sessions before ``checkpoint`` fixed. ValueError if it is of another run."""
    saved = Run.load(checkpoint / RECIPE)
    _check_same_run(run, saved, "the checkpoint was trained with")
    if run.steps is None:
        saved = _decided(run, saved)
        _check_same_minutes(run, saved)
    fixed = _fixed_by(run, saved)
    steps, done = run.with_settings(*fixed).steps, checkpoint_step(checkpoint)
    if steps is not None and steps < done:
        raise ValueError(f"steps must be at least the {done} that are done; got {steps}. Start a new run for fewer.")
    return fixed


def _decided(run: Run, saved: Run) -> Run:
    """Return the run of the folder in place of ``saved`` if its steps were fixed by the clock after that was saved."""
    if saved.steps is None and _holds_recipe(run.folder / RECIPE):
        newest = Run.load(run.folder / RECIPE)
        if newest.schedule.decay_steps is not None and newest.minutes == run.minutes:
            return newest
    return saved


def _check_same_minutes(run: Run, saved: Run) -> None:
    """Raise ValueError if ``minutes`` changed after fixing the steps, or if not fixed and ``run`` ignores the clock."""
    if saved.steps is not None and run.minutes != saved.minutes:
        raise ValueError(
            f"minutes become steps once, and this run's are fixed at {saved.steps}; "
            f"got minutes={run.minutes:g}. Set steps= for another length, or start a new run with another output=."
        )
    if saved.steps is None and not run.follows_clock:
        raise ValueError(
            f"schedule.kind must be wsd to resume a run that follows the clock; got {run.schedule.kind}. Set steps= "
            "for another schedule, or start a new run with another output=."
        )


def _check_same_run(run: Run, earlier: Run, what: str) -> None:
    """Raise ValueError if ``run`` cannot continue or replace ``earlier``, which ``what`` names in the message."""
    given = fixed_settings(run)
    for name, value in fixed_settings(earlier).items():
        if value != given.get(name):
            raise ValueError(
                f"{name} must be what {what}, {value!r}; got {given.get(name)!r}. "
                "Leave it as it was, or start a new run with another output=."
            )


def fixed_settings(run: Run) -> dict[str, Any]:
    """Return the settings that all sessions of a run have in common."""
    return {name: value for name, value in flatten(run.to_dict()).items() if has_role(name, Role.FIXED)}
