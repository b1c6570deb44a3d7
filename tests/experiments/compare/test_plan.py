"""The runs of a comparison, and the errors that are raised before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.experiments.compare import ComparisonPlan, Tuning
from gecko.experiments.compare.plan import rate_name
from gecko.train import Run
from gecko.train.settings import flatten


@pytest.fixture
def with_other(base: Run, tmp_path: Path) -> Callable[..., ComparisonPlan]:
    """Return a function that plans a comparison with another recipe, given by its changes."""

    def plan(changes: dict[str, Any], *overrides: str, **options: Any) -> ComparisonPlan:
        groups = {name: replace(getattr(base, name), **of) for name, of in changes.items() if isinstance(of, dict)}
        base.save(tmp_path / "base.json")
        replace(base, **{**changes, **groups}).save(tmp_path / "other.json")
        both = [str(tmp_path / "base.json"), str(tmp_path / "other.json")]
        return ComparisonPlan.of(both, overrides, tmp_path / "out", **options)

    return plan


def test_runs_differ_in_nothing_but_what_is_compared(recipes: list[str], tmp_path: Path) -> None:
    plan = ComparisonPlan.of(recipes, ["steps=5"], tmp_path / "out", seeds=[3, 1], tuning=Tuning((2e-3, 4e-3), 3))
    runs = plan.main_runs({"whole": 1e-2, "bare": 5e-3})
    assert [one.label for one in runs] == ["whole seed-3", "bare seed-3", "whole seed-1", "bare seed-1"]
    fields = [flatten(one.run.to_dict()) for one in runs]
    assert {name for name in fields[0] if len({str(found[name]) for found in fields}) > 1} == {
        "model.memory", "output", "optimizer.learning_rate", "seed", "overrides",
    }  # fmt: skip
    outputs = {f"{tmp_path}/out/{name}/seed-{seed}" for name in plan.recipes for seed in (1, 3)}
    assert {one.run.output for one in runs} == outputs
    assert [(one.run.steps, one.run.seed, one.run.optimizer.learning_rate) for one in runs[1:3]] == [
        (5, 3, 5e-3), (5, 1, 1e-2),
    ]  # fmt: skip
    runs = plan.tuning_runs()
    assert [one.label for one in runs] == [
        "whole tuning-2e-3", "bare tuning-2e-3", "whole tuning-4e-3", "bare tuning-4e-3",
    ]  # fmt: skip
    assert {(one.run.steps, one.run.seed) for one in runs} == {(3, 3)}, "every recipe is tuned alike"
    assert [one.run.optimizer.learning_rate for one in runs] == [2e-3, 2e-3, 4e-3, 4e-3]
    assert ComparisonPlan.of(recipes, [], tmp_path / "out").tuning_runs() == []


def test_values_of_settings_are_compared(recipes: list[str], tmp_path: Path) -> None:
    """Each choice gives a run that differs in it alone, named by it, the first one first."""
    plan = ComparisonPlan.of(recipes[:1], ["model.chunk_size=64|32", "steps=5"], tmp_path / "out")
    assert list(plan.recipes) == ["model.chunk_size=64", "model.chunk_size=32"]
    first, second = (flatten(one.run.to_dict()) for one in plan.main_runs(dict.fromkeys(plan.recipes, 1e-3)))
    assert (first["model.chunk_size"], second["model.chunk_size"]) == (64, 32)
    assert {name for name in first if first[name] != second[name]} == {"model.chunk_size", "output", "overrides"}
    assert first["output"] == f"{tmp_path}/out/model.chunk_size=64/seed-0"
    several = ["optimizer.learning_rate=1e-3|2e-3", "steps=5", "optimizer.name=adamw|muon"]
    plan = ComparisonPlan.of(recipes, several, tmp_path / "out")
    assert len(plan.recipes) == 8
    assert list(plan.recipes)[1] == "whole,optimizer.learning_rate=1e-3,optimizer.name=muon"
    assert {(run.optimizer.learning_rate, run.optimizer.name) for run in plan.recipes.values()} == {
        (rate, name) for rate in (1e-3, 2e-3) for name in ("adamw", "muon")
    }


def test_a_text_with_a_bar_is_one_value(recipes: list[str], tmp_path: Path) -> None:
    plan = ComparisonPlan.of(recipes, ["sample.prompt=a|b"], tmp_path / "out")
    assert [run.sample.prompt for run in plan.recipes.values()] == ["a|b", "a|b"]


@given(st.floats(1e-300, 1e300))
def test_a_rates_name_is_the_rate(rate: float) -> None:
    assert float(rate_name(rate)) == rate
    assert rate_name(float(rate_name(rate))) == rate_name(rate)
    assert [rate_name(one) for one in (4e-3, 0.0025, 1.0, 12.5)] == ["4e-3", "2.5e-3", "1e0", "1.25e1"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 9}, "steps (base: 8, other: 9)"),
        ({"batch_size": 4}, "batch_size (base: 2, other: 4)"),
        ({"sequence_length": 48}, "sequence_length (base: 24, other: 48)"),
        ({"precision": "bfloat16"}, "precision (base: float32, other: bfloat16)"),
        ({"data": {"source": "stdlib"}}, "data.source"),
        ({"data": {"tokenizer": "x"}}, "data.tokenizer (base: bytes, other: x)"),
        ({"data": {"validation": None}}, "data.validation"),
        ({"optimizer": {"weight_decay": 0}}, "optimizer.weight_decay"),
        ({"schedule": {"warmup": 0.5}}, "schedule.warmup"),
        ({"evaluation": {"final_rows": 1}}, "evaluation.final_rows"),
        ({"skip": {"deviations": None}}, "skip.deviations"),
        ({"init_from": "x"}, "init_from"),
    ],
)
def test_unequal_runs_are_refused(with_other: Any, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="must train alike") as caught:
        with_other(change)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"learning_rate": 1e-4}}, {"sample": {"tokens": 5}}, {"checkpoint": {"every": 5}},
        {"seed": 5, "activation_checkpointing": "full", "minutes": 3.0},
    ],
)  # fmt: skip
def test_what_may_differ(with_other: Any, change: dict[str, Any]) -> None:
    assert set(with_other(change).recipes) == {"base", "other"}


def test_an_override_makes_runs_equal(with_other: Any) -> None:
    plan = with_other({"steps": 9}, "steps=7", "optimizer.learning_rate=5e-3")
    assert [(run.steps, run.optimizer.learning_rate) for run in plan.recipes.values()] == [(7, 5e-3)] * 2


def test_models_of_different_size_are_refused(with_other: Any) -> None:
    wider = {"model": {"ffn_dim": 40}}
    with pytest.raises(ValueError, match=r"within 2 %; the largest has [\d.]+ % more .*base: [\d,]+, other: [\d,]+"):
        with_other(wider)
    small, large = with_other(wider, tolerance=0.1).parameters.values()
    assert large - small == 3 * 32 * 8  # three matrices of the feed-forward layer
    with_other(wider, tolerance=large / small - 1)
    with pytest.raises(ValueError, match="the largest has"):
        with_other(wider, tolerance=(large - 1) / small - 1)


def test_a_llama_and_a_gecko(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plan = ComparisonPlan.of(["compare_gecko", "compare_llama", "compare_megalodon"], [], tmp_path / "out")
    assert [run.recipe for run in plan.recipes.values()] == list(plan.recipes)
    assert plan.parameters["compare_gecko"] == 993_280


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["output=x"], {}, "set --out"),
        (["seed=1"], {}, "set --seeds"),
        (["stepz=1"], {}, "Did you mean 'steps'"),
        ([], {"seeds": [1, 1]}, r"--seeds must be different .* got \[1, 1\]"),
        ([], {"seeds": [-1]}, "--seeds must be"),
        ([], {"seeds": []}, "--seeds must be"),
        ([], {"tolerance": -1}, "--tolerance must be at least 0"),
        ([], {"tolerance": float("nan")}, "--tolerance must be at least 0"),
        (["steps=none", "minutes=3"], {}, "the number of steps must be set, .* got minutes=3"),
    ],
)
def test_bad_options(recipes: list[str], tmp_path: Path, overrides: list[str], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComparisonPlan.of(recipes, overrides, tmp_path / "out", **options)


@pytest.mark.parametrize("rates", [(), (1e-3,), (1e-3, 1e-3), (1e-3, 0.0), (1e-3, float("nan")), (1e-3, float("inf"))])
def test_tuning_takes_rates_to_choose_from(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least two different finite learning rates above 0"):
        Tuning(rates, 5)
    with pytest.raises(ValueError, match="--tuning-steps must be at least 1; got 0"):
        Tuning((1e-3, 2e-3), 0)


def test_names_of_recipes(base: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        base.save(tmp_path / name / "recipe.json")
        base.save(tmp_path / name / "x.json")

    def plan(*names: str) -> ComparisonPlan:
        return ComparisonPlan.of([str(tmp_path / name) for name in names], [], tmp_path / "out")

    assert list(plan("a/recipe.json", "b/recipe.json").recipes) == ["a", "b"]
    with pytest.raises(ValueError, match="different names; got x twice"):
        plan("a/x.json", "b/x.json")
    with pytest.raises(ValueError, match="at least two recipes; got a"):
        plan("a/recipe.json")
    with pytest.raises(FileNotFoundError, match="must be a recipe file"):
        plan("missing.json")
