"""Write the reference of ``docs/cli.md`` from the commands: ``python tests/documents/cli_page.py``.

What stands above the mark in the page is written by hand. The rest says what ``gecko COMMAND --help`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    "export": "huggingface.md#export-for-users-without-gecko", "consolidate": "parallel.md", "average": "training.md",
    "doctor": "troubleshooting.md", "eval": "evaluation.md", "state": "snapshots.md",
}  # fmt: skip
"""Page that says more, by the first word of a command."""


def whole_page() -> str:
    """Return the page with the reference as the commands are now."""
    return f"{PAGE.read_text(encoding='utf-8').partition(MARK)[0]}{MARK}\n\n{reference()}"


def reference() -> str:
    """Return the description of all commands, by the panels of the help."""
    program: Any = typer.main.get_command(app)
    lines: list[str] = []
    for panel in PANELS:
        lines += [f"## {panel}", ""]
        for name, command in program.commands.items():
            if command.rich_help_panel == panel:
                lines += _group(name, command) if hasattr(command, "commands") else _command(name, command)
    return "\n".join(lines)


def _group(name: str, group: Any) -> Iterator[str]:
    for below, command in group.commands.items():
        yield from _command(f"{name} {below}", command)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    shown = [f" {it.metavar}" if it.required else f" [{it.metavar}]" for it in arguments]
    text, _, examples = cleandoc(command.help).partition("**Example")
    more = MORE.get(name.split()[0])
    yield from (f"### `gecko {name}{''.join(shown)}`", "", text.strip() + (f" [More]({more})." if more else ""), "")
    yield from (f"- `{example}`" for example in _paragraphs(examples.partition("**")[2]))
    if command.params:
        yield from ("", "| argument or option | meaning | default |", "|---|---|---|")
        yield from map(_row, command.params)
    yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, each in one line."""
    for blank, lines in groupby(text.splitlines(), key=lambda line: not line.strip()):
        if not blank:
            yield " ".join(line.strip() for line in lines)


def _row(parameter: Any) -> str:
    value = f" {parameter.metavar}" if parameter.metavar else ""
    names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else ""
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    shown = "required" if parameter.required else "" if default is None or default is False else str(default)
    return f"| `{(names + value).strip()}` | {parameter.help} | {shown} |"


if __name__ == "__main__":
    PAGE.write_text(whole_page(), encoding="utf-8")
