"""Models of runs and evaluations, and their scores by model, case and seed.

Runs that differ only in their seed are one model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gecko.experiments.report.material import RECIPE, EvaluationFile, Material, RunFolder
from gecko.io.files import read_object
from gecko.pages import LineStyle
from gecko.train.metrics import METRICS
from gecko.train.overrides import current_fields, flatten

_NOT_THE_MODEL = (
    "command", "output", "seed", "recipe", "overrides", "device", "threads", "wandb", "profile", "hang_minutes",
    "minutes", "max_skips", "checkpoint", "sample", "parallel", "gradient_accumulation_steps",
    "activation_checkpointing", "compile",
)  # fmt: skip
"""Fields of a recipe that do not change the trained model, except by rounding. ``minutes`` became a number of steps."""
_LONGEST_DIFFERENCE = 30


@dataclass(frozen=True)
class Identity:
    """Name and settings of a model, which are the same for all seeds, and the seed."""

    name: str
    settings: tuple[tuple[str, str], ...]
    seed: int | None
    """Training seed; None if unknown."""

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any], seed: int | None) -> Identity:
        known = ((key, json.dumps(value)) for key, value in settings.items() if value is not None)
        return cls(name, tuple(sorted(known)), seed)

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.name, self.settings


@dataclass(frozen=True)
class Subject:
    """Label and line style of a model, the same everywhere on the page."""

    label: str
    differences: str
    """Settings that differ from other models of the same recipe."""
    style: LineStyle


def identity_of_run(run: RunFolder) -> Identity:
    """Return the identity of a run's model."""
    fields = {name: value for name, value in current_fields(run.recipe).items() if name not in _NOT_THE_MODEL}
    settings = {name: value for name, value in flatten(fields).items() if name != "evaluation.every"}
    return Identity.of(_name(run), settings, int(run.recipe["seed"]))


def _name(run: RunFolder) -> str:
    """Return the recipe's name, or the model's name in a comparison's folder MODEL/seed-N."""
    folder, seed = run.folder.resolve(), int(run.recipe["seed"])
    source = str(run.recipe.get("recipe") or "")
    if folder.name == f"seed-{seed}" and folder.parent.name:
        return folder.parent.name
    return folder.name if not source or source.endswith(".json") else source


def identity_of_evaluation(file: EvaluationFile, runs: Sequence[RunFolder]) -> Identity:
    """Return the identity of the run that has the file in its folder or that its model names; else a new identity."""
    if file.kind == "diagnose":
        return Identity.of("", flatten(file.record["settings"]), int(file.record["seed"]))
    name = str(file.record["model"].get("name", file.path.stem))
    run = file.run or _run_named(Path(name), runs)
    if run is not None:
        return identity_of_run(run)
    model, seed = _seed_in_name(Path(name))
    return Identity.of(model, {"config": file.record["model"].get("config")}, seed)


def name_subjects(identities: Sequence[Identity]) -> dict[Any, Subject]:
    """Return subjects by key. Labels are recipes; models of the same recipe are told apart by their differences."""
    keys = list(dict.fromkeys(identity.key for identity in identities))
    by_name: dict[str, list[Any]] = {}
    for key in keys:
        by_name.setdefault(key[0], []).append(key)
    labels = {key: pair for group in by_name.values() for key, pair in zip(group, _labels(group), strict=True)}
    return {key: Subject(*labels[key], LineStyle.of(number)) for number, key in enumerate(keys)}


def _labels(group: Sequence[Any]) -> list[tuple[str, str]]:
    """Return label and differences of each model of the same name."""
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
    """Return the last part of a dotted name if it is unique, else the whole name."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _plain(value: str | None) -> str:
    return "none" if value is None else value.strip('"')


def _letters(number: int) -> str:
    return ("" if number < 26 else _letters(number // 26 - 1)) + chr(ord("A") + number % 26)


def _run_named(name: Path, runs: Sequence[RunFolder]) -> RunFolder | None:
    """Return the run that a model's name means: by path, by the end of its path, or a run that exists there."""
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
    """Split the name of a comparison's folder, such as ``runs/gecko/seed-3``, into model and seed."""
    start, _, number = name.name.partition("-")
    if start == "seed" and number.isdecimal() and name.parent.name:
        return str(name.parent), int(number)
    return str(name), None


_NORMS = "norm statistics of"


@dataclass(frozen=True)
class Place:
    """Name of a score and its case of the evaluation."""

    score: str
    where: tuple[tuple[str, str | int | float], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.where)[name]


