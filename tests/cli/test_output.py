"""Output paths of commands are checked before the work, and only regular files are replaced."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gecko
from gecko.cli.common import EVALUATION, PAGE, STATE, Kind, output_file


def test_a_new_file_an_old_one_and_a_link_are_taken(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "target")
    for name in ("old", "link", "new/deep/file"):
        assert output_file(str(tmp_path / name), STATE) == tmp_path / name
    # The folder of the future file exists.
    assert (tmp_path / "far").is_dir() and (tmp_path / "new" / "deep").is_dir()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "file").touch()
    wrong = ("/dev/null", tmp_path, tmp_path / "pipe", tmp_path / "link", tmp_path / "file" / "below")
    for path in map(str, wrong):
        with pytest.raises(ValueError, match=f"--out must be a file in a folder that can be .* got {path}. "):
            output_file(path, STATE)
    with pytest.raises(ValueError, match="--save-state must be a file"):
        output_file(str(tmp_path), STATE, option="--save-state")


Command = Callable[..., Any]


def _written(folder: Path) -> dict[str, tuple[Kind, bytes]]:
    """Write a file of each kind with the package's own functions; return kind and content by name."""
    from gecko.eval.results import Results
    from gecko.pages import write_page

    state, results, page = folder / "state", folder / "results", folder / "page"
    gecko.GeckoState.empty(gecko.GeckoConfig.preset("tiny", num_layers=1)).save(state)
    Results("perplexity", [], {}, 0).save(results, {}, "", {})
    write_page(page, "A page", "", [])
    return {
        kind.name: (kind, path.read_bytes()) for kind, path in ((STATE, state), (EVALUATION, results), (PAGE, page))
    }


def test_only_a_file_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    kinds = _written(tmp_path)
    others = [b"a book", b"{}", json.dumps({"format": "another"}).encode(), b"<!doctype html><p>mine", b"\xff" * 99]
    for name, (kind, content) in kinds.items():
        target = tmp_path / "target"
        target.write_bytes(content)
        assert output_file(str(target), kind) == target
        for other in [*others, *(found for title, (_, found) in kinds.items() if title != name)]:
            target.write_bytes(other)
            with pytest.raises(
                FileExistsError, match=f"{name}, which is replaced; {target} is something else.*--force"
            ):
                output_file(str(target), kind)
            assert output_file(str(target), kind, force=True) == target
            assert target.read_bytes() == other


def test_what_is_read_is_never_replaced(tmp_path: Path) -> None:
    book, model = tmp_path / "book.txt", tmp_path / "model"
    model.mkdir()
    for path in (book, model / "model.safetensors"):
        path.write_text("read")
    (tmp_path / "link").symlink_to(book)
    os.link(book, tmp_path / "same")
    for out in (book, tmp_path / "link", tmp_path / "same", model / "model.safetensors"):
        for force in (False, True):
            with pytest.raises(FileExistsError, match=f"must not be a file that this command reads; {out} is one"):
                output_file(str(out), STATE, inputs=[str(book), str(model), None, "bytes"], force=force)
    assert output_file(str(model / "new"), STATE, inputs=[str(model)]) == model / "new"


