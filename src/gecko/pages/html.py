"""HTML pages, each one file that needs nothing else, from templates beside the code that fills them.

``base.html.j2`` is what all extend: system fonts, black on white, tables that scroll where they are wider than the
page. ``parts.html.j2`` has pictures and tables of pairs.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from gecko.extras import require
from gecko.files import whole_file


def write_html(path: Path, template: str, **values: Any) -> None:
    """Fill a template with ``values``, all of them escaped, and write the page whole or not at all.

    Args:
        template: package and file, as ``gecko.report/page.html.j2``; templates name each other in the same way.

    Raises:
        ImportError: Jinja is missing.
        OSError: the disk refused.
    """
    jinja = require("jinja2", "train")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_source), undefined=jinja.StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    html = environment.get_template(template).render(**values)
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8")


def _source(template: str) -> str:
    package, _, file = template.partition("/")
    return (resources.files(package) / file).read_text(encoding="utf-8")
