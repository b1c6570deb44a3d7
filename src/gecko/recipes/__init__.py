"""Recipes: named functions that return a complete :class:`gecko.train.Run`, and ``key=value`` overrides of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gecko.config import unknown_name
from gecko.recipes.comparison import COMPARISON
from gecko.recipes.pretraining import gecko_1b, gecko_7b, gecko_15m, gecko_125m, llama2_7b, megalodon_7b, tiny
from gecko.train import Run
from gecko.train.overrides import current_override, set_fields, settings_help

_FIXED = ("recipe", "overrides", "model.model_type")


def apply_overrides(run: Run, overrides: Sequence[str]) -> Run:
    """``run`` with each ``key=value`` applied, as ``optimizer.learning_rate=3e-3``; the last of two wins.

    Values are read as the field's annotation asks. The changes apply together, so that fields which must
    agree can change in any order. ValueError for an unknown key (with the nearest), a value that does not fit, or
    minutes for a run whose steps are fixed.
    """
    overrides = [current_override(override) for override in overrides]
    values = run.to_dict()
    set_fields(values, overrides, _FIXED)
    changed = Run.from_dict(values)
    # Of two values for a key the command needs the last one only.
    latest = {override.partition("=")[0]: override for override in (*run.overrides, *overrides)}
    _check_minutes(run, changed, overrides)
    return dataclasses.replace(changed, overrides=tuple(latest.values()))


def shown(run: Run) -> Iterator[str]:
    """A line for each setting that an override can change: the one that sets it to what it is, and what it means."""
    for name, value, meaning in settings_help(run):
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


RECIPES: dict[str, Callable[[], Run]] = {
    "tiny": tiny,
    "gecko_15m": gecko_15m,
    "gecko_125m": gecko_125m,
    "gecko_1b": gecko_1b,
    "gecko_7b": gecko_7b,
    "megalodon_7b": megalodon_7b,
    "llama2_7b": llama2_7b,
    **COMPARISON,
}

__all__ = ["RECIPES", "apply_overrides", "get_recipe", "shown"]


def get_recipe(name: str) -> Run:
    """The run of that name, or the one in a ``recipe.json`` that an earlier run wrote.

    ValueError for an unknown name, with the nearest one; FileNotFoundError for a missing file.
    """
    if name.endswith(".json"):
        path = Path(name).expanduser()
        return _with_true_origin(Run.load(path)) if path.exists() else _missing(name)
    known = name.replace("-", "_")
    if known not in RECIPES:
        raise ValueError(unknown_name("recipe", name, RECIPES))
    return dataclasses.replace(RECIPES[known](), recipe=known)


def _with_true_origin(run: Run) -> Run:
    """``run`` without its recipe and overrides where they give another one: its file was edited, or the recipe."""
    try:
        again = apply_overrides(get_recipe(run.recipe), run.overrides) if run.recipe in RECIPES else None
    except ValueError:
        again = None
    return run if again == run else dataclasses.replace(run, recipe="", overrides=())


def _missing(name: str) -> Run:
    raise FileNotFoundError(
        f"{name} must be a recipe file that a run wrote; there is none. Recipes by name: {', '.join(RECIPES)}."
    )
