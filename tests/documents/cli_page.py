"""Write the reference of ``docs/cli.md`` from the commands: ``python tests/documents/cli_page.py``.

What stands above the mark in the page is written by hand. The rest says what ``gecko COMMAND --help`` says.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from gecko.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- Written by tests/documents/cli_page.py from the docstrings in src/gecko/cli, which are what to change. -->"
PANELS = ("Train", "Use and evaluate", "Model files", "Inspect")
MORE = {
    "tokenize": "data.md", "plan": "plan.md", "train": "training.md", "finetune": "finetuning.md",
    "compare": "comparison.md", "report": "report.md", "read": "snapshots.md", "generate": "generation.md",
    "chat": "chat.md", "serve": "serving.md", "quantize": "quantization.md", "convert": "huggingface.md",
    "distill": "llama.md#distil", "export": "huggingface.md#export-for-users-without-gecko",
    "consolidate": "parallel.md", "average": "training.md",
    "doctor": "troubleshooting.md", "eval": "evaluation.md", "state": "snapshots.md",
}  # fmt: skip
"""Page that says more, by the first word of a command."""
HEAD = ("| argument or option | meaning | default |", "|---|---|---|")

Row = tuple[str, str, str]
"""Argument or option, its meaning and its default."""


def whole_page() -> str:
    """Return the page with the reference as the commands are now."""
    return f"{PAGE.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n\n{reference()}"


def reference() -> str:
    """Return the description of all commands by the panels of the help, then the options that several share."""
    program: Any = typer.main.get_command(app)
    panels = {panel: [*_commands(program.commands, panel)] for panel in PANELS}
    described = [row for commands in panels.values() for _, command in commands for row in _rows(command)]
    shared = {row: None for row, number in Counter(described).items() if number > 1}
    lines: list[str] = []
    for panel, commands in panels.items():
        lines += [f"## {panel}", "", *(line for name, command in commands for line in _command(name, command, shared))]
    return "\n".join([*lines, "## Shared options", "", *HEAD, *map(_line, shared), ""])


def _commands(commands: Any, panel: str) -> Iterator[tuple[str, Any]]:
    """Yield name and command of a panel; a group stands for its commands."""
    for name, command in commands.items():
        if command.rich_help_panel == panel:
            below = getattr(command, "commands", {"": command})
            yield from ((f"{name} {word}".strip(), one) for word, one in below.items())


def _command(name: str, command: Any, shared: Collection[Row]) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    given = [f" {it.metavar}" if it.required else f" [{it.metavar}]" for it in arguments]
    text, _, examples = cleandoc(command.help).partition("**Example")
    more = MORE.get(name.split()[0])
    yield from (f"### `gecko {name}{''.join(given)}`", "")
    yield from (" ".join(_paragraphs(text)) + (f" [More]({more})." if more else ""), "", *HEAD)
    yield from (_line(row) for row in _rows(command) if row not in shared)
    if used := ", ".join(f"`{row[0]}`" for row in _rows(command) if row in shared):
        yield f"| {used} | [shared](#shared-options) |  |"
    shown = "<br>".join(f"`{example}`" for example in _paragraphs(examples.partition("**")[2])).replace("|", r"\|")
    yield f"|  | Examples: {shown} |  |"
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, each in one line."""
    for blank, lines in groupby(text.splitlines(), key=lambda line: not line.strip()):
        if not blank:
            yield " ".join(line.strip() for line in lines)


def _rows(command: Any) -> Iterator[Row]:
    """Yield name, meaning and default of each argument and option, each once."""
    yield from dict.fromkeys(map(_row, command.params))


def _row(parameter: Any) -> Row:
    value = f" {parameter.metavar}" if parameter.metavar else ""
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else ""
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    shown = "required" if parameter.required else "" if default is None or default is False else str(default)
    return (names + value).strip(), parameter.help, shown


def _line(row: Row) -> str:
    return f"| `{row[0]}` | {row[1]} | {row[2]} |"


if __name__ == "__main__":
    PAGE.write_text(whole_page(), encoding="utf-8")
