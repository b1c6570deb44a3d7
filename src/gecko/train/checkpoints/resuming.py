"""Which run a session trains: checks of the run's folder, and what earlier sessions of the run fixed.

A session starts a run in a new folder, or resumes the run of the folder, whose settings it then has to share. It
overwrites no file of a model, of another run, or of a user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gecko.data.tokenizers import SETTINGS, TOKENIZERS
from gecko.io.checkpoints import checkpoint_step, list_checkpoints
from gecko.io.files import mend_lines
from gecko.io.model_folder import CONFIG, WEIGHTS, check_one_model, run_or_checkpoint
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoints.checkpointer import checkpoints_folder, tokenizer_folder
from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.metrics import METRICS, SESSIONS, mend_metrics, read_metrics
from gecko.train.overrides import flatten
from gecko.train.report import REPORT, RESULTS, SAMPLE
from gecko.train.run import RECIPE, Run, has_role
from gecko.train.settings import Role


def start_or_resume(run: Run, resume: bool, ranks: Ranks) -> tuple[Run, Path | None]:
    """Return the run with the settings that earlier sessions fixed, and its newest sound checkpoint or None."""
    ranks.run_or_abort_all(lambda: _check_overwrites_nothing(run, resume) if ranks.is_main else None)
    if resume:
        ranks.run_or_abort_all(lambda: _mend_records(run) if ranks.is_main else None)
    checkpoint = latest_checkpoint(checkpoints_folder(run), ranks)
    if checkpoint is None:
        return ranks.run_or_abort_all(lambda: _begun_run(run)) if resume else run, None
    return ranks.run_or_abort_all(lambda: _resumed_run(run, checkpoint)), checkpoint


def check_no_model(run: Run) -> None:
    """Raise FileExistsError if the run's folder holds a model, ValueError if it has one beside those of a run."""
    check_one_model(run.folder)
    if (run.folder / CONFIG).exists() and run_or_checkpoint(run.folder) != "a training run":
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
    """Return ``run`` with what a session fixed that was killed before its first checkpoint, if all else is equal.

    Raise ValueError if another run trained in the folder.
    """
    recipe = run.folder / RECIPE
    if not recipe.is_file():
        return run
    begun = Run.load(recipe)
    if any(record["kind"] == "train" for record in read_metrics(run.folder / METRICS)):
        _check_same_run(run, begun, f"the run in {run.folder} was begun with")
    measured = _as_begun(run, begun)
    return measured if _settings(measured) == _settings(begun) else run


_FIXED_BY_TIME = (
    "profile", "schedule.kind", "schedule.warmup_steps", "schedule.decay_steps", "evaluation.rows",
    "evaluation.final_rows", "sample.tokens",
)  # fmt: skip
"""Settings that a session with ``minutes`` may fix, and then adds to its run's overrides, besides ``steps``."""


def _as_begun(run: Run, begun: Run) -> Run:
    """Return ``run`` with the precision and, unless it gives ``steps``, all else that sessions of ``begun`` fixed."""
    fixed = [f"precision={begun.precision}"] if run.precision == "auto" else []
    if run.steps is None:
        given = {override.partition("=")[0] for override in run.overrides}
        recorded = {override.partition("=")[0]: override for override in begun.overrides}
        fixed += [recorded[name] for name in _FIXED_BY_TIME if name in recorded and name not in given]
        fixed += [] if begun.steps is None else [f"steps={begun.steps}"]
    return run.with_settings(*fixed)


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings without ``overrides``, which only say how they were given."""
    return {**run.to_dict(), "overrides": None}


def _resumed_run(run: Run, checkpoint: Path) -> Run:
    """Return ``run`` with what its sessions fixed. ValueError if the checkpoint is of another run."""
    saved = Run.load(checkpoint / RECIPE)
    _check_same_run(run, saved, "the checkpoint was trained with")
    if run.steps is None:
        saved = _decided(run, saved)
        _check_same_minutes(run, saved)
    run = _as_begun(run, saved)
    done = checkpoint_step(checkpoint)
    if run.steps is not None and run.steps < done:
        raise ValueError(
            f"steps must be at least the {done} that are done; got {run.steps}. Start a new run for fewer."
        )
    return run


def _decided(run: Run, saved: Run) -> Run:
    """Return the run of the folder in place of ``saved`` if its steps were fixed by the clock after that was saved."""
    if saved.steps is None and _holds_recipe(run.folder / RECIPE):
        newest = Run.load(run.folder / RECIPE)
        if newest.schedule.decay_steps is not None and newest.minutes == run.minutes:
            return newest
    return saved


def _check_same_minutes(run: Run, saved: Run) -> None:
    """Raise ValueError if ``minutes`` or the kind of schedule changed, but must not in a run that is resumed."""
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
