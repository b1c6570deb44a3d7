"""What commands write: paths of files, and text on the terminal."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Command
from rich.progress import Progress, TextColumn
from rich.table import Table

import gecko
from gecko.cli import chat, generate
from gecko.cli.command import EVALUATION, PAGE, STATE, output_file
from gecko.eval.results import Results
from gecko.pages import write_page
from gecko.runtime.terminal import Terminal, visible

# ---- Output paths of commands are checked before the work, and only regular files are replaced.


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
    for path in map(str, ("/dev/null", tmp_path, tmp_path / "pipe", tmp_path / "link", tmp_path / "file" / "below")):
        with pytest.raises(ValueError, match=f"--save-state must be a file in a folder that can be .* got {path}. "):
            output_file(path, STATE, option="--save-state")


def test_only_a_file_of_the_same_kind_is_replaced_and_none_that_is_read(tmp_path: Path) -> None:
    """Also under other names of the same file, and with ``force``; but earlier results in a folder that is read are."""
    state, results, page, target = (tmp_path / name for name in ("state", "results", "page", "target"))
    gecko.GeckoState.empty(gecko.GeckoConfig.preset("tiny", num_layers=1)).save(state)
    Results("perplexity", [], {}, 0).save(results, {}, "", {})
    write_page(page, "A page", "", [])
    kinds = {kind: path.read_bytes() for kind, path in ((STATE, state), (EVALUATION, results), (PAGE, page))}
    others = [b"a book", b"{}", json.dumps({"format": "another"}).encode(), b"<!doctype html><p>mine", b"\xff" * 99]
    target.touch()
    (tmp_path / "link").symlink_to(target)
    os.link(target, tmp_path / "same")
    for kind, content in kinds.items():
        target.write_bytes(content)
        assert output_file(str(target), kind) == output_file(str(target), kind, inputs=[str(tmp_path)]) == target
        for other in [*others, *(found for of, found in kinds.items() if of != kind)]:
            target.write_bytes(other)
            with pytest.raises(FileExistsError, match=f"{kind.name}, which is replaced; {target} is so.*--force"):
                output_file(str(target), kind)
            assert output_file(str(target), kind, force=True) == target
            assert target.read_bytes() == other
            with pytest.raises(FileExistsError, match=f"must not be a file that this command reads; {target} is one"):
                output_file(str(target), kind, inputs=[str(tmp_path)], force=True)
        for content_read, name, force in product((content, b"read"), ("target", "link", "same"), (False, True)):
            target.write_bytes(content_read)
            with pytest.raises(FileExistsError, match=f"file that this command reads; {tmp_path / name} is one"):
                output_file(str(tmp_path / name), kind, inputs=[str(target), None, "bytes"], force=force)


LOST: list[tuple[str, str, str]] = [
    ("tokenize {folder}/book --tokenizer bytes --out {folder}/shards", ">/dev/full", "shards/manifest.json"),
    ("eval perplexity {run} {folder}/book --lengths 64 --out {folder}/scores", ">/dev/full", "scores"),
    ("eval perplexity {run} {folder}/book --lengths 64 --out {folder}/scores", "<&- >&- 2>/dev/full", "scores"),
    ("generate {run} --prompt abc -n 3 --save-state {folder}/state", "<&- >&- 2>&-", "state"),
]
"""Commands whose work is more than what they print, where that goes, and the file with all of the work."""
needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


def in_shell(words: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = f"{shlex.quote(sys.executable)} -m gecko {words}"
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


@needs_full_device
@pytest.mark.parametrize(("words", "lost", "file"), LOST)
def test_output_that_is_lost_takes_no_work_with_it(
    words: str, lost: str, file: str, run_folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Standard output and error, closed before the start or on a full disk, without a traceback."""
    (tmp_path / "book").write_text("a quick brown fox " * 100)
    done = in_shell(f"{words.format(run=run_folder, folder=tmp_path)} {lost}", environment)
    assert done.returncode == (2 if words.startswith("eval") and lost == ">/dev/full" else 0), done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / file).is_file()


