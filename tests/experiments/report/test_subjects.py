"""Grouping of runs and evaluations by model, and the names of the groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gecko.experiments.report.material import EvaluationFile, gather
from gecko.experiments.report.models import Identity, identity_of_evaluation, identity_of_run, name_subjects

Copy = Callable[[str, int], Path]


def identity(name: str, seed: int | None = 0, **settings: Any) -> Identity:
    return Identity.of(name, settings, seed)


def changed(folder: Path, **values: Any) -> Path:
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | values))
    return folder


def test_seeds_of_a_recipe_are_one_model(runs: Path) -> None:
    identities = [identity_of_run(run) for run in gather([runs]).runs]
    assert [(one.name, one.seed) for one in identities] == [
        ("small_chunk", 0), ("small_chunk", 1), ("small_gecko", 0), ("small_gecko", 1),
    ]  # fmt: skip
    assert [subject.label for subject in name_subjects(identities).values()] == ["small_chunk", "small_gecko"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seed": 7}, True), ({"output": "elsewhere"}, True), ({"threads": 8}, True), ({"minutes": 3}, True),
        ({"data.validation": None}, True), ({"steps": 13}, False), ({"batch_size": 4}, False),
        ({"recipe": "other"}, True), ({"precision": "bfloat16"}, False),
    ],
)  # fmt: skip
def test_what_makes_another_model(copied: Copy, change: dict[str, Any], same: bool) -> None:
    first, second = copied("small_gecko", 0), changed(copied("small_gecko", 1), **change)
    one, other = (identity_of_run(run) for run in gather([first, second]).runs)
    assert (one.key == other.key) is same


def test_a_run_outside_of_a_comparison_is_named_by_its_recipe(copied: Copy) -> None:
    folder = copied("small_gecko", 0)
    moved = folder.rename(folder.parent / "mine")
    assert identity_of_run(gather([moved]).runs[0]).name == "small_gecko"
    assert identity_of_run(gather([changed(moved, recipe="big")]).runs[0]).name == "big"
    assert identity_of_run(gather([changed(moved, recipe="runs/x/recipe.json")]).runs[0]).name == "mine"


def test_labels_name_what_differs() -> None:
    found = name_subjects([
        identity("a", steps=1, width=2), identity("a", steps=3, width=2), identity("b", steps=1, width=2),
    ])  # fmt: skip
    assert [subject.label for subject in found.values()] == ["a, steps=1", "a, steps=3", "b"]
    assert len({subject.style for subject in found.values()}) == 3


def test_long_differences_become_letters() -> None:
    settings = [{"model.attention": kind, "model.memory": kind, "model.chunk_size": 3} for kind in ("first", "second")]
    found = list(name_subjects([Identity.of("a", one, 0) for one in settings]).values())
    assert [subject.label for subject in found] == ["a A", "a B"]
    assert found[1].differences == "attention=second, memory=second"


def test_a_setting_that_one_lacks_differs() -> None:
    assert [one.label for one in name_subjects([identity("", memory="x"), identity("")]).values()] == [
        "memory=x", "memory=none",
    ]  # fmt: skip


def test_evaluations_find_their_run_by_the_name_of_its_model(runs: Path) -> None:
    material = gather([runs])
    seed = next(run for run in material.runs if run.folder == runs / "small_gecko" / "seed-1")

    def found(name: str) -> Identity:
        record = {"evaluation": "academic", "model": {"name": name, "config": {}}}
        return identity_of_evaluation(EvaluationFile(Path("x.json"), record), material.runs)

    for name in (str(seed.folder), f"{seed.folder}/", "small_gecko/seed-1", "./small_gecko/seed-1"):
        assert found(name) == identity_of_run(seed), name
    assert found("seed-1").name == "seed-1", "two runs end so"
    assert (found("elsewhere/gpt/seed-4").name, found("elsewhere/gpt/seed-4").seed) == ("elsewhere/gpt", 4)
    assert (found("models/gpt").name, found("models/gpt").seed) == ("models/gpt", None)


def test_evaluations_of_a_run_that_was_not_given_know_its_recipe(runs: Path) -> None:
    seeds = [runs / "small_gecko" / f"seed-{seed}" for seed in (0, 1)]
    material = gather([seeds[0], seeds[1] / "eval" / "perplexity.json"])
    of_file = identity_of_evaluation(material.evaluations[-1], material.runs)
    assert (of_file.key, of_file.seed) == (identity_of_run(material.runs[0]).key, 1)
