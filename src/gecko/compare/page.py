"""``comparison.html``: one page with pictures, tables, settings and the command, that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gecko.compare.figures import loss_by_time, loss_by_tokens
from gecko.compare.record import NAME, Comparison
from gecko.compare.tables import run_table, summary_tables, tuning_tables
from gecko.pages.drawing import svg
from gecko.pages.html import write_html
from gecko.version import code_name, code_version


def write_page(comparison: Comparison) -> Path:
    """Write the page, and its pictures as PNG beside it; ImportError where matplotlib or Jinja is missing."""
    folder, record = comparison.plan.folder, comparison.to_dict()
    path = folder / "comparison.html"
    write_html(
        path,
        "gecko.compare/page.html.j2",
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
    )
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
