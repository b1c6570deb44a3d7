"""The tokenizer of a command: the given one, else the one beside the model, else the one that its recipe names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gecko
from gecko.train.checkpoints.folders import latest_checkpoint

Command = Callable[..., Any]


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    """Return the folder of a model with its recipe."""
    newest = latest_checkpoint(run_folder / "checkpoints")
    assert newest is not None
    return Path(shutil.copytree(newest, tmp_path / "model"))


def name_in_recipe(folder: Path, tokenizer: str) -> None:
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["data"]["tokenizer"] = tokenizer
    (folder / "recipe.json").write_text(json.dumps(recipe))


def test_what_export_writes_generates(command: Command, folder: Path, tmp_path: Path) -> None:
    hf = pytest.importorskip("gecko.hf")
    hf.export(gecko.load(folder), tmp_path / "exported", hf.byte_tokenizer())
    options = ("--prompt", "hi", "-n", 8, "--temperature", 0)
    result = command("generate", tmp_path / "exported", *options)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == command("generate", folder, *options).stdout


def test_files_beside_the_model_come_before_the_recipe(command: Command, folder: Path) -> None:
    hf = pytest.importorskip("gecko.hf")
    hf.byte_tokenizer().save_pretrained(folder)
    name_in_recipe(folder, "/another/machine/tokenizer.json")
    result = command("generate", folder, "--prompt", "hi", "-n", 2)
    assert result.exit_code == 0, result.stderr


def test_a_recipe_may_name_what_is_not_here(command: Command, folder: Path) -> None:
    name_in_recipe(folder, "tok.json")
    result = command("generate", folder, "--prompt", "hi", "-n", 2)
    assert result.exit_code == 2
    for part in (f"{folder / 'recipe.json'} names", "'tok.json'", "--tokenizer bytes"):
        assert part in result.stderr
    assert command("generate", folder, "--prompt", "hi", "-n", 2, "--tokenizer", "bytes").exit_code == 0
