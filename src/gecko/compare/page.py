"""``comparison.html``: one page with pictures, tables, settings and the command, that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gecko.compare.figures import loss_by_time, loss_by_tokens
from gecko.compare.record import NAME, Comparison
from gecko.compare.tables import run_table, summary_tables, tuning_tables
from gecko.files import whole_file
from gecko.pages.drawing import svg
from gecko.pages.style import STYLE
from gecko.version import code_name, code_version

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style }}
.wide { overflow-x: auto; }
.wide td { white-space: nowrap; }
.wide th { overflow-wrap: normal; }
.wide tr > * + * { text-align: right; }
th[scope=row] { white-space: nowrap; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="lead">{{ summary }}</p>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<figure>{{ picture.svg | safe }}<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<tr>{% for name in table.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="lead">{{ table.note }}</p>
{% endfor %}
{% if remarks %}
<h2>Not finished, and notes</h2>
<ul>{% for remark in remarks %}<li>{{ remark }}</li>{% endfor %}</ul>
{% endif %}
<h2>Settings that all runs share</h2>
<table>
{% for name, value in settings.items() %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>Models</h2>
<table>
{% for name, value in models.items() %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>Machine and code</h2>
<table>
{% for name, value in machine.items() %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>Command</h2>
<pre>{{ command }}</pre>
</body>
</html>
"""


def write_page(comparison: Comparison) -> Path:
    """Write the page, and its pictures as PNG beside it; ImportError where matplotlib or Jinja is missing."""
    from jinja2 import Environment

    folder, record = comparison.plan.folder, comparison.to_dict()
    html = Environment(autoescape=True).from_string(PAGE).render(
        style=STYLE,
        title=f"Comparison: {', '.join(comparison.plan.recipes)}",
        summary=_summary(comparison),
        pictures=[
            _picture(folder, "loss-by-tokens", loss_by_tokens(comparison.runs), "Held-out loss by tokens"),
            _picture(folder, "loss-by-time", loss_by_time(comparison.runs), "Held-out loss by time"),
        ],
        tables=[*summary_tables(comparison), *tuning_tables(comparison), run_table(comparison)],
        remarks=[*(f"{label}: {state}" for label, state in comparison.unfinished.items()), *comparison.notes],
        settings=record["settings"],
        models={name: _fields(model) for name, model in record["models"].items()},
        machine={**comparison.hardware, "Package": code_name(code_version())},
        command=comparison.command,
    )  # fmt: skip
    path = folder / "comparison.html"
    with whole_file(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return path


def _picture(folder: Path, name: str, figure: Any, title: str) -> dict[str, str]:
    figure.savefig(folder / f"{name}.png", dpi=200)
    caption = (
        f"{title}: thin lines are seeds, thick ones their means; each point is over the same held-out rows. "
        "The final losses in the tables are over more of them. The first third may leave the frame."
    )
    return {"title": title, "svg": svg(figure), "caption": caption}


def _summary(comparison: Comparison) -> str:
    runs = comparison.runs
    return (
        f"{len(runs)} runs of {runs[0].tokens:,} tokens each, of {len(comparison.summaries)} recipes; the same texts "
        f"in the same order for every model of a seed, and the same optimizer. All numbers are in {NAME}."
    )


def _fields(model: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in model.items())