@dataclass(frozen=True)
class Model:
    """A column of tables and a line of pictures: a subject with its seeds and its kind of norm statistics."""

    subject: Subject
    seeds: tuple[int | None, ...]
    parameters: int | None
    norms: str = ""

    @property
    def label(self) -> str:
        return f"{self.subject.label}, norms of the {self.norms}" if self.norms else self.subject.label

    @property
    def style(self) -> LineStyle:
        style = self.subject.style
        return replace(style, dashes=(0, (3, 1, 1, 1, 1, 1)), marker="*") if self.norms else style

    def detail(self) -> str:
        """Return seeds and number of parameters as text."""
        known = [str(seed) for seed in self.seeds if seed is not None]
        words = {0: "seed not known", 1: f"seed {', '.join(known)}"}.get(len(known), f"seeds {', '.join(known)}")
        return words if self.parameters is None else f"{words}; {self.parameters:,} parameters"


Scores = Mapping[Place, Mapping[int | None, Mapping[str, Any]]]
"""Scores of one model by place and seed, as in result files."""


@dataclass(frozen=True)
class Evaluated:
    """A result file with its model; a file with several kinds of norm statistics becomes several of these."""

    file: EvaluationFile
    subject: Subject
    seed: int | None
    norms: str
    scores: Sequence[Mapping[str, Any]]
    details: Mapping[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.file.record["settings"]

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the evaluated files, without their folders."""
        return tuple(Path(text).name for text in self.settings.get("texts", ()))

    @property
    def named_texts(self) -> str:
        """The first three names, and the number of further ones."""
        more = f" and {len(self.texts) - 3} more" if len(self.texts) > 3 else ""
        return f"{', '.join(self.texts[:3])}{more}"

    def about(self, amount: str) -> str:
        """Describe the texts and the amount of them that was read."""
        return f"{self.named_texts} ({amount}, tokenizer {self.tokenizer})"

    @property
    def tokenizer(self) -> str:
        return str(self.file.record["model"].get("tokenizer", "not known"))


def evaluated(
    files: Sequence[EvaluationFile], identities: Mapping[int, Identity], subjects: Mapping[Any, Subject]
) -> list[Evaluated]:
    """Return the files with their subjects. ``identities`` are keyed by the file's ``id``."""
    found = []
    for file in files:
        identity = identities[id(file)]
        subject, record = subjects[identity.key], file.record
        kinds = dict.fromkeys(str(score["where"].get(_NORMS, "")) for score in record["scores"])
        for kind in kinds:
            scores = [_without_norms(score) for score in record["scores"] if score["where"].get(_NORMS, "") == kind]
            details = record["details"][kind] if kind else record["details"]
            norms = kind if kind != next(iter(kinds)) else ""
            found.append(Evaluated(file, subject, identity.seed, norms, scores, details))
    return found


def partition(items: Iterable[Evaluated], key: Callable[[Evaluated], Hashable]) -> list[list[Evaluated]]:
    """Group items by key, in order. Items of a group can be compared."""
    groups: dict[Hashable, list[Evaluated]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def collect(items: Sequence[Evaluated], material: Material) -> dict[Model, Scores]:
    """Return scores by model. If two files have the same score of the same seed, the second is left out."""
    found: dict[tuple[Subject, str], dict[Place, dict[int | None, Mapping[str, Any]]]] = {}
    for item in items:
        of_model = found.setdefault((item.subject, item.norms), {})
        for score in item.scores:
            by_seed = of_model.setdefault(Place(score["name"], tuple(score["where"].items())), {})
            if by_seed.setdefault(item.seed, score) is not score:
                material.leave_out(
                    item.file.path, f"{item.file.kind}: some scores are of a model and seed shown already"
                )
    return {_model(subject, norms, items): scores for (subject, norms), scores in found.items()}


def by_model(items: Sequence[Evaluated]) -> dict[Model, list[Evaluated]]:
    """Return items by model, one per seed."""
    found: dict[tuple[Subject, str], dict[int | None, Evaluated]] = {}
    for item in items:
        found.setdefault((item.subject, item.norms), {}).setdefault(item.seed, item)
    return {_model(subject, norms, items): list(seeds.values()) for (subject, norms), seeds in found.items()}


def _model(subject: Subject, norms: str, items: Sequence[Evaluated]) -> Model:
    mine = [item for item in items if (item.subject, item.norms) == (subject, norms)]
    parameters = next((item.file.record["model"]["parameters"] for item in mine
                       if "parameters" in item.file.record["model"]), None)  # fmt: skip
    return Model(subject, tuple(dict.fromkeys(item.seed for item in mine)), parameters, norms)


def _without_norms(score: Mapping[str, Any]) -> dict[str, Any]:
    return {**score, "where": {name: value for name, value in score["where"].items() if name != _NORMS}}
