"""Models of runs and evaluations, places of losses, and means and intervals over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gecko.eval.results import Interval
from gecko.experiments.figures import counts, length_figure, mean_by_step
from gecko.experiments.inputs import EvaluationFile, Inputs, RunFolder, gather
from gecko.experiments.rows import (
    HELD_OUT,
    TEXTS,
    TRAINING_LOSS,
    Identity,
    Model,
    Row,
    by_model,
    estimate,
    identity_of_evaluation,
    identity_of_run,
    label_models,
    long_table,
    rows_of_run,
)
from gecko.pages import LineStyle
from gecko.train.metrics import Record

Copy = Callable[[str, int], Path]
MODEL = Model("model", LineStyle.of(0))


def changed(folder: Path, **values: Any) -> Path:
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | values))
    return folder


def test_seeds_of_a_recipe_are_one_model_and_another_recipe_is_another(runs: Path, copied: Copy) -> None:
    identities = [identity_of_run(run) for run in gather([runs]).runs]
    assert [model.label for model in label_models(identities).values()] == ["small_chunk", "small_gecko"]
    assert identities[0] == identities[1] != identities[2]
    first, folder = copied("small_gecko", 0), copied("small_gecko", 1)
    rows = {"every": 3, "rows": 4, "final_rows": 8}
    for change, same in (
        ({"seed": 7}, True), ({"output": "elsewhere"}, True), ({"threads": 8}, True), ({"minutes": 3}, True),
        ({"data.validation": None}, True), ({"recipe": "other"}, True), ({"evaluation": rows | {"every": 9}}, True),
        ({"steps": 13}, False), ({"batch_size": 4}, False), ({"precision": "bfloat16"}, False),
        ({"evaluation": rows | {"rows": 5}}, False),
    ):  # fmt: skip
        before = (folder / "recipe.json").read_text()
        one, other = (identity_of_run(run) for run in gather([first, changed(folder, **change)]).runs)
        assert (one == other) is same, change
        (folder / "recipe.json").write_text(before)


def test_a_run_outside_of_a_comparison_is_named_by_its_recipe(copied: Copy) -> None:
    folder = copied("small_gecko", 0)
    moved = folder.rename(folder.parent / "mine")
    assert identity_of_run(gather([moved]).runs[0]).name == "small_gecko"
    assert identity_of_run(gather([changed(moved, recipe="big")]).runs[0]).name == "big"
    assert identity_of_run(gather([changed(moved, recipe="runs/x/recipe.json")]).runs[0]).name == "mine"


@pytest.mark.parametrize(
    ("models", "labels", "differences"),
    [
        ([("a", {"steps": 1, "width": 2}), ("a", {"steps": 3, "width": 2}), ("b", {"steps": 1})],
         ["a, steps=1", "a, steps=3", "b"], ["steps=1", "steps=3", ""]),
        ([("a", {"model.attention": kind, "model.memory": kind, "model.chunk_size": 3}) for kind in
          ("first", "second")], ["a A", "a B"],
         ["attention=first, memory=first", "attention=second, memory=second"]),
        ([("", {"memory": "x"}), ("", {})], ["memory=x", "memory=none"], ["memory=x", "memory=none"]),
        ([("", {"memory": "x"})], ["Gecko"], [""]),
        ([("a", {TEXTS: "x"}), ("a", {TEXTS: "y"})], ["a, texts=x", "a, texts=y"], ["texts=x", "texts=y"]),
        ([("a", {"steps": 1, TEXTS: "x"}), ("a", {"steps": 2, TEXTS: "y"})], ["a, steps=1", "a, steps=2"],
         ["steps=1", "steps=2"]),
    ],
)  # fmt: skip
def test_labels_name_what_differs(models: list[tuple[str, Any]], labels: list[str], differences: list[str]) -> None:
    found = list(label_models(Identity.of(name, settings) for name, settings in models).values())
    assert [one.label for one in found] == labels and [one.differences for one in found] == differences
    assert len({one.style for one in found}) == len(found)


def test_evaluations_find_their_run_by_the_name_of_its_model(runs: Path) -> None:
    inputs = gather([runs])
    seed = next(run for run in inputs.runs if run.folder == runs / "small_gecko/seed-1")

    def found(name: str) -> tuple[Identity, int | None]:
        record = {"evaluation": "academic", "model": {"name": name, "config": {}}}
        return identity_of_evaluation(EvaluationFile(Path("x.json"), record), inputs.runs)

    for name in (str(seed.folder), f"{seed.folder}/", "small_gecko/seed-1", "./small_gecko/seed-1"):
        assert found(name) == (identity_of_run(seed), 1), name
    assert found("seed-1")[0].name == "seed-1", "two runs end so"
    assert [found(name)[0].name for name in ("elsewhere/gpt/seed-4", "models/gpt")] == ["elsewhere/gpt", "models/gpt"]
    assert [found(name)[1] for name in ("elsewhere/gpt/seed-4", "models/gpt")] == [4, None]
    inputs = gather([runs / "small_gecko/seed-0", seed.folder / "eval/perplexity.json"])
    of_other = identity_of_evaluation(inputs.evaluations[-1], inputs.runs)
    assert of_other == (identity_of_run(inputs.runs[0]), 1), "a run that was not given is known by its recipe"


def test_runs_of_texts_that_have_changed_are_other_models(runs: Path) -> None:
    one = next(run for run in gather([runs]).runs if run.seed == 0)
    other = replace(one, recipe={**one.recipe, "seed": 1}, sessions=[{**one.sessions[0], "data": "other"}])
    found = long_table(Inputs(runs=[one, replace(one, recipe={**one.recipe, "seed": 2}), other]))
    assert sorted(len({row.seed for row in rows}) for rows in by_model(found).values()) == [1, 2]
    assert len({row.text for row in found}) == 2


def run(*records: Record, results: dict[str, Any] | None = None, seed: int = 0, **recipe: Any) -> list[Row]:
    recipe = {"batch_size": 2, "sequence_length": 300, "seed": seed, "data": {"source": "texts"}, **recipe}
    return list(rows_of_run(RunFolder(Path("run"), recipe, list(records), results), MODEL))


def step(number: int, loss: float | None, speed: float = 10.0, seconds: float = 0.0) -> Record:
    return {"kind": "train", "step": number, "loss": loss, "tokens_per_second": speed, "seconds": seconds}


def held_out(number: int, loss: float | None) -> Record:
    return {"kind": "validation", "step": number, "loss": 9.0, "nats_per_byte": loss}


def points(rows: list[Row], score: str, place: str) -> list[tuple[float, float, float]]:
    return [(row.case["step"], row.case[place], row.value) for row in rows if row.score == score and place in row.case]


def test_losses_stand_at_tokens_and_at_the_time_of_steps_alone() -> None:
    """600 tokens at 10 tokens/s take a minute, whatever time evaluations took."""
    found = run(held_out(0, 5), step(1, 4, 10, 1000), step(2, 3, 20, 3000), held_out(2, 2))
    assert points(found, HELD_OUT, "tokens") == [(0, 0, 5), (2, 1200, 2)]
    assert points(found, HELD_OUT, "minutes") == [(0, 0, 5), (2, pytest.approx(1.5), 2)]
    assert points(found, TRAINING_LOSS, "tokens") == [(1, 600, 4), (2, 1200, 3)]
    found = run(step(1, None), held_out(1, None), step(2, 3), held_out(2, 2))
    assert points(found, HELD_OUT, "tokens") == [(2, 1200, 2)], "losses that are not finite are not drawn"
    assert points(found, TRAINING_LOSS, "tokens") == [(2, 1200, 3)]


def test_interval_of_one_seed_is_over_rows() -> None:
    """Half of 400 rows have a loss of 1 nat per token, the others of 3; a token has two bytes."""
    losses = [20.0 * (1 + 2 * (row % 2)) for row in range(400)]
    results = {"loss": 2.0, "nats_per_byte": 1.0, "tokens": 8000, "row_losses": losses, "row_targets": [20] * 400}
    rows = {row.score: row for row in run(step(1, 1), results=results)}
    for score, scale in (("nats per byte", 0.5), ("nats per token", 1)):
        interval = rows[score].interval
        assert interval is not None and interval.high - interval.low == pytest.approx(2 * 1.96 * scale / 20, rel=0.1)
        assert interval.low < 2 * scale < interval.high
    assert {row.interval for row in run(step(1, 1), results={**results, "row_losses": []})} == {None}


def test_seeds_are_averaged_at_the_steps_that_all_have() -> None:
    """Seeds may have held-out losses at different steps, and lack those that were not finite."""
    often = run(held_out(0, 6), held_out(100, 4), held_out(150, None), held_out(200, 2), held_out(300, 1))
    seldom = run(held_out(0, 8), held_out(150, 5), held_out(200, 3), seed=1)
    for seeds in ([*often, *seldom], [*seldom, *often]):
        mine = [row for row in seeds if row.score == HELD_OUT]
        assert mean_by_step(mine, "tokens") == [(0, 7), (200 * 600, 2.5)]
    apart = [row for row in [*run(held_out(1, 1)), *run(held_out(2, 2), seed=1)] if row.score == HELD_OUT]
    assert mean_by_step(apart, "tokens") == mean_by_step([], "tokens") == []


def test_smoothed_losses_of_seeds_are_of_the_same_steps() -> None:
    """Although one seed was stopped in the middle of a group, and one had a non-finite step."""
    steps = [step(n, n) for n in range(1, 201)]
    stopped = [*steps[:5], step(6, None), *steps[6:90]]
    whole, stopped = (points(run(*some, steps=200), TRAINING_LOSS, "tokens") for some in (steps, stopped))
    assert [point[0] for point in whole] == list(range(3, 200, 4))
    assert [point[0] for point in stopped] == list(range(3, 88, 4))
    assert [point[2] for point in stopped[:3]] == pytest.approx([2.5, (5 + 7 + 8) / 3, 10.5])


def score(value: float, low: float | None = None, high: float | None = None, n: int = 10) -> Row:
    interval = None if low is None or high is None else Interval(low, high, "Wilson, 95 %")
    return Row(MODEL, 0, "academic", (), {"context": 1}, "acc", value, interval, n, "items", None)


@pytest.mark.parametrize(
    ("seeds", "limits", "mean", "interval", "method"),
    [
        ([score(0.5, 0.2, 0.8)], None, 0.5, (0.2, 0.8), "Wilson, 95 %"),
        # t(0.975, 2) = 4.3027; values 1, 2, 3 have a standard error of 1/√3.
        ([score(value, 0, 9) for value in (1.0, 2.0, 3.0)], None, 2, (2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5),
         "Student's t over 3 seeds, 95 %"),
        # Student's interval of 0.9, 1 and 1 alone would be 0.823 to 1.110.
        ([score(value) for value in (0.9, 1.0, 1.0)], (0, 1), 2.9 / 3, (0.8232, 1),
         "Student's t over 3 seeds, 95 %, cut at 0 and 100 %"),
        ([score(value) for value in (0.0, 0.0, 10.0)], (0, 100), 10 / 3, (0, 17.68),
         "Student's t over 3 seeds, 95 %, cut at 0 and 100 %"),
        # Equal seeds do not pretend to be sure.
        ([score(0.0, 0.0, 0.3), score(0.0, 0.0, 0.2)], None, 0, (0, 0.3),
         "equal for all seeds: widest of each seed's (Wilson, 95 %)"),
    ],
)  # fmt: skip
def test_intervals(seeds: list[Row], limits: Any, mean: float, interval: tuple[float, float], method: str) -> None:
    value, found = estimate(seeds, limits)
    assert value == pytest.approx(mean) and found is not None
    assert (found.low, found.high) == pytest.approx(interval, abs=1e-2) and found.method == method


def test_without_an_interval() -> None:
    assert estimate([score(0.5)])[1] is None and estimate([score(0.5), score(0.5)])[1] is None
    assert counts([score(1, n=10), score(2, n=1000)]) == "10 to 1,000 items"
    places = {MODEL: [score(0.5, 0.2, 0.9), score(0.5)._replace(case={"context": 2})]}
    (line,) = (bar for *_, bars in length_figure(places, "context", "x", "y").axes[0].containers for bar in bars)
    assert [segment[:, 1].tolist() for segment in line.get_segments()] == [[0.2, 0.9], [0.5, 0.5]]
