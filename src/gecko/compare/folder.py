"""What is on disk of a comparison's run: nothing, a part of it, all of it, or something else."""

from __future__ import annotations

from pathlib import Path

from gecko.compare.plan import Planned
from gecko.files import whole_file
from gecko.json_file import read_object
from gecko.train import Run
from gecko.train.evaluate import Evaluation
from gecko.train.fields import flatten
from gecko.train.session import RESULTS

PLANNED, LOG, LOCK = "planned.json", "log.txt", ".lock"
"""The lock is of the comparison in its folder, and of a worker in its run's: there training has one of its own."""
_MOVABLE = ("output", "recipe", "overrides")
"""Fields that may be others when a comparison goes on: where it is, and how its runs were named."""


def claim(planned: Planned) -> Path:
    """The file that describes the run, written into its folder where it is not there yet.

    Raises:
        ValueError: the folder holds another run, or something else.
    """
    path = planned.run.folder / PLANNED
    if path.is_file():
        _check_same(planned.run, Run.load(path), path)
    elif any(not entry.name.startswith(".") for entry in planned.run.folder.glob("*")):
        raise ValueError(
            f"{planned.run.folder} must be empty or hold a run of this comparison, with a {PLANNED}; it holds "
            "something else. Move it away, or choose another --out."
        )
    with whole_file(path) as temporary:
        planned.run.save(temporary)
    return path


def evaluation_of(run: Run) -> Evaluation | None:
    """Of the finished run; None where it is not finished.

    Raises:
        ValueError: the results are not those of a run.
    """
    path = run.folder / RESULTS
    try:
        return Evaluation(**read_object(path, "the results of a run"))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must be the results of a run; it is not ({error}). Move it away.") from error


def _check_same(planned: Run, found: Run, path: Path) -> None:
    wanted, there = flatten(planned.to_dict()), flatten(found.to_dict())
    different = [
        f"{name} ({there.get(name)} there, {wanted.get(name)} now)"
        for name in {**wanted, **there}
        if name not in _MOVABLE and wanted.get(name) != there.get(name)
    ]
    if different:
        raise ValueError(
            f"{path.parent} must hold the run that is asked for; it holds one with another {', '.join(different)}. "
            "Ask for the same as before, or choose another --out."
        )