def test_commands_refuse_before_they_work(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, notes = tmp_path / "book.txt", tmp_path / "notes.txt"
    for path in (book, notes):
        path.write_text("Some words of it. " * 20)
    commands: list[tuple[object, ...]] = [
        ("read", run_folder, book, "--out"),
        ("generate", run_folder, "--file", book, "-n", 2, "--save-state"),
        ("eval", "perplexity", run_folder, book, "--lengths", "16", "--out"),
        ("eval", "positions", run_folder, book, "--length", "32", "--out"),
        ("eval", "retrieval", run_folder, "niah_single_2", book, "--lengths", "256", "--samples", 1, "--out"),
        ("eval", "diagnose", "mqar", "steps=1", "--out"),
        ("eval", "academic", run_folder, "piqa", "--data", book, "--out"),
        ("eval", "scrolls", run_folder, "qmsum", "--data", book, "--out"),
        ("report", book, "--out"),
    ]
    with monkeypatch.context() as patched:
        for work in ("gecko.models.gecko.Gecko.hidden", "gecko.experiments.report.write_page"):
            patched.setattr(work, lambda *_, **__: pytest.fail("the work has begun"))
        for words in commands:
            _refuses(command, words, notes, book)
    assert command("read", run_folder, book, "--out", notes, "--force").exit_code == 0
    assert gecko.GeckoState.load(notes).position == [len(book.read_bytes()) + 1]
    assert command("read", run_folder, book, "--out", notes).exit_code == 0


def _refuses(command: Command, words: tuple[object, ...], notes: Path, book: Path) -> None:
    """Assert that the command replaces no file of another kind and, even with ``--force``, none that it reads."""
    wrong: list[tuple[Path, tuple[str, ...], str]] = [(notes, (), f"{notes} is something else")]
    if book in words:
        wrong += [(book, (), "this command reads"), (book, ("--force",), "this command reads")]
    for out, flags, message in wrong:
        before = out.read_bytes()
        result = command(*words, out, *flags)
        assert result.exit_code == 2 and message in result.stderr, (words, result.stderr)
        assert out.read_bytes() == before


def test_an_input_of_the_kind_that_is_written_is_not_replaced(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    """Also under other names of the same file, and with ``--force``."""
    kinds = _written(tmp_path)
    for kind, content in kinds.values():
        read = tmp_path / "read"
        read.write_bytes(content)
        for name in ("link", "same"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(read)
        os.link(read, tmp_path / "same")
        for out in ("read", "link", "same"):
            for force in (False, True):
                with pytest.raises(FileExistsError, match="must not be a file that this command reads"):
                    output_file(str(tmp_path / out), kind, inputs=[str(read)], force=force)
        # Earlier results in a folder that is read are replaced.
        assert output_file(str(read), kind, inputs=[str(tmp_path)]) == read
    text = tmp_path / "results"
    for flags in ((), ("--force",)):
        result = command("eval", "perplexity", run_folder, text, "--lengths", "16", "--out", text, *flags)
        assert result.exit_code == 2 and "this command reads" in result.stderr
        result = command("report", run_folder, text, "--out", text, *flags)
        assert result.exit_code == 2 and "this command reads" in result.stderr
    assert text.read_bytes() == kinds[EVALUATION.name][1]


def test_a_state_is_continued_in_place(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """A file that is not a state is not replaced, even if it is given as one."""
    book, state, notes = (tmp_path / name for name in ("book.txt", "book.state", "notes.txt"))
    for path in (book, notes):
        path.write_text("Some words of it. ")
    assert command("read", run_folder, book, "--out", state).exit_code == 0
    for words in (
        ("read", run_folder, book, "--out"),
        ("generate", run_folder, "--file", book, "-n", 0, "--save-state"),
    ):
        before = gecko.GeckoState.load(state).position[0]
        result = command(*words, state, "--state", state)
        assert result.exit_code == 0, result.stderr
        assert gecko.GeckoState.load(state).position == [before + len(book.read_bytes())]
        for flags in ((), ("--force",)):
            assert command(*words, notes, "--state", notes, *flags).exit_code == 2
            assert notes.read_bytes() == book.read_bytes()


LOST: list[tuple[str, str, str]] = [
    ("tokenize {folder}/book --tokenizer bytes --out {folder}/shards", ">/dev/full", "shards/manifest.json"),
    ("eval perplexity {run} {folder}/book --lengths 64 --out {folder}/scores", ">/dev/full", "scores"),
    ("eval perplexity {run} {folder}/book --lengths 64 --out {folder}/scores", "<&- >&- 2>/dev/full", "scores"),
    ("generate {run} --prompt abc -n 3 --save-state {folder}/state", "<&- >&- 2>&-", "state"),
]
"""Commands whose work is more than what they print, where that goes, and the file with all of the work."""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(("words", "lost", "file"), LOST)
def test_output_that_is_lost_takes_no_work_with_it(
    words: str, lost: str, file: str, run_folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Standard output and error, closed before the start or on a full disk, without a traceback."""
    (tmp_path / "book").write_text("a quick brown fox " * 100)
    command = f"{shlex.quote(sys.executable)} -m gecko {words.format(run=run_folder, folder=tmp_path)} {lost}"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if words.startswith("eval") and lost == ">/dev/full" else 0), done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / file).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", ["--version", "--help", "train --help", "state --help"])
def test_help_that_cannot_be_printed_is_one_line(words: str, environment: dict[str, str]) -> None:
    command = f"{shlex.quote(sys.executable)} -m gecko {words} >/dev/full"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "No space left" in done.stderr
