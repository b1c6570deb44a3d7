"""The page: every section that has something to show, what was given, what was left out, how to get it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gecko.pages.html import write_html
from gecko.report.compared import comparison_sections
from gecko.report.perplexity import perplexity_sections
from gecko.report.positions import positions_sections
from gecko.report.reading import EvaluationFile, Material, RunFolder, gather
from gecko.report.reproduction import reproduction
from gecko.report.retrieval import retrieval_sections
from gecko.report.scores import Evaluated, evaluated
from gecko.report.sections import Section
from gecko.report.subjects import identity_of_evaluation, identity_of_run, name_subjects
from gecko.report.synthetic import synthetic_sections
from gecko.report.tasks import academic_sections, scrolls_sections
from gecko.report.training import trained, training_sections
from gecko.version import code_name, code_version

_OF_MODELS = {
    "perplexity": perplexity_sections, "positions": positions_sections, "retrieval": retrieval_sections,
    "academic": academic_sections, "scrolls": scrolls_sections,
}  # fmt: skip


def write_page(paths: Sequence[Path], out: Path, command: str) -> Material:
    """Write the report of runs, comparisons and result files as one HTML file, whole or not at all.

    Args:
        command: how to make the page again; it is shown there.

    Returns:
        What the page was made from, and what it leaves out.

    Raises:
        FileNotFoundError, ValueError: as for ``gather``.
        ImportError: matplotlib, Jinja or SciPy is missing.
    """
    material = gather(paths)
    sections = build_sections(material)
    write_html(
        out, "gecko.report/page.html.j2", title="Gecko report", sections=sections, material=material,
        made=reproduction(material), command=command, code=code_name(code_version()), summary=_summary(material),
    )  # fmt: skip
    return material


def build_sections(material: Material) -> list[Section]:
    """Those that have something to show; what they leave out is added to ``material``."""
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
    """Models of synthetic tasks are named among those of the same task."""
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
