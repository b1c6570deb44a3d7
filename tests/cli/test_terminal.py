"""No text of a user, a file or a model controls the terminal, or is taken for markup."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table

from gecko.runtime.terminal import Terminal, visible

NAME = "a\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e[/red][bold]:smile:"
SHOWN = r"a\x1b]0;title\x07\x1b[31m\x9b2J\r\u202e[/red][bold]:smile:"
CONTROLS = re.compile("[^\t\n\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def test_what_is_replaced() -> None:
    assert visible(f"{NAME}\n\té\udc9b\x7f") == rf"{SHOWN}" + "\n\té" + r"\udc9b\x7f"
    assert [code for code in range(0x11000) if CONTROLS.match(chr(code))] == [
        code for code in range(0x11000) if visible(chr(code)) != chr(code)
    ]


def written(draw: Callable[[Terminal], Any]) -> str:
    console = Terminal(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    draw(console)
    return re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", console.file.getvalue())  # type: ignore[attr-defined]


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
    text = written(draw)
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
    command: Any, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*(str(run_folder) if argument == "RUN" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert not CONTROLS.search(result.output)


@pytest.mark.parametrize("write", ["generate", "chat"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: str, terminal: bool
) -> None:
    """A pipe gets the exact text."""
    from gecko.cli import chat, generate

    class Answer:
        cut = False

        def __iter__(self) -> Iterator[str]:
            yield from ("x", NAME, "\n")

    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    (generate if write == "generate" else chat)._write(Answer())  # type: ignore[attr-defined]
    assert capsys.readouterr().out.startswith(f"x{SHOWN if terminal else NAME}\n")


def test_names_in_figures_are_no_formulas() -> None:
    pytest.importorskip("matplotlib")
    from gecko.pages.figures import LineStyle, label_line_ends, new_figure, svg

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