@needs_full_device
@pytest.mark.parametrize("words", ["--version", "train --help"])
def test_help_that_cannot_be_printed_is_one_line(words: str, environment: dict[str, str]) -> None:
    done = in_shell(f"{words} >/dev/full", environment)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "No space left" in done.stderr


# ---- No text of a user, a file or a model controls the terminal, or is taken for markup.

NAME = "a\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e[/red][bold]:smile:"
SHOWN = r"a\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e[/red][bold]:smile:"
CONTROLS = re.compile("[^\t\n\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def test_what_is_replaced() -> None:
    assert visible(f"{NAME}\n\té\udc9b\x7f") == rf"{SHOWN}" + "\n\té" + r"\udc9b\x7f"
    assert [code for code in range(0x11000) if CONTROLS.match(chr(code))] == [
        code for code in range(0x11000) if visible(chr(code)) != chr(code)
    ]


def _table(console: Terminal) -> None:
    table = Table(NAME, title=NAME)
    table.add_row(NAME)
    console.print(table)


def _progress(console: Terminal) -> None:
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(visible(NAME))


def _status(console: Terminal) -> None:
    with console.status(NAME):
        pass


@pytest.mark.parametrize("draw", [lambda console: console.print(NAME), _table, _progress, _status])
def test_consoles_print_names_as_they_are(draw: Callable[[Terminal], Any]) -> None:
    file = io.StringIO()
    draw(Terminal(file=file, width=200, force_terminal=True, color_system=None))
    text = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", file.getvalue())
    assert SHOWN in text and not CONTROLS.search(text)


COMMANDS = [
    ("generate", NAME), ("generate", "RUN", "-p", "x", "--state", NAME), ("generate", "RUN", NAME), ("train", NAME),
    ("train", "tiny", f"{NAME}=1"), ("train", "tiny", f"model.{NAME}=1"), ("finetune", NAME, NAME), (NAME,),
    ("generate", "RUN", f"--{NAME}"), ("generate", "RUN", "--top-k", NAME), ("plan", NAME), ("info", NAME),
    ("state", "show", NAME), ("tokenize", NAME, "--out", NAME), ("eval", "perplexity", NAME, NAME), ("chat", NAME),
    ("read", "RUN", NAME), ("serve", "RUN", "--states", NAME), ("report", NAME), ("convert", NAME, NAME),
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=[" ".join(arguments[:3]).replace(NAME, "N") for arguments in COMMANDS]
)
def test_messages_of_commands(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*(str(run_folder) if argument == "RUN" else argument for argument in arguments), code=2)
    assert not CONTROLS.search(result.output)


@pytest.mark.parametrize("write", [generate._write, chat._write_answer])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Callable[[Any], None], terminal: bool
) -> None:
    """A pipe gets the exact text."""

    class Answer:
        cut = False

        def __iter__(self) -> Iterator[str]:
            yield from ("x", NAME, "\n")

    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    write(Answer())
    assert capsys.readouterr().out.startswith(f"x{SHOWN if terminal else NAME}\n")


def test_names_in_figures_are_no_formulas() -> None:
    pytest.importorskip("matplotlib")
    from gecko.pages import LineStyle, label_line_ends, new_figure, svg

    for name in ("$\\foo$", "$", "a$b$c", "_hidden", "$x^2$", "\\$"):
        figure, axes = new_figure(name, name)
        axes.plot([1, 10], [1, 2])
        axes.set_yscale("log")
        label_line_ends(axes, [(1.5, LineStyle.of(0), name)])
        assert svg(figure)
        assert not any(
            text.get_parse_math()
            for text in figure.findobj()
            if "get_parse_math" in dir(text) and text.get_text() == name and "$" in name
        )
