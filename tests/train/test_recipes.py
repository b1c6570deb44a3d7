"""Recipes by name, and ``key=value`` overrides."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.recipes import RECIPES, apply_overrides, get_recipe, shown
from gecko.train import DataSettings, Run, SampleSettings
from gecko.train.run import has_role
from gecko.train.settings import Role, flatten, settings_help


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete_and_survive_json(name: str, tmp_path: Path) -> None:
    run = get_recipe(name)
    run.save(tmp_path / "recipe.json")
    assert Run.load(tmp_path / "recipe.json") == run
    assert get_recipe(str(tmp_path / "recipe.json")) == run


@pytest.mark.parametrize(
    ("name", "gpus"), [("gecko_1b", 64), ("gecko_7b", 256), ("megalodon_7b", 256), ("llama2_7b", 128)]
)
def test_paper_recipes(name: str, gpus: int) -> None:
    """The paper's 2 T tokens in rows of 32K and its optimizer, on the number of GPUs that docs/pretraining.md uses."""
    run = get_recipe(name)
    parallel = run.parallel
    assert parallel.shard is not None
    assert parallel.replicate * parallel.shard * parallel.context == gpus
    assert run.rows_per_rank(parallel.replicate * parallel.shard) == 1
    assert run.sequence_length == 32_768
    assert run.steps is not None and run.steps * run.tokens_per_step == pytest.approx(2e12, rel=1e-6)
    warmup = run.schedule.warmup * run.steps
    rate, decay, warmup_steps = (4e-4, 0.05, 2000) if name == "gecko_1b" else (3.5e-4, 0.1, 2500)
    assert warmup == pytest.approx(warmup_steps)
    optimizer = run.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adamw", rate, decay)
    assert (optimizer.betas, optimizer.eps, optimizer.clip, optimizer.decay) == ((0.9, 0.95), 1e-8, 1.0, "all")
    assert (run.schedule.kind, run.skip.deviations, run.z_loss) == ("cosine", None, 0.0)


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_is_shown_as_an_override_with_its_meaning(name: str) -> None:
    """The overrides reproduce the run; a description is made of whole sentences, not cut at the end of a line."""
    run, fixed = get_recipe(name), ("recipe", "overrides", "model.model_type")
    settings = {key: (value, meaning) for key, value, meaning in settings_help(run) if key not in fixed}
    assert list(settings) == [key for key in flatten(run.to_dict()) if key not in fixed]
    for found, (key, (value, meaning)) in zip(shown(run), settings.items(), strict=True):
        assert found == (f"{key}={value}", meaning)
        assert meaning.endswith("."), found
    overrides = [shlex.split(f"{key}={value}")[0] for key, (value, _) in settings.items()]
    other = replace(run, seed=9, data=DataSettings(sources=("a=1", "b=2")), sample=SampleSettings(prompt=""))
    assert replace(apply_overrides(other, overrides), overrides=()) == run


def test_nearest_recipe_is_suggested() -> None:
    assert get_recipe("gecko-15m") == get_recipe("gecko_15m")
    with pytest.raises(ValueError, match="Did you mean 'gecko_125m'"):
        get_recipe("geko_125m")
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        get_recipe("missing.json")


READ: dict[str, Any] = {
    "steps=1_000": 1000, "steps=none": None, "minutes=0.5": 0.5, "optimizer.betas=0.8,0.9": (0.8, 0.9),
    "optimizer.decay=matrices": "matrices", "model.num_layers=2": 2, "model.timestep_betas=none": None,
    "model.norm_affine=false": False, "data.source=a=b, c": "a=b, c", "data.sources=a=1,b=0.5": ("a=1", "b=0.5"),
    "data.sources=(a=1, b=0.5,)": ("a=1", "b=0.5"), "data.sources=[a-m]*.txt=1,x=1": ("[a-m]*.txt=1", "x=1"),
    "data.sources=[[a-m]*.txt=1]": ("[a-m]*.txt=1",), "data.sources=": (), "data.sources=()": (),
    "data.sources=none": (), "optimizer.clip=inf": float("inf"), "optimizer.betas=0,0.9": (0.0, 0.9),
    "optimizer.weight_decay=0": 0.0, f"seed={2**64 - 1}": 2**64 - 1, "sample.tokens=0": 0, "output=123": "123",
}  # fmt: skip


