"""Runs by name. A recipe is a function that returns a complete :class:`gecko.train.Run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from gecko.config import unknown_name
from gecko.recipes.comparison import COMPARISON
from gecko.recipes.gecko_1b import gecko_1b
from gecko.recipes.gecko_7b import gecko_7b
from gecko.recipes.gecko_15m import gecko_15m
from gecko.recipes.gecko_125m import gecko_125m
from gecko.recipes.llama2_7b import llama2_7b
from gecko.recipes.megalodon_7b import megalodon_7b
from gecko.recipes.overrides import apply_overrides, shown
from gecko.recipes.tiny import tiny
from gecko.train import Run

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
