"""Which model each run and each evaluation is of: runs that differ in nothing but their seed are one model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.json_file import read_object
from gecko.pages.drawing import LineStyle
from gecko.report.reading import RECIPE, EvaluationFile, RunFolder
from gecko.train.fields import flatten
from gecko.train.metrics import METRICS

_NOT_THE_MODEL = (
    "command", "output", "seed", "recipe", "overrides", "device", "threads", "wandb", "profile", "hang_minutes",
    "minutes", "max_skips", "checkpoint", "sample", "parallel", "accumulation", "activation_checkpointing", "compile",
)  # fmt: skip
"""Fields of a recipe that do not change what is learnt, but for rounding; ``minutes`` became a number of steps."""
_LONGEST_DIFFERENCE = 30


@dataclass(frozen=True)
class Identity:
    """A model's name and settings, the same for all seeds, and the seed."""

    name: str
    settings: tuple[tuple[str, str], ...]
    seed: int | None
    """Of the training; None where it is not known."""

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], seed: int | None) -> Identity:
        known = ((key, json.dumps(value)) for key, value in settings.items() if value is not None)
        return cls(name, tuple(sorted(known)), seed)

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.name, self.settings


@dataclass(frozen=True)
class Subject:
    """A model as the page shows it, under one name and with one line style everywhere."""

    label: str
    differences: str
    """In which settings it differs from models of the same recipe."""
    style: LineStyle


def identity_of_run(run: RunFolder) -> Identity:
    fields = {name: value for name, value in run.recipe.items() if name not in _NOT_THE_MODEL}
    settings = {name: value for name, value in flatten(fields).items() if name != "evaluation.every"}
    return Identity.of(_name(run), settings, int(run.recipe["seed"]))


def _name(run: RunFolder) -> str:
    """Its recipe's; in a comparison, where folders are MODEL/seed-N, the model's there."""
    folder, seed = run.folder.resolve(), int(run.recipe["seed"])
    source = str(run.recipe.get("recipe") or "")
    if folder.name == f"seed-{seed}" and folder.parent.name:
        return folder.parent.name
    return folder.name if not source or source.endswith(".json") else source


def identity_of_evaluation(file: EvaluationFile, runs: Sequence[RunFolder]) -> Identity:
    """The run's in whose folder the file lies, or that its model's name means; else a model of its own."""
    if file.kind == "diagnose":
        return Identity.of("", flatten(file.record["settings"]), int(file.record["seed"]))
    name = str(file.record["model"].get("name", file.path.stem))
    run = file.run or _run_named(Path(name), runs)
    if run is not None:
        return identity_of_run(run)
    model, seed = _seed_in_name(Path(name))
    return Identity.of(model, {"config": file.record["model"].get("config")}, seed)


def name_subjects(identities: Sequence[Identity]) -> dict[Any, Subject]:
    """Labels by key, in order: the recipe, and where several models have it, in what they differ."""
    keys = list(dict.fromkeys(identity.key for identity in identities))
    by_name: dict[str, list[Any]] = {}
    for key in keys:
        by_name.setdefault(key[0], []).append(key)
    labels = {key: pair for group in by_name.values() for key, pair in zip(group, _labels(group), strict=True)}
    return {key: Subject(*labels[key], LineStyle.of(number)) for number, key in enumerate(keys)}


def _labels(group: Sequence[Any]) -> list[tuple[str, str]]:
    """Label and differences of models of the same name."""
    name, settings = group[0][0], [dict(key[1]) for key in group]
    if len(group) == 1:
        return [(name or "Gecko", "")]
    every = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in every if len({one.get(key) for one in settings}) > 1]
    texts = [", ".join(f"{_short(key, differing)}={_plain(one.get(key))}" for key in differing) for one in settings]
    if all(len(text) <= _LONGEST_DIFFERENCE for text in texts):
        return [(f"{name}, {text}" if name else text, text) for text in texts]
    return [(f"{name or 'model'} {_letters(number)}", text) for number, text in enumerate(texts)]


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted name, where no other ends so."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _plain(value: str | None) -> str:
    return "none" if value is None else value.strip('"')


def _letters(number: int) -> str:
    return ("" if number < 26 else _letters(number // 26 - 1)) + chr(ord("A") + number % 26)


def _run_named(name: Path, runs: Sequence[RunFolder]) -> RunFolder | None:
    """The run that a command called so: by its path, else by how its path ends; or one that still lies there."""
    exact = [run for run in runs if run.folder.resolve() == name.resolve()]
    parts = [part for part in name.parts if part not in ("..", ".")]
    ending = [run for run in runs if parts and list(run.folder.resolve().parts[-len(parts) :]) == parts]
    found = exact or ending
    if len(found) == 1:
        return found[0]
    if not found and (name / RECIPE).is_file() and (name / METRICS).is_file():
        return RunFolder(name, read_object(name / RECIPE, "a recipe"), [], None, [])
    return None


def _seed_in_name(name: Path) -> tuple[str, int | None]:
    """``runs/gecko/seed-3`` as comparisons name their folders: the model, and the seed."""
    start, _, number = name.name.partition("-")
    if start == "seed" and number.isdecimal() and name.parent.name:
        return str(name.parent), int(number)
    return str(name), None
