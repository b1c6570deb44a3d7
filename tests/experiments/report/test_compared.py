"""The tables of a comparison contain the values of its ``comparison.json``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gecko.experiments.compare import Plan, Tuning
from gecko.experiments.compare.plan import Planned
from gecko.experiments.compare.results import Comparison, RunResult, summarise
from gecko.experiments.compare.runs import Trial
from gecko.experiments.report import build_sections
from gecko.experiments.report.material import gather
from gecko.train import Run

NAMES = ("small_gecko", "small_chunk")


@pytest.fixture
def comparison(runs: Path, tmp_path: Path) -> Path:
    """Return a ``comparison.json`` as the command writes it."""
    for name in NAMES:
        shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "eval"))
    planned = [
        Planned(name, f"seed-{seed}", Run.load(runs / name / f"seed-{seed}" / "recipe.json"))
        for seed in (0, 1) for name in NAMES
    ]  # fmt: skip
    plan = Plan(tmp_path, {one.recipe: one.run for one in planned[:2]}, dict.fromkeys(NAMES, 10_700), (0, 1),
                Tuning((1e-2, 2e-2), 4))  # fmt: skip
    found = [result for one in planned if (result := RunResult.of(one, 10_700)) is not None]
    trials = [Trial(name, 1e-2, "finished", 4.25, 99) for name in NAMES] + [Trial(NAMES[0], 2e-2, "diverged", None, 0)]
    Comparison(plan, "gecko compare", {"Memory": "1"}, trials, dict.fromkeys(NAMES, 1e-2), found,
               summarise(found, NAMES[0]), {"small_chunk seed-2": "failed"}, ["a note"]).save()  # fmt: skip
    return tmp_path


def test_losses_differences_and_rates(comparison: Path) -> None:
    material = gather([comparison])
    record = material.comparisons[0][1]
    training, section = build_sections(material)[:2]
    losses, tuning = section.tables
    assert [row[0].value for row in training.tables[0].rows] == list(NAMES), "in the comparison's order"
    assert [row[0].value for row in losses.rows] == list(NAMES)
    assert [row[3].value for row in losses.rows] == [f"{one['nats_per_byte']:.4f}" for one in record["recipes"]]
    assert losses.rows[0][4].value == "–"
    assert losses.rows[1][4].value == f"{record['recipes'][1]['difference']:+.4f}"
    assert "to" in losses.rows[1][4].detail and losses.rows[0][5].value.endswith(" tokens")
    assert losses.notes[1:] == ["a note", "Not finished: small_chunk seed-2 (failed)."]
    assert [cell.value for cell in tuning.rows[0]] == ["small_gecko", "4.2500", "diverged"]
    assert [cell.value for cell in tuning.rows[1]] == ["small_chunk", "4.2500", ""]
    assert tuning.rows[0][1].detail == "chosen" and tuning.rows[0][2].detail == ""


def test_its_command_is_told(comparison: Path) -> None:
    from gecko.experiments.report import reproduction

    made = reproduction(gather([comparison]))
    assert any("gecko compare" in one.commands and one.hardware == "Memory: 1" for one in made)


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match="must be of `gecko compare`"):
        gather([tmp_path])
