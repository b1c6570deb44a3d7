"""``~`` is the home folder in every path option, also where the shell does not expand it: ``--out=~/run``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli.test_convert import release_of_gecko

import gecko
from gecko.recipes import get_recipe

Command = Callable[..., Any]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a home folder, and check that nothing is written to the current folder."""
    for name in ("home", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield tmp_path / "home"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_train_and_compare(command: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("gecko.train.train", lambda run, **_: seen.update(run=run))
    monkeypatch.setattr(
        "gecko.experiments.compare.compare",
        lambda plan, **_: seen.update(plan=plan) or SimpleNamespace(page=None, stopped=None, failed=False),
    )
    get_recipe("tiny").save(home / "mine.json")
    result = command("train", "~/mine.json", "--out=~/run")
    assert result.exit_code == 0, result.stderr
    assert seen["run"].folder == home / "run"
    result = command("compare", "tiny", "~/mine.json", "steps=7", "--out=~/compared")
    assert result.exit_code == 0, result.stderr
    assert (seen["plan"].folder, list(seen["plan"].recipes)) == (home / "compared", ["tiny", "mine"])


def test_tokenize(command: Command, home: Path) -> None:
    (home / "texts").mkdir()
    (home / "texts" / "a.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    result = command("tokenize", "~/texts", "--tokenizer", "bytes", "--out=~/shards", "--verify")
    assert result.exit_code == 0, result.stderr
    assert (home / "shards" / "manifest.json").is_file()
    result = command("tokenize", "~/texts", "--tokenizer", "bytes", "--out=~/texts/shards")
    assert result.exit_code == 2 and "must lie outside the sources" in result.stderr


def test_convert_and_state(command: Command, home: Path) -> None:
    release_of_gecko(home / "release")
    assert command("convert", "~/release", "~/model").exit_code == 0
    gecko.load(home / "model").empty_state().save(home / "empty.state")
    shown = command("state", "show", "~/empty.state")
    assert shown.exit_code == 0, shown.stderr
    assert command("state", "diff", "~/empty.state", "~/empty.state").exit_code == 0
