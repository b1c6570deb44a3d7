"""Commands that train: ``gecko train``, ``finetune``, ``compare`` and ``plan``."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cli.conftest import NEWEST, Command
from support.chats import some_chats, write_chats

from gecko.recipes import get_recipe


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that the trainer or the comparison, which are replaced, is called with."""
    found: dict[str, Any] = {"failed": False}

    def compare(plan: Any, *, jobs: int, command: str, console: Any) -> Any:
        found.update(plan=plan, jobs=jobs)
        return SimpleNamespace(page=Path("x/comparison.html"), stopped=None, failed=found["failed"])

    monkeypatch.setattr("gecko.train.train", lambda run, resume, **_: found.update(run=run, resume=resume))
    monkeypatch.setattr("gecko.experiments.compare.compare", compare)
    return found


def test_show_prints_the_settings_and_leaves_no_trace(
    command: Command, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", "tiny", "steps=7", "sample.prompt=a b", "--out", "runs/x", "--resume", "--show", code=0)
    lines = result.stdout.splitlines()
    assert "steps=7                            Optimizer steps. None: as many as fit into minutes, " in result.stdout
    assert any(line.startswith("sample.prompt='a b' ") for line in lines)
    assert any(line.startswith("output=runs/x ") for line in lines)
    assert "run" not in seen and not list(tmp_path.iterdir())


def test_train_takes_a_recipe_overrides_and_options(command: Command, seen: dict[str, Any]) -> None:
    command("train", "tiny", "steps=7", "--out", "runs/x", "optimizer.learning_rate=1e-4", "--resume", code=0)
    run = seen["run"]
    assert (run.steps, run.output, run.optimizer.learning_rate) == (7, "runs/x", 1e-4)
    assert seen["resume"] is True


def test_compare_takes_recipes_overrides_and_options(
    command: Command, seen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a recipe in a folder whose name looks like an override. A failed run is an exit code."""
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "rate=3" / "recipe.json"
    recipe.parent.mkdir()
    get_recipe("tiny").save(recipe)
    result = command(
        "compare", "tiny", "steps=7", recipe, "data.tokenizer=bytes", "--out=~/x", "--seeds", "0,2", "--jobs", 3,
        "--learning-rates", "2e-3,4e-3", "--tuning-steps", 5, code=0,
    )  # fmt: skip
    plan = seen["plan"]
    assert {name: run.steps for name, run in plan.recipes.items()} == {"tiny": 7, "rate=3": 7}
    assert (plan.folder, plan.seeds, seen["jobs"]) == (tmp_path / "x", (0, 2), 3)
    assert (plan.tuning.learning_rates, plan.tuning.steps) == ((2e-3, 4e-3), 5)
    assert "x/comparison.html" in result.stdout
    seen["failed"] = True
    command("compare", "tiny", recipe, "steps=7", "--out", "runs/x", code=1)
    assert seen["plan"].tuning is None


QUICK = ("device=cpu", "sample.tokens=2", "threads=1")


def test_a_real_run_from_training_to_text(command: Command, tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for name in "abcdefgh":
        (tmp_path / "books" / f"{name}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    command(
        "train", "tiny", "--out", tmp_path / "run", f"data.source={tmp_path / 'books'}", "data.validation_fraction=0.3",
        "steps=2", "batch_size=2", "sequence_length=64", "model.model_dim=32", "model.num_layers=1",
        "evaluation.rows=2", "evaluation.final_rows=2", *QUICK, code=0,
    )  # fmt: skip
    assert "wrote" in command("generate", tmp_path / "run", "-p", "the ", "-n", 6, "--seed", 1, code=0).stderr
    assert "--resume" in command("train", "tiny", "--out", tmp_path / "run", "steps=2", code=2).stderr


def test_a_run_is_tuned_talked_with_and_resumed_by_the_same_command_only(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    """A tuned model can be tuned again, with its template."""
    out, chats = tmp_path / "tuned", write_chats(tmp_path / "chats.jsonl", some_chats(20))
    tune = ("finetune", run_folder, chats, *QUICK, "--out", out)
    result = command(*tune, "--epochs", 0.5, code=0)
    assert "training: 20 chats" in result.stdout and "held out: the end of 1 chats, 7 tokens" in result.stdout
    assert f"talk with it: gecko chat {out}" in result.stdout
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["init_from"] == str(run_folder / NEWEST)
    talk = command("chat", out, "-n", 5, input=b"Say cat.\n", code=0)
    assert "conversations are written by the template in" in talk.stderr and "not tuned" not in talk.stderr
    again = command("finetune", out, chats, *QUICK, "steps=1", "--out", tmp_path / "again", code=0)
    assert "conversations are written by the template in" in again.stdout
    assert "already holds a run" in command(*tune, code=2).stderr
    longer = command(*tune, f"steps={recipe['steps'] + 1}", "--resume", code=0)
    assert f"continuing after step {recipe['steps']}" in longer.stdout, longer.stderr
    other = write_chats(tmp_path / "other.jsonl", some_chats(5))
    wrong = command("finetune", run_folder, other, *tune[3:], "--resume", code=2)
    assert f"CHATS must be what the run in {out} was begun with, {chats}; got {other}" in wrong.stderr
    assert "--lora must be what the run" in command(*tune, "--lora", 3, "--resume", code=2).stderr
    assert "--tokenizer must be what" in command(*tune, "--tokenizer", "other.json", "--resume", code=2).stderr
    assert "continuing after step" in command(*tune, "--epochs", 3, "--resume", code=0).stdout


def test_what_an_earlier_name_sets_stays_in_a_plan(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Mock(side_effect=ValueError("no plan"))
    monkeypatch.setattr("gecko.plan.find_plan", find)
    command("plan", "tiny", "accumulation=1", "--gpus", 1, code=2)
    assert "gradient_accumulation_steps" in find.call_args[0][4]


def test_without_kernels_only_what_is_exact_is_planned(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.triton_kernels_installed", lambda: False)
    result = command("plan", "gecko_7b")
    assert "exact, but without activations" in result.stdout.replace("\n", " ")
    facts = json.loads(command("plan", "gecko_7b", "--json").stdout)
    assert facts["fits"] is None and not facts["measured"]
    assert set(facts["memory_bytes"]) == {"parameters", "gradients", "optimizer", "total"}


def test_the_command_of_a_plan_trains_as_planned(command: Command) -> None:
    """A mesh is found; the printed settings are a recipe's, which give the same plan."""
    small = ("model.num_layers=1", "sequence_length=4096", "--gpus", 4, "--gpu", "a100", "--price", 2, "--json")
    found = json.loads(command("plan", "gecko_1b", *small).stdout)
    launch, settings = found["command"].split(" train gecko_1b ")
    assert launch == "torchrun --nproc-per-node 4 -m gecko" and found["fits"]
    assert json.loads(command("plan", "gecko_1b", *settings.split(), *small[2:]).stdout) == found
    assert found["dollars"] == pytest.approx(2 * 24 * found["days"] * 4)
