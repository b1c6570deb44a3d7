"""The page of ``gecko report``: the paper's figures and tables of runs and evaluations, with its published numbers.

The page shows its sections, its inputs, what was left out, and the commands that reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.experiments.report.material import EvaluationFile, Material, RunFolder, gather
from gecko.experiments.report.models import Evaluated, evaluated, identity_of_evaluation, identity_of_run, name_subjects
from gecko.experiments.report.perplexity import perplexity_sections, positions_sections
from gecko.experiments.report.tables import Section
from gecko.experiments.report.tasks import academic_sections, retrieval_sections, scrolls_sections, synthetic_sections
from gecko.experiments.report.training import comparison_sections, trained, training_sections
from gecko.pages import write_html
from gecko.runtime.process import code_name, code_version

__all__ = ["build_sections", "reproduction", "write_page"]


@dataclass(frozen=True)
class Made:
    """Commands that ran with the same code on the same machine."""

    code: str
    hardware: str
    commands: Sequence[str]


def reproduction(material: Material) -> list[Made]:
    """Return commands by code and machine, in the order of the inputs.

    A run that was resumed with other code or on another machine is listed under both.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for _, record in material.comparisons:
        found.setdefault(_place(record), {}).setdefault(str(record["command"]))
    for run in material.runs:
        command = f"{run.recipe.get('command', 'gecko train ...')}"
        for session in run.sessions or [{}]:
            found.setdefault(_place(session), {}).setdefault(command)
    for file in material.evaluations:
        found.setdefault(_place(file.record), {}).setdefault(str(file.record["command"]))
    return [Made(code, hardware, list(commands)) for (code, hardware), commands in found.items()]


def _place(record: Mapping[str, Any]) -> tuple[str, str]:
    code = code_name(record) if "version" in record else "not recorded"
    hardware = "; ".join(f"{name}: {value}" for name, value in record.get("hardware", {}).items())
    return code, hardware or "not recorded"


_OF_MODELS = {
    "perplexity": perplexity_sections, "positions": positions_sections, "retrieval": retrieval_sections,
    "academic": academic_sections, "scrolls": scrolls_sections,
}  # fmt: skip


def write_page(paths: Sequence[Path], out: Path, command: str) -> Material:
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
    material = gather(paths)
    sections = build_sections(material)
    write_html(
        out, "gecko.pages/report.html.j2", title="Gecko report", sections=sections, material=material,
        made=reproduction(material), command=command, code=code_name(code_version()), summary=_summary(material),
    )  # fmt: skip
    return material


def build_sections(material: Material) -> list[Section]:
    """Return the sections that are not empty. What they leave out is added to ``material``."""
    identities = {run.folder: identity_of_run(run) for run in material.runs}
    files = [file for file in material.evaluations if file.kind != "diagnose"]
    of_files = {id(file): identity_of_evaluation(file, material.runs) for file in files}
    subjects = name_subjects([*identities.values(), *of_files.values()])
    models = trained(material.runs, identities, subjects, material)
    items = evaluated(files, of_files, subjects)
    found = training_sections(models, material) + comparison_sections(material.comparisons)
    for kind, sections in _OF_MODELS.items():
        found += sections([item for item in items if item.file.kind == kind], material)
    return found + synthetic_sections(_diagnoses(material), material)


def _diagnoses(material: Material) -> list[Evaluated]:
    """Return the evaluations of synthetic tasks, with labels that are unique per task."""
    by_task: dict[str, list[EvaluationFile]] = {}
    for file in material.evaluations:
        if file.kind == "diagnose":
            by_task.setdefault(str(file.record["settings"]["task"]), []).append(file)
    items = []
    for files in by_task.values():
        identities = {id(file): identity_of_evaluation(file, material.runs) for file in files}
        items += evaluated(files, identities, name_subjects(list(identities.values())))
    return items


def _summary(material: Material) -> str:
    return f"Made from {_count(material.runs, 'run')} and {_count(material.evaluations, 'evaluation')}."


def _count(items: Sequence[RunFolder] | Sequence[EvaluationFile], name: str) -> str:
    return f"{len(items)} {name}" + ("" if len(items) == 1 else "s")
