"""Self-contained HTML pages: sections with pictures, tables and texts, in one form for all commands.

The page uses system fonts, pictures as wide as the page, and wide tables that scroll. If the system is set to dark
mode, the page is dark, and it inverts the lightness of the pictures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gecko.io.files import write_text
from gecko.pages.figures import svg
from gecko.runtime.process import require

Cell = str | tuple[str, str]
"""Text of a table, or a text with small print below it."""


@dataclass(frozen=True)
class Table:
    """A table; without columns it has no head. The first ``heads`` cells of a row name it."""

    title: str
    columns: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    heads: int = 1
    folded: bool = False
    """Whether the page shows only the title until it is clicked."""
    published: bool = False
    """Whether the numbers are printed in the paper, and not measured here."""


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure with its caption. Small pictures are side by side if the page is wide enough."""

    figure: Any
    caption: str
    small: bool = False


@dataclass(frozen=True)
class Listing:
    """A command, or another text of which every character counts; ``bold`` is its beginning."""

    text: str
    lead: str = ""
    title: str = ""
    bold: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a page."""

    title: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Listing] = ()


def write_page(path: Path, title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write a page atomically. All texts are escaped.

    Raises:
        ImportError: Jinja is not installed.
        OSError: the page could not be written.
    """
    environment = require("jinja2", "train").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__name__) / "page.html.j2").read_text(encoding="utf-8"))
    html = template.render(title=title, summary=summary, sections=sections, svg=svg).lstrip()
    write_text(path, html + "\n")


def is_page(path: Path) -> bool:
    """Return whether ``write_page`` wrote the file."""
    with path.open("rb") as file:
        start = file.read(1 << 12)
    return re.match(rb'<!doctype html>.*<meta name="generator" content="gecko">', start, re.DOTALL) is not None


def pairs(title: str, values: Mapping[str, object], *, folded: bool = False) -> Table:
    """Return a table of names and values."""
    return Table(title, (), [(name, str(value)) for name, value in values.items()], folded=folded)


def settings_tables(settings: Mapping[str, Any]) -> list[Table]:
    """Return one folded table for each part of the names before the first dot; names without a dot come first."""
    groups: dict[str, dict[str, Any]] = {"run": {}}
    for name, value in settings.items():
        groups.setdefault(name.partition(".")[0] if "." in name else "run", {})[name] = value
    return [pairs(name.replace("_", " ").capitalize(), group, folded=True) for name, group in groups.items()]
