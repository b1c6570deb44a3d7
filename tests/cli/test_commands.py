"""Commands as a newcomer types them, right and wrong: exit code, no traceback, and what the answer says.

They are listed in ``commands.txt`` and run in this process, one after the other, in a folder with a run and texts.
"""

import dataclasses
import gzip
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cli.conftest import CONFIG, write_run
from cli.test_convert import release_of_gecko
from support.chats import some_chats, write_chats
from tokenizers import Tokenizer, models
from typer.testing import CliRunner, Result

import gecko
from gecko.cli import app
from gecko.inference import read
from gecko.recipes import RECIPES
from gecko.train import Run


class Entry(NamedTuple):
    """Commands and what the last one must answer; those before it must succeed."""

    exit_code: int
    commands: str
    texts: tuple[str, ...]
    """What the answer contains; after ``then``, an expression that must be true."""


def _entries() -> list[Entry]:
    lines = (Path(__file__).parent / "commands.txt").read_text(encoding="utf-8").splitlines()
    parts = [[part.strip() for part in re.split(r" \|(?= )", line)] for line in lines if line and line[0] != "#"]
    return [Entry(int(code), commands, tuple(texts)) for code, commands, *texts in parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the commands name."""
    folder = tmp_path_factory.mktemp("first-hour")
    write_run(folder / "demo")
    Run(model=CONFIG, output="demo", steps=1).save(folder / "demo" / "recipe.json")
    for name in ("texts", "empty", "broken", "tasks"):
        (folder / name).mkdir()
    files = {
        "texts/a.txt": "red green blue ", "notes.txt": "a text of few words. " * 20, "empty.txt": "", "data.json": "{}",
        "records.jsonl": '{"text": "one"}\n{"text": "two"}\n', "broken.jsonl": '{"text": "one"\n',
        "broken/config.json": "{", "tokenizer.json": '{"version": "1.0"}',
        "tasks/piqa_val.jsonl": '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n' * 2,
        "story.jsonl": '{"id": "1", "input": "Who?\\n\\nA story of Ann.", "output": "Ann"}',
        "wrong.chat": "/nothing\n/save\n/save here.state\n/load nowhere.state\nhello\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "picture.txt").write_bytes(b"a" * 70_000 + b"\xff\xd8")
    words = models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>")
    Tokenizer(words).save(str(folder / "words.json"))
    release_of_gecko(folder / "release")
    write_chats(folder / "chats.jsonl", some_chats(4))
    torch.manual_seed(7)
    narrow = dataclasses.replace(CONFIG, model_dim=16)
    readers = {"book": gecko.load(folder / "demo"), "other": gecko.Gecko(CONFIG), "narrow": gecko.Gecko(narrow)}
    for name, model in readers.items():
        read(model.eval(), [torch.tensor([256, *b"a book"])]).state.save(folder / f"{name}.state")
    assert CliRunner().invoke(app, ["quantize", str(folder / "demo"), str(folder / "small")]).exit_code == 0
    gecko.Gecko(dataclasses.replace(CONFIG, vocab_size=100)).save(folder / "little-model")
    cumulative = dataclasses.replace(CONFIG, attention="chunk", memory="none", timestep_betas=None)
    gecko.Gecko(cumulative).save(folder / "cumulative-model")
    _write_hostile_files(folder)
    return folder


def _write_hostile_files(folder: Path) -> None:
    """Write what no command can use: pipes, links to nothing, lists too deep for Python, and parts of files."""
    for suffix in ("", ".txt", ".json", ".jsonl"):
        os.mkfifo(folder / f"pipe{suffix}")
    (folder / "dangling").symlink_to("missing")
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("demo")
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
    (folder / "flipped.state").write_bytes(state[:-5] + bytes([state[-5] ^ 1]) + state[-4:])
    (folder / "notes.gz").write_bytes(gzip.compress((folder / "notes.txt").read_bytes()))
    (folder / "cut.gz").write_bytes(gzip.compress(os.urandom(20_000))[:-50])
    (folder / "huge.state").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    recipe = json.loads((folder / "demo" / "recipe.json").read_text(encoding="utf-8"))
    for name, field in (("extra", {"bogus": 1}), ("word", {"steps": "x"}), ("model", {"model": []})):
        (folder / f"{name}-recipe.json").write_text(json.dumps(recipe | field), encoding="utf-8")
    _write_broken_models(folder)


def _write_broken_models(folder: Path) -> None:
    (checkpoint,) = (folder / "demo" / "checkpoints").iterdir()
    weights, config = ((checkpoint / name).read_bytes() for name in ("model.safetensors", "config.json"))
    broken = {
        "plain": (weights, config), "cut": (weights[:1000], config), "deep": (weights, b"[" * 100_000),
        "negative": (weights, config.replace(b'"num_layers": 2', b'"num_layers": -1')),
        "more": (weights, config.replace(b'"num_layers": 2', b'"num_layers": 3')),
    }  # fmt: skip
    for name, contents in broken.items():
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


def _run(command: str) -> Result:
    """Run a command; ``< FILE`` at its end gives it a file as standard input."""
    arguments, _, file = command.partition(" < ")
    given = Path(file.strip()).read_bytes() if file else b""
    return CliRunner().invoke(app, shlex.split(arguments), input=given, prog_name="gecko")


def _written(text: str | bytes, tokens: int, **options: Any) -> str:
    """Return what the model of demo writes after a text."""
    content = text if isinstance(text, bytes) else text.encode()
    out = gecko.generate(gecko.load("demo"), [256, *content], max_new_tokens=tokens, **options)
    return bytes(out.tokens[0]).decode()


def _result(name: str) -> dict[str, Any]:
    """Return the results of an evaluation, which have everything that one must say."""
    record: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
    assert {"format", "version", "evaluation", "model", "command", "seed", "hardware", "scores"} <= set(record)
    assert all(score["n"] >= 1 and score["unit"] for score in record["scores"])
    assert record["hardware"]["Processor"]
    return record


def _notes(table: str) -> dict[str, str]:
    """Return the notes of the parts in a table, by part."""
    cells = [line.split("│")[1:4] for line in table.splitlines() if line.startswith("│")]
    return {name.strip(): note.strip() for name, _, note in cells if name.strip() not in ("", "total")}


NAMES: dict[str, Any] = {
    "written": _written, "result": _result, "json": json.loads, "version": gecko.__version__, "notes": _notes,
    "state": gecko.GeckoState.load, "RECIPES": RECIPES, "Path": Path,
    "contexts": lambda name: {score["where"]["context"] for score in _result(name)["scores"]},
    "counts": lambda name: {score["n"] for score in _result(name)["scores"]},
}  # fmt: skip
"""What expressions after ``then`` may use, beside ``out`` and ``err``."""


BROKEN_WITHIN = ("cut.gz", "picture.txt", "--renewed-norms")
"""What is found to be wrong only while a model reads it; other mistakes must be found before."""


@pytest.mark.parametrize("entry", _entries(), ids=lambda entry: entry.commands or "nothing")
def test_a_command_answers(
    entry: Entry,
    fresh_folder: Path,
    no_network: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(fresh_folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    monkeypatch.setenv("HOME", str(fresh_folder))
    *first, last = entry.commands.split(" && ")
    for command in first:
        before = _run(command)
        assert before.exit_code == 0, before.output
    files = _files(fresh_folder)
    if entry.exit_code == 2 and not any(name in last for name in BROKEN_WITHIN):
        monkeypatch.setattr(gecko.Gecko, "hidden", lambda *_, **__: pytest.fail("the work has begun"))
    result = _run(last)
    answer = " ".join(result.output.replace("│", " ").split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == entry.exit_code, answer
    texts = [text for text in entry.texts if not text.startswith("then ")]
    assert [text for text in texts if text not in answer] == [], answer
    for text in set(entry.texts) - set(texts):
        assert eval(text.removeprefix("then "), NAMES | {"out": result.stdout, "err": result.stderr}), answer
    assert "Traceback" not in answer
    assert entry.texts, "an entry must say what the answer contains"
    assert entry.exit_code != 2 or any(mark in answer for mark in ("Usage: gecko", "error: ", "─ Error ─")), answer
    assert not (entry.exit_code == 2 and last.startswith("generate ") and result.stdout), "a pipe gets nothing but text"
    assert entry.exit_code != 2 or _files(fresh_folder) == files, "a command that is refused writes nothing"
    assert len(answer) < 1000 or "error: " not in answer
    tables = [line for line in result.output.splitlines() if set(line) & set("│┃─━")]
    assert max(map(len, tables), default=0) <= 80
    written = capfd.readouterr()
    assert written.out == written.err == "", "libraries must print nothing"

    assert not Path("~").exists()


def _files(folder: Path) -> dict[Path, int]:
    """Return when each file was changed; empty ones are locks."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.stat().st_size}
