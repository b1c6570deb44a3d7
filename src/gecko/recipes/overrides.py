"""``key=value`` changes to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gecko.train import Run
from gecko.train.described import described
from gecko.train.fields import set_fields

_FIXED = ("recipe", "overrides", "model.model_type")


def apply_overrides(run: Run, overrides: Sequence[str]) -> Run:
    """``run`` with each ``key=value`` applied, as ``optimizer.learning_rate=3e-3``; the last of two wins.

    Values are read as the field's annotation asks. The changes apply together, so that fields which must
    agree can change in any order. ValueError for an unknown key (with the nearest), a value that does not fit, or
    minutes for a run whose steps are fixed.
    """
    values = run.to_dict()
    set_fields(values, overrides, _FIXED)
    changed = Run.from_dict(values)
    # Of two values for a key the command needs the last one only.
    latest = {override.partition("=")[0]: override for override in (*run.overrides, *overrides)}
    _check_minutes(run, changed, overrides)
    return dataclasses.replace(changed, overrides=tuple(latest.values()))


def shown(run: Run) -> Iterator[str]:
    """A line for each setting that an override can change: the one that sets it to what it is, and what it means."""
    for name, value, meaning in described(run):
        if name not in _FIXED:
            yield f"{f'{name}={value}':<34} {meaning}"


def _check_minutes(run: Run, changed: Run, overrides: Sequence[str]) -> None:
    """ValueError where ``overrides`` change the minutes alone, and the run has steps, which go before them."""
    steps_given = any(override.startswith("steps=") for override in overrides)
    if changed.steps is None or steps_given or changed.minutes in (None, run.minutes):
        return
    raise ValueError(
        f"minutes are used only where steps is none, and steps are fixed at {changed.steps}; "
        f"got minutes={changed.minutes:g}. Set steps= for another length, or steps=none beside minutes= "
        "to measure how many fit into them."
    )
