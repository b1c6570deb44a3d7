"""Self-contained HTML pages from Jinja templates.

All templates extend ``base.html.j2``: system fonts, black on white, and tables that scroll if they are wider than the
page. ``parts.html.j2`` has the macros for pictures and for tables of names and values.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from gecko.io.files import whole_file
from gecko.runtime.process import require


def write_html(path: Path, template: str, **values: Any) -> None:
    """Fill a template with ``values`` and write the page atomically. All values are escaped.

    Args:
        template: package and file, such as ``gecko.pages/report.html.j2``. Templates name each other in the same way.

    Raises:
        ImportError: Jinja is not installed.
        OSError: the page could not be written.
    """
    jinja = require("jinja2", "train")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_source), undefined=jinja.StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    html = environment.get_template(template).render(**values)
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def is_page(path: Path) -> bool:
    """Return whether ``write_html`` wrote the file."""
    with path.open("rb") as file:
        return (
            re.match(rb'<!doctype html>.*<meta name="generator" content="gecko">', file.read(1 << 12), re.DOTALL)
            is not None
        )


def _source(template: str) -> str:
    package, _, file = template.partition("/")
    return (resources.files(package) / file).read_text(encoding="utf-8")
