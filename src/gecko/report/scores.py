"""Scores of many result files, by model, by what they are of, and by seed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gecko.pages.drawing import LineStyle
from gecko.report.reading import EvaluationFile, Material
from gecko.report.subjects import Identity, Subject

_NORMS = "norm statistics of"


@dataclass(frozen=True)
class Place:
    """What a score is called, and which of the evaluation's cases it is of."""

    score: str
    where: tuple[tuple[str, str | int | float], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.where)[name]


@dataclass(frozen=True)
class Model:
    """A column of tables and a line of pictures: a subject with its seeds, and how its norms were read."""

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
        """Seeds and parameters, in small print."""
        known = [str(seed) for seed in self.seeds if seed is not None]
        words = {0: "seed not known", 1: f"seed {', '.join(known)}"}.get(len(known), f"seeds {', '.join(known)}")
        return words if self.parameters is None else f"{words}; {self.parameters:,} parameters"


Scores = Mapping[Place, Mapping[int | None, Mapping[str, Any]]]
"""Scores of one model, as result files hold them, by place and seed."""


@dataclass(frozen=True)
class Evaluated:
    """One result file with the model it is of; with several kinds of norm statistics, one for each."""

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
        """Names of the files that were read; where they lie says nothing."""
        return tuple(Path(text).name for text in self.settings.get("texts", ()))

    @property
    def named_texts(self) -> str:
        """The first of them in words."""
        more = f" and {len(self.texts) - 3} more" if len(self.texts) > 3 else ""
        return f"{', '.join(self.texts[:3])}{more}"

    def about(self, amount: str) -> str:
        """The texts in words, and how much of them was read."""
        return f"{self.named_texts} ({amount}, tokenizer {self.tokenizer})"

    @property
    def tokenizer(self) -> str:
        return str(self.file.record["model"].get("tokenizer", "not known"))


def evaluated(
    files: Sequence[EvaluationFile], identities: Mapping[int, Identity], subjects: Mapping[Any, Subject]
) -> list[Evaluated]:
    """Files with their subjects; ``identities`` are by a file's ``id``."""
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
    """Groups of what may be compared, in order."""
    groups: dict[Hashable, list[Evaluated]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def collect(items: Sequence[Evaluated], material: Material) -> dict[Model, Scores]:
    """Scores by model; of two files with the same score of the same seed the first is shown, the other left out."""
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
    """Items by model, one for each seed, for curves."""
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