def test_values_are_read_as_the_field_asks() -> None:
    for override, value in READ.items():
        changed = flatten(apply_overrides(get_recipe("tiny"), [override]).to_dict())
        found = changed[override.partition("=")[0]]
        assert found == value and type(found) is type(value), override


REFUSED = {
    "stps=3": "Did you mean 'steps'",
    "optimizer.learning_rat=1": "Did you mean 'optimizer.learning_rate'",
    "optimizer=1": "override must be one of",
    "overrides=x": "override must be one of",
    "steps": "key=value",
    "steps=many": "steps must be a whole number; got 'many'",
    "minutes=soon": "minutes must be a number",
    "model.norm_affine=maybe": "model.norm_affine must be true or false",
    "precision=bfloat": "Did you mean 'bfloat16'",
    "optimizer.betas=0.9": "optimizer.betas takes 2 values",
    "optimizer.betas=none": "optimizer.betas takes 2 values",
    "gradient_accumulation_steps=3": "gradient_accumulation_steps must divide batch_size",
    "steps=0": "steps must be above 0",
    f"minutes={10**30}": "minutes must be at most 2,147,483,647",
    f"evaluation.every={10**30}": "evaluation.every must be at most 2,147,483,647",
    "minutes=none": "set steps",
    "minutes=nan": "minutes must be above 0 and finite",
    "sample.tokens=-5": "sample.tokens must be 0 or above",
    "sample.temperature=nan": "sample.temperature must be 0 or above",
    "model.num_heads=3": "must divide",
    "evaluation.every=0": "evaluation.every must be at least 1",
    "data.validation_fraction=1": "data.validation_fraction",
    "schedule.warmup=2": "schedule.warmup is a fraction",
    "checkpoint.keep_every=0": "checkpoint.keep_every must be at least 1",
    "skip.deviations=0": "skip.deviations must be above 0 and finite, or none",
    "optimizer.eps=0": "optimizer.eps must be a number, above 1e-30",
    "optimizer.weight_decay=-1": "optimizer.weight_decay must be 0 or above, and finite; got -1.0",
    "optimizer.betas=1.5,0.9": r"optimizer.betas must be two decays in \[0, 1\).*got \(1.5, 0.9\)",
    "optimizer.betas=0.9,nan": "optimizer.betas must be two decays",
    "seed=-1": "seed must be a whole number of 64 bits.*got -1",
    f"seed={2**64}": "seed must be a whole number of 64 bits",
    "hang_minutes=inf": "hang_minutes must be above 0 and finite, or none",
    "optimizer.clip=0": "optimizer.clip must be above 0",
    "profile=3,2": "profile must be the first and the last step",
    "profile=0,2": "profile must be the first and the last step",
}


def test_errors_name_the_key_and_what_to_do() -> None:
    for override, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            apply_overrides(get_recipe("tiny"), [override])


def test_minutes_are_not_left_out_where_steps_are_fixed(tmp_path: Path) -> None:
    """Steps are fixed by the recipe or were measured by the run that wrote it; ``minutes`` would have no effect."""
    measured = apply_overrides(get_recipe("tiny"), ["minutes=6", "steps=149"])
    for run in (get_recipe("gecko_15m"), measured):
        with pytest.raises(ValueError, match=rf"steps are fixed at {run.steps}; got minutes=0\.2\. .* steps=none"):
            apply_overrides(run, ["minutes=0.2", f"output={tmp_path}"])
        anew = apply_overrides(run, ["minutes=0.2", "steps=none"])
        assert (anew.steps, anew.minutes) == (None, 0.2)
        longer = apply_overrides(run, ["minutes=0.2", "steps=300"])
        assert (longer.steps, longer.minutes) == (300, 0.2)
    assert apply_overrides(measured, ["minutes=6"]).steps == 149


def test_steps_that_are_profiled_are_steps_of_the_run() -> None:
    """This is checked once the number of steps is known; a window may extend beyond the last step."""
    run = apply_overrides(get_recipe("tiny"), ["profile=20,22"])
    assert run.with_settings("steps=20").profile == (20, 22)
    with pytest.raises(ValueError, match=r"profile must begin within the run's 19 steps; got \(20, 22\)"):
        run.with_settings("steps=19")


def test_fields_that_must_agree_change_together() -> None:
    run = apply_overrides(get_recipe("tiny"), ["model.num_heads=3", "model.key_dim=96", "model.value_dim=192"])
    assert (run.model.num_heads, run.model.key_dim) == (3, 96)


