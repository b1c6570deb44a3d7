"""Loss by training FLOPs: which models count, the power law and its interval; speed by the length of a row."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from support.results import GECKO, STEPS, write_run

from gecko.experiments.figures import frontier, power_law
from gecko.experiments.inputs import gather
from gecko.experiments.report import build_sections
from gecko.pages import Section, Table
from gecko.train.throughput import flops_per_token

TITLE = "Loss by training FLOPs"


def test_a_power_law_is_found_again_with_the_interval_of_a_slope() -> None:
    exact = power_law([(10.0**power, 5 * 10.0 ** (-0.05 * power)) for power in range(12, 17)])
    assert exact is not None and exact.interval is not None
    assert (exact.factor, exact.exponent) == (pytest.approx(5), pytest.approx(0.05))
    x, noise = np.arange(4) * math.log(10), np.array([0.01, -0.02, 0.005, 0.01])
    y = math.log(5) - 0.05 * x + noise
    found = power_law(list(zip(np.exp(x).tolist(), np.exp(y).tolist(), strict=True)))
    assert found is not None and found.interval is not None
    design = np.stack([x, np.ones(4)], 1)
    (slope, _), (squares,), *_ = np.linalg.lstsq(design, y, rcond=None)
    reach = stats.t.ppf(0.975, 2) * math.sqrt(squares / 2 * np.linalg.inv(design.T @ design)[0, 0])
    assert [found.interval.low, found.interval.high] == pytest.approx([-slope - reach, -slope + reach])
    assert power_law([(1.0, 2.0), (2.0, 1.0)]) is None and power_law([]) is None


def test_models_that_cheaper_ones_beat_are_not_fitted() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.5), (1.0, 2.5), (4.0, 1.0), (5.0, 0.5)]
    assert frontier(points) == [(1.0, 2.5), (3.0, 1.0), (5.0, 0.5)]


def write(folder: Path, width: int, loss: float, seed: int = 0, **recipe: Any) -> Path:
    """Write a run of a Gecko of a width, with a final loss in nats per byte."""
    run = folder / f"model_{width}{len(recipe)}" / f"seed-{seed}"
    write_run(run, "small_gecko", seed)
    values, results = (json.loads((run / name).read_text()) for name in ("recipe.json", "results.json"))
    values["model"]["model_dim"] = values["model"]["ffn_dim"] = width
    (run / "recipe.json").write_text(json.dumps(values | recipe))
    (run / "results.json").write_text(json.dumps(results | {"nats_per_byte": loss}))
    return run


def training(folder: Path) -> tuple[Section, Table, list[tuple[str, str]]]:
    inputs = gather([run for model in sorted(folder.iterdir()) for run in sorted(model.iterdir())])
    (section,) = build_sections(inputs)
    return section, next(one for one in section.tables if one.title.startswith(TITLE)), inputs.left_out


def flops(width: int) -> float:
    return flops_per_token(dataclasses.replace(GECKO, model_dim=width, ffn_dim=width), 32) * STEPS * 64


def test_a_family_has_a_line_from_three_amounts_of_compute(tmp_path: Path) -> None:
    for width, losses in ((16, (2.0, 2.2)), (32, (1.9, 1.9))):
        for seed, loss in enumerate(losses):
            write(tmp_path, width, loss, seed)
    section, table, _ = training(tmp_path)
    pictures = len(section.pictures)
    ends = f"{flops(16):.2e} to {flops(32):.2e}"
    assert table.rows == [["model_160", "2", ends, "2", "no fit: it needs 3 amounts of compute"]]
    write(tmp_path, 64, 1.8)
    write(tmp_path, 128, 2.5)  # worse than cheaper ones
    section, table, _ = training(tmp_path)
    law = power_law([(flops(16), 2.1), (flops(32), 1.9), (flops(64), 1.8)])
    assert law is not None and law.interval is not None
    (line,) = table.rows
    assert line[:2] == ["model_160", "4"] and line[3] == "3"
    assert line[4] == (f"{law.exponent:.4f}", f"{law.interval.low:.4f} to {law.interval.high:.4f}")
    assert len(section.pictures) == pictures
    (axes,) = next(one for one in section.pictures if "FLOPs" in one.caption).figure.axes
    filled = [one.get_fillstyle() for one in axes.lines if len(one.get_xdata()) == 1]
    assert filled.count("full") == 3 and filled.count("none") == 1


def test_other_parts_are_other_families_and_one_model_has_no_picture(tmp_path: Path) -> None:
    write(tmp_path, 16, 2.0)
    write(tmp_path, 32, 1.9, model={**dataclasses.asdict(GECKO), "memory": "none"})
    section, table, _ = training(tmp_path)
    assert len(table.rows) == 2 and not [one for one in section.pictures if "FLOPs" in one.caption]


@pytest.mark.parametrize("recipe", [{"init_from": "runs/other"}, {"model": {"model_type": "another"}}])
def test_runs_whose_flops_are_not_known_are_named(recipe: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, 16, 2.0)
    write(tmp_path, 32, 1.9, **recipe)
    _, table, left_out = training(tmp_path)
    assert len(table.rows) == 1 and [what for what, why in left_out if "FLOPs" in why] == ["model_321"]


def test_speed_is_drawn_by_the_length_of_a_row(tmp_path: Path) -> None:
    write(tmp_path, 16, 2.0)
    write(tmp_path, 16, 1.9, sequence_length=64)
    write(tmp_path, 16, 1.9, sequence_length=128, precision="bfloat16")
    section, *_ = training(tmp_path)
    (picture,) = (one for one in section.pictures if one.caption.startswith("Training: tokens/s"))
    lines = [one.get_xdata() for one in picture.figure.axes[0].lines if len(one.get_xdata()) == 2]
    assert [list(map(int, one)) for one in lines[:1]] == [[32, 64]], "other arithmetic is another line"
