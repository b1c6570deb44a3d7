"""Commands as a newcomer types them, right and wrong: exit code, no traceback, and what the answer says.

They are listed in ``commands.txt`` and run in this process, one after the other, in a folder with a run and texts.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cli.conftest import CONFIG, write_run
from support.chats import some_chats, write_chats
from typer.testing import CliRunner

import gecko
from gecko.cli import app
from gecko.inference import read
from gecko.train import Run


class Entry(NamedTuple):
    """A command and what it must answer."""

    exit_code: int
    arguments: str
    texts: tuple[str, ...]


def _entries() -> list[Entry]:
    lines = (Path(__file__).parent / "commands.txt").read_text(encoding="utf-8").splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines if line and not line.startswith("#")]
    return [Entry(int(code), arguments, tuple(texts)) for code, arguments, *texts in parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the commands name."""
    folder = tmp_path_factory.mktemp("first-hour")
    write_run(folder / "demo")
    Run(model=CONFIG, output="demo", steps=1).save(folder / "demo" / "recipe.json")
    for name in ("texts", "empty", "broken"):
        (folder / name).mkdir()
    files = {
        "texts/a.txt": "red green blue ", "notes.txt": "a text of few words. " * 20, "empty.txt": "", "data.json": "{}",
        "records.jsonl": '{"text": "one"}\n{"text": "two"}\n', "broken.jsonl": '{"text": "one"\n',
        "broken/config.json": "{", "tokenizer.json": '{"version": "1.0"}',
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    write_chats(folder / "chats.jsonl", some_chats(4))
    torch.manual_seed(7)
    models = {"book": gecko.load(folder / "demo"), "other": gecko.Gecko(CONFIG)}
    for name, model in models.items():
        read(model.eval(), [torch.tensor([256, *b"a book"])]).state.save(folder / f"{name}.state")
    assert CliRunner().invoke(app, ["quantize", str(folder / "demo"), str(folder / "small")]).exit_code == 0
    _write_hostile_files(folder)
    return folder


def _write_hostile_files(folder: Path) -> None:
    """Write what no command can use: pipes, links to nothing, lists too deep for Python, and parts of files."""
    for suffix in ("", ".txt", ".json", ".jsonl"):
        os.mkfifo(folder / f"pipe{suffix}")
    (folder / "dangling").symlink_to("missing")
    (folder / "loop").symlink_to("loop")
    (folder / "waiting" / "checkpoints").mkdir(parents=True)
    deep = "[" * 100_000
    files = {
        "deep.json": deep, "deep.jsonl": '{"messages": ' + deep, "blank.jsonl": "\n\n",
        "two words.txt": "a text " * 900,
        "numbers.jsonl": '{"text": 5}\n', "list.json": "[1]", "null.json": "null", "unanswered.jsonl":
        '{"messages": [{"role": "user", "content": "hi"}]}\n', "robot.jsonl":
        '{"messages": [{"role": "robot", "content": "hi"}, {"role": "assistant", "content": "x"}]}\n',
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes("Größe ".encode("latin-1") * 400)
    state = (folder / "book.state").read_bytes()
    (folder / "half.state").write_bytes(state[: len(state) // 2])
    (folder / "huge.state").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    recipe = json.loads((folder / "demo" / "recipe.json").read_text(encoding="utf-8"))
    for name, field in (("extra", {"bogus": 1}), ("word", {"steps": "x"}), ("model", {"model": []})):
        (folder / f"{name}-recipe.json").write_text(json.dumps(recipe | field), encoding="utf-8")
    _write_broken_models(folder)


def _write_broken_models(folder: Path) -> None:
    (checkpoint,) = (folder / "demo" / "checkpoints").iterdir()
    weights, config = ((checkpoint / name).read_bytes() for name in ("model.safetensors", "config.json"))
    models = {
        "plain": (weights, config), "cut": (weights[:1000], config), "deep": (weights, b"[" * 100_000),
        "negative": (weights, config.replace(b'"num_layers": 2', b'"num_layers": -1')),
        "more": (weights, config.replace(b'"num_layers": 2', b'"num_layers": 3')),
    }  # fmt: skip
    for name, contents in models.items():
        model = folder / f"{name}-model"
        model.mkdir()
        for file, content in zip(("model.safetensors", "config.json"), contents, strict=True):
            (model / file).write_bytes(content)


@pytest.fixture
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Return the folder, and remove afterwards what the command wrote, so that no command sees another's files."""
    before = set(folder.rglob("*"))
    yield folder
    for path in sorted(set(folder.rglob("*")) - before, reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> list[Any]:
        raise OSError("no name record")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)


@pytest.mark.parametrize("entry", _entries(), ids=lambda entry: entry.arguments or "nothing")
def test_a_command_answers(
    entry: Entry,
    fresh_folder: Path,
    no_network: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(fresh_folder)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, shlex.split(entry.arguments), input=b"", prog_name="gecko")
    answer = " ".join(result.output.replace("│", " ").split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == entry.exit_code, answer
    assert [text for text in entry.texts if text not in answer] == [], answer
    assert "Traceback" not in answer
    assert entry.texts, "an entry must say what the answer contains"
    assert entry.exit_code != 2 or any(mark in answer for mark in ("Usage: gecko", "error: ", "─ Error ─")), answer
    assert len(answer) < 1000 or "error: " not in answer
    tables = [line for line in result.output.splitlines() if set(line) & set("│┃─━")]
    assert max(map(len, tables), default=0) <= 80
    written = capfd.readouterr()
    assert written.out == written.err == "", "libraries must print nothing"
