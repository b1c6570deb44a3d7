"""Recipes: named functions that return a complete ``gecko.train.Run``, and ``key=value`` overrides of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from gecko.io.files import read_object
from gecko.recipes.recipes import RECIPES
from gecko.records import unknown_name
from gecko.train.run import NOT_SETTINGS, RECIPE, Run
from gecko.train.settings import current_override, settings_help

__all__ = ["RECIPES", "apply_overrides", "get_recipe", "shown"]


def apply_overrides(run: Run, overrides: Sequence[str]) -> Run:
    """Return ``run`` with each ``key=value`` applied, for example ``optimizer.learning_rate=3e-3``.

    The annotation of the field determines how a value is parsed. Raise ValueError for an unknown key (with the nearest
    one), a value that does not fit, or minutes for a run whose steps are fixed.
    """
    overrides = [current_override(override) for override in overrides]
    changed = run.with_settings(*overrides)
    _check_minutes(run, changed, overrides)
    return changed


def shown(run: Run) -> Iterator[tuple[str, str]]:
    """Yield ``key=value`` with its value, and its meaning, for each setting that an override can change."""
    for name, value, meaning in settings_help(run):
        if name not in NOT_SETTINGS:
            yield f"{name}={value}", meaning


def _check_minutes(run: Run, changed: Run, overrides: Sequence[str]) -> None:
    """Raise ValueError if ``overrides`` change the minutes of a run with steps, because steps take precedence."""
    steps_given = any(override.startswith("steps=") for override in overrides)
    if changed.steps is None or steps_given or changed.minutes in (None, run.minutes):
        return
    raise ValueError(
        f"minutes are used only where steps is none, and steps are fixed at {changed.steps}; "
        f"got minutes={changed.minutes:g}. Set steps= for another length, or steps=none beside minutes= "
        "to measure how many fit into them."
    )


def get_recipe(name: str) -> Run:
    """Return the run of a recipe name, or the run in a ``recipe.json`` that an earlier run wrote.

    Raise ValueError for an unknown name, with the nearest one, and FileNotFoundError for a missing file.
    """
    if name.endswith(".json"):
        path = Path(name).expanduser()
        if not path.exists():
            raise FileNotFoundError(
                f"{name} must be a recipe file that a run wrote; there is none. Recipes by name: {', '.join(RECIPES)}."
            )
        return _with_true_origin(_load_recipe(path))
    known = name.replace("-", "_")
    if known not in RECIPES:
        unknown = f"{unknown_name('recipe', name, RECIPES)} `gecko train --list` describes all of them."
        raise ValueError((name.strip() and _is_no_recipe(name)) or unknown)
    return dataclasses.replace(RECIPES[known](), recipe=known)


def _is_no_recipe(name: str) -> str | None:
    """Return the error message for the path of something else; None if ``name`` is no path."""
    path = Path(name).expanduser()
    if (path / RECIPE).is_file():
        return (
            f"a recipe must be a name or a recipe.json; {name} is a run or checkpoint. To train it further: "
            f"gecko train {path / RECIPE} --resume; to start a new run from its weights, add init_from={name} to a "
            "recipe."
        )
    if path.is_dir():
        return f"a recipe must be a name or a recipe.json; {name} is a folder. To train on it: {_on(name)}"
    if path.is_file():
        chats = f". To tune a model on chats in it: gecko finetune MODEL {name} --out runs/chat"
        return (
            f"a recipe must be a name or a recipe.json; {name} is another file. To train on it: {_on(name)}"
            f"{chats if path.suffix == '.jsonl' else ''}"
        )
    if path.suffix or path.parent != Path():
        start = _on("TEXT") if path.suffix else f"gecko train tiny --out {shlex.quote(name)}"
        return f"a recipe must be a name or a recipe.json; there is no {name}. To start a run: {start}"
    return None


def _on(name: str) -> str:
    return f"gecko train tiny data.source={shlex.quote(name)} --out runs/mine"


def _with_true_origin(run: Run) -> Run:
    """Clear ``recipe`` and ``overrides`` if they no longer give ``run``: its file or the recipe was edited."""
    try:
        again = apply_overrides(get_recipe(run.recipe), run.overrides) if run.recipe in RECIPES else None
    except ValueError:
        again = None
    return run if again == run else dataclasses.replace(run, recipe="", overrides=())


def _load_recipe(path: Path) -> Run:
    fields = read_object(path, "a recipe")
    if "model" not in fields:
        raise ValueError(
            f"a recipe.json must be one that a run wrote, with the field 'model'; {path} is another file. A tokenizer "
            f"is named by data.tokenizer={path}, a text by data.source={path}."
        )
    return Run.load(path)
