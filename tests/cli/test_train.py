"""Commands that train: ``gecko train``, ``finetune`` and ``compare``; ``gecko plan``."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chats import some_chats, write_chats

# ---- ``gecko train`` passes its arguments on.


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that the trainer, which is replaced, is called with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("gecko.train.train", lambda run, resume, **_: seen.update(run=run, resume=resume))
    return seen


def test_show_prints_the_settings_and_leaves_no_trace(
    command: Callable[..., Any], trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("train", "tiny", "steps=7", "sample.prompt=a b", "--out", "runs/x", "--resume", "--show", code=0)
    lines = result.stdout.splitlines()
    assert "steps=7                            Optimizer steps. None: as many as fit into minutes, " in result.stdout
    assert any(line.startswith("sample.prompt='a b' ") for line in lines)
    assert any(line.startswith("output=runs/x ") for line in lines)
    assert not trained and not list(tmp_path.iterdir())


def test_recipe_overrides_and_options(command: Callable[..., Any], trained: dict[str, Any]) -> None:
    command("train", "tiny", "steps=7", "--out", "runs/x", "optimizer.learning_rate=1e-4", "--resume", code=0)
    run = trained["run"]
    assert (run.steps, run.output, run.optimizer.learning_rate) == (7, "runs/x", 1e-4)
    assert trained["resume"] is True


def test_a_real_run_from_training_to_text(process: Callable[..., Any], tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 30
    (tmp_path / "books").mkdir()
    for name in "abcdefgh":
        (tmp_path / "books" / f"{name}.txt").write_text(text)
    result = process(
        "train", "tiny", "--out", tmp_path / "run", f"data.source={tmp_path / 'books'}", "data.validation_fraction=0.3",
        "steps=2", "batch_size=2", "sequence_length=64", "model.model_dim=32", "model.num_layers=1", "sample.tokens=5",
        "evaluation.rows=2", "evaluation.final_rows=2", "threads=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    written = process("generate", tmp_path / "run", "-p", "the ", "-n", 6, "--seed", 1)
    assert written.returncode == 0, written.stderr.decode()
    assert b"wrote" in written.stderr
    again = process("train", "tiny", "--out", tmp_path / "run", "steps=2")
    assert again.returncode == 2
    assert b"--resume" in again.stderr


# ---- ``gecko finetune``: from chats in JSON Lines to a model that ``gecko chat`` talks with.

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", some_chats(20))


QUICK = ("device=cpu", "sample.tokens=2", "threads=1")


def test_a_run_is_tuned_and_talked_with(command: Command, run_folder: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    result = command("finetune", run_folder, chats, *QUICK, "--out", out, "--epochs", 1, code=0)
    assert "training: 20 chats" in result.stdout and "held out: the end of 1 chats, 7 tokens" in result.stdout
    assert f"talk with it: gecko chat {out}" in result.stdout
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["init_from"] == str(run_folder / "checkpoints" / "step-00000002")
    talk = command("chat", out, "-n", 5, input=b"Say cat.\n", code=0)
    assert "not tuned" not in talk.stderr
    # A tuned model can be tuned again, with its template.
    again = command("finetune", out, chats, *QUICK, "steps=1", "--out", tmp_path / "again", code=0)
    assert "conversations are written by the template in" in again.stdout


def test_a_run_is_resumed_by_the_same_command_only(
    command: Command, run_folder: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    arguments = (*QUICK, "steps=2", "--out", out)
    command("finetune", run_folder, chats, *arguments, code=0)
    refused = command("finetune", run_folder, chats, *arguments, code=2)
    assert "already holds a run" in refused.stderr
    longer = command("finetune", run_folder, chats, *QUICK, "steps=4", "--out", out, "--resume", code=0)
    assert "continuing after step 2" in longer.stdout, longer.stderr
    other = write_chats(tmp_path / "other.jsonl", some_chats(5))
    wrong = command("finetune", run_folder, other, *arguments, "--resume", code=2)
    assert f"CHATS must be what the run in {out} was begun with, {chats}; got {other}" in wrong.stderr
    wrong = command("finetune", run_folder, chats, *arguments, "--lora", 3, "--resume")
    assert "--lora must be what the run" in wrong.stderr


# ---- ``gecko compare`` passes its arguments on.


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that the comparison, which is replaced, is called with."""
    seen: dict[str, Any] = {"failed": False}

    def compare(plan: Any, *, jobs: int, command: str, console: Any) -> Any:
        seen.update(plan=plan, jobs=jobs)
        return SimpleNamespace(page=Path("x/comparison.html"), stopped=None, failed=seen["failed"])

    monkeypatch.setattr("gecko.experiments.compare.compare", compare)
    return seen


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe in a folder whose name looks like an override."""
    from gecko.recipes import get_recipe

    path = tmp_path / "rate=3" / "recipe.json"
    path.parent.mkdir()
    get_recipe("tiny").save(path)
    return path


def test_recipes_overrides_and_options(command: Callable[..., Any], compared: dict[str, Any], recipe: Path) -> None:
    result = command(
        "compare", "tiny", "steps=7", recipe, "data.tokenizer=bytes", "--out", "runs/x", "--seeds", "0,2", "--jobs", 3,
        "--learning-rates", "2e-3,4e-3", "--tuning-steps", 5, code=0,
    )  # fmt: skip
    plan = compared["plan"]
    assert list(plan.recipes) == ["tiny", "rate=3"]
    assert [run.steps for run in plan.recipes.values()] == [7, 7]
    assert (plan.folder, plan.seeds, compared["jobs"]) == (Path("runs/x"), (0, 2), 3)
    assert (plan.tuning.learning_rates, plan.tuning.steps) == ((2e-3, 4e-3), 5)
    assert "x/comparison.html" in result.stdout


def test_a_failed_run_is_an_exit_code(command: Callable[..., Any], compared: dict[str, Any], recipe: Path) -> None:
    compared["failed"] = True
    command("compare", "tiny", recipe, "steps=7", "--out", "runs/x", code=1)
    assert compared["plan"].tuning is None


# ---- ``gecko plan``.


def test_json_adds_up(command: Command) -> None:
    result = command("plan", "gecko_7b", "model.num_layers=2", "--gpus", 256, "--gpu", "h200", "--json")
    facts = json.loads(result.stdout)
    memory = facts["memory_bytes"]
    assert memory.pop("total") == sum(memory.values())
    assert facts["fits"] and facts["gpu"] == "H200 141 GB"
    assert set(facts["flops_per_token"]) == {"linear", "attention", "memory", "CEMA", "norms", "head", "recomputed"}
    assert round(facts["tokens_per_second"] * facts["seconds"]["step"]) == 4_194_304


def test_without_kernels_only_what_is_exact_is_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.triton_kernels_installed", lambda: False)
    result = command("plan", "gecko_7b")
    assert "exact, but without activations" in result.stdout.replace("\n", " ")
    facts = json.loads(command("plan", "gecko_7b", "--json").stdout)
    assert facts["fits"] is None and not facts["measured"]
    assert set(facts["memory_bytes"]) == {"parameters", "gradients", "optimizer", "total"}


def test_the_command_of_a_plan_trains_as_planned(command: Command) -> None:
    """A mesh is found; the printed settings are a recipe's, which give the same plan."""
    asked = "plan", "gecko_1b", "model.num_layers=3", "--gpus", 4, "--gpu", "a100", "--price", 2, "--json"
    result = command(*asked)
    found = json.loads(result.stdout)
    launch, settings = found["command"].split(" train gecko_1b ")
    assert launch == "torchrun --nproc-per-node 4 -m gecko" and found["fits"]
    again = json.loads(command("plan", "gecko_1b", *settings.split(), "--gpus", 4, "--gpu", "a100", "--json").stdout)
    assert {**again, "dollars": found["dollars"]} == found
    assert found["dollars"] == pytest.approx(2 * 24 * found["days"] * 4)
