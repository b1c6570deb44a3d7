"""The page of ``gecko report``: the paper's figures and tables of runs and evaluations, with its published numbers.

The page shows its sections, its inputs, what was left out, and the commands that reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gecko.experiments.figures import check_packages
from gecko.experiments.inputs import Inputs, gather
from gecko.experiments.report.sections import build_sections
from gecko.experiments.table import grouped
from gecko.pages import Listing, Section, Table
from gecko.pages import write_page as write_html
from gecko.runtime.process import code_name, code_version

__all__ = ["build_sections", "reproduction", "write_page"]


def write_page(paths: Sequence[Path], out: Path, command: str) -> Inputs:
    """Write the report of runs, comparisons and result files as one HTML file, atomically.

    Args:
        paths: folders of runs and comparisons, and result files.
        out: file to write.
        command: command that makes the page, which is shown on it.

    Returns:
        The inputs of the page, and what it leaves out.

    Raises:
        FileNotFoundError, ValueError: as for ``gather``.
        ImportError: matplotlib, Jinja or SciPy is not installed.
    """
    check_packages()
    inputs = gather(paths)
    sections = build_sections(inputs)
    made = Listing(command, title=f"This page, by Gecko {code_name(code_version())}")
    counts = [
        f"{len(items)} {name}" + ("" if len(items) == 1 else "s")
        for items, name in ((inputs.runs, "run"), (inputs.evaluations, "evaluation"))
    ]
    summary = (
        f"Made from {' and '.join(counts)}. What is marked “published” is printed in the paper (Ma et al., 2026): "
        "other models, data and scale, and not measured here."
    )
    left_out = Table("Left out", ["what", "why"], inputs.left_out, [] if inputs.left_out else ["Nothing."], heads=0)
    tables = [Table("", ["given", "what it is"], inputs.given, heads=0), left_out]
    ends = [Section("Reproduction", texts=[*reproduction(inputs), made]), Section("Inputs", tables=tables)]
    write_html(out, "Gecko report", summary, [*sections, *ends])
    return inputs


def reproduction(inputs: Inputs) -> list[Listing]:
    """Return commands by code and machine, in the order of the inputs.

    A run that was resumed with other code or on another machine is listed under both.
    """
    records = [(record, str(record["command"])) for _, record in inputs.comparisons]
    for run in inputs.runs:
        command = str(run.recipe.get("command", "gecko train ..."))
        records += [(session, command) for session in run.sessions or [{}]]
    records += [(file.record, str(file.record["command"])) for file in inputs.evaluations]
    return [
        Listing("\n".join(dict.fromkeys(command for _, command in group)), hardware, f"Gecko {code}")
        for (code, hardware), group in grouped(records, lambda one: _place(one[0])).items()
    ]


def _place(record: Mapping[str, Any]) -> tuple[str, str]:
    code = code_name(record) if "version" in record else "not recorded"
    hardware = "; ".join(f"{name}: {value}" for name, value in record.get("hardware", {}).items())
    return code, hardware or "not recorded"
