"""``gecko finetune``: from chats in JSON Lines to a model that ``gecko chat`` talks with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chats import some_chats, write_chats

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", some_chats(20))


QUICK = ("device=cpu", "sample.tokens=2", "threads=1")


def test_a_run_is_tuned_and_talked_with(command: Command, run_folder: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    result = command("finetune", run_folder, chats, *QUICK, "--out", out, "--epochs", 1)
    assert result.exit_code == 0, result.stderr
    assert "training: 20 chats" in result.stdout and "held out: the end of 1 chats, 7 tokens" in result.stdout
    assert f"talk with it: gecko chat {out}" in result.stdout
    recipe = json.loads((out / "recipe.json").read_text())
    assert recipe["init_from"] == str(run_folder / "checkpoints" / "step-00000002")
    talk = command("chat", out, "-n", 5, input=b"Say cat.\n")
    assert talk.exit_code == 0 and "not tuned" not in talk.stderr
    # A tuned model can be tuned again, with its template.
    again = command("finetune", out, chats, *QUICK, "steps=1", "--out", tmp_path / "again")
    assert again.exit_code == 0, again.stderr
    assert "conversations are written by the template in" in again.stdout


def test_a_run_is_resumed_by_the_same_command_only(
    command: Command, run_folder: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    arguments = (*QUICK, "steps=2", "--out", out)
    assert command("finetune", run_folder, chats, *arguments).exit_code == 0
    refused = command("finetune", run_folder, chats, *arguments)
    assert refused.exit_code == 2 and "already holds a run" in refused.stderr
    longer = command("finetune", run_folder, chats, *QUICK, "steps=4", "--out", out, "--resume")
    assert longer.exit_code == 0 and "continuing after step 2" in longer.stdout, longer.stderr
    other = write_chats(tmp_path / "other.jsonl", some_chats(5))
    wrong = command("finetune", run_folder, other, *arguments, "--resume")
    assert wrong.exit_code == 2
    assert f"CHATS must be what the run in {out} was begun with, {chats}; got {other}" in wrong.stderr
    wrong = command("finetune", run_folder, chats, *arguments, "--lora", 3, "--resume")
    assert "--lora must be what the run" in wrong.stderr