@given(st.lists(st.sampled_from(["steps=7", "steps=9", "data.source=my books", "seed=3"])))
def test_the_command_gives_the_same_run(overrides: list[str]) -> None:
    run = apply_overrides(get_recipe("tiny"), overrides)
    program, verb, recipe, *rest = shlex.split(run.command())
    assert (program, verb) == ("gecko", "train")
    assert apply_overrides(get_recipe(recipe), rest) == run


def test_the_command_of_a_file_gives_the_run_in_it(tmp_path: Path) -> None:
    """Also for an edited file: the recipe that it names describes another run."""
    path, original = tmp_path / "recipe.json", apply_overrides(get_recipe("tiny"), ["steps=7", f"output={tmp_path}"])
    edits: list[dict[str, Any]] = [
        {}, {"steps": 9}, {"seed": 2, "overrides": ["sead=2"]}, {"recipe": "gone"}, {"recipe": "", "seed": 2},
    ]  # fmt: skip
    for changes in edits:
        path.write_text(json.dumps({**original.to_dict(), **changes}))
        run = get_recipe(str(path))
        assert run.steps == changes.get("steps", 7)
        assert (run.recipe == "tiny") == (not changes)
        run.save(path)
        for again in (run, apply_overrides(run, ["seed=3"])):
            _, _, recipe, *rest = shlex.split(again.command())
            assert apply_overrides(get_recipe(recipe), rest) == again


def test_a_hand_written_file_with_a_wrong_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    for changes, message in (({"modle": {}}, "Did you mean 'model'"), ({"model": 3}, "model"),
                             ({"data": {"sources": {"a": 1}}}, "data.sources must be a list")):  # fmt: skip
        path.write_text(json.dumps({**get_recipe("tiny").to_dict(), **changes}))
        with pytest.raises(ValueError, match=message):
            Run.load(path)


def test_old_field_names_mean_the_same(tmp_path: Path) -> None:
    """In overrides, of which the last one wins, and in a recipe, whose command is kept."""
    run = get_recipe("gecko_15m")
    new = apply_overrides(run, ["gradient_accumulation_steps=8"])
    assert apply_overrides(run, ["accumulation=8"]) == new
    assert new.overrides == ("gradient_accumulation_steps=8",)
    assert apply_overrides(new, ["accumulation=2"]).gradient_accumulation_steps == 2
    assert apply_overrides(apply_overrides(new, ["accumulation=2"]), ["gradient_accumulation_steps=8"]) == new
    new.save(tmp_path / "recipe.json")
    written = (tmp_path / "recipe.json").read_text()
    (tmp_path / "recipe.json").write_text(written.replace("gradient_accumulation_steps", "accumulation"))
    assert get_recipe(str(tmp_path / "recipe.json")) == new


def test_a_step_that_cannot_be_captured_is_refused() -> None:
    run = apply_overrides(get_recipe("tiny"), ["capture=true"])
    for override, needed in {
        "compile=true": "compile=false", "precision=float8": "precision=bfloat16", "profile=10,12": "profile=none",
        "data.carry_state=true": "data.carry_state=false", "parallel.context=2": "parallel.context=1",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"capture=true .* takes {needed}.*capture=false"):
            apply_overrides(run, [override])
    with pytest.raises(ValueError, match="a model that is a Gecko"):
        replace(run, model=get_recipe("llama2_7b").model)


def test_roles_of_settings() -> None:
    """What is kept on resume decides which rows a step reads; what is free in a comparison is not compared."""
    names = list(flatten(get_recipe("tiny").to_dict()))
    model = {name for name in names if name.startswith("model.")}
    fixed, free, neutral = ({name for name in names if has_role(name, role)} for role in Role)
    assert model | {name for name in names if name.startswith("data.")} <= fixed
    assert {"seed", "batch_size", "sequence_length", "lora_rank", "schedule.batch_size_steps"} <= fixed
    assert not fixed & {"steps", "optimizer.learning_rate", "schedule.kind", "precision", "parallel.shard", "device"}
    assert free - neutral == model | {"optimizer.name", "optimizer.learning_rate"}
    assert neutral - free == {
        "gradient_accumulation_steps", "compile", "capture", "parallel.replicate", "parallel.shard", "parallel.context",
        "evaluation.every", "max_skips", "device", "threads",
    }  # fmt: skip
    assert {"seed", "minutes", "checkpoint.every", "sample.prompt", "output"} <= free & neutral
    assert not neutral & {"steps", "precision", "z_loss", "skip.deviations", "init_from", "evaluation.final_rows"}
