"""Labels and lines that can be told apart, frames, and loss by training FLOPs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support.results import GECKO, STEPS, write_run

from gecko.experiments.figures import frontier, loss_figure, power_law
from gecko.experiments.inputs import gather
from gecko.experiments.report import build_sections
from gecko.experiments.rows import Model, Row
from gecko.pages import LineStyle, Section, Table, label_line_ends, new_figure, spread_apart, svg
from gecko.train.throughput import flops_per_token


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.07, 0.14])), min_size=1, max_size=14))
def test_names_do_not_overlap_and_keep_their_order(intervals: list[tuple[float, float]]) -> None:
    centers, heights = zip(*intervals, strict=True)
    places = spread_apart(centers, heights)
    for low, high in pairwise(sorted(range(len(centers)), key=lambda i: places[i])):
        assert places[low] + heights[low] / 2 <= places[high] - heights[high] / 2 + 1e-6
        assert centers[low] <= centers[high]
    if sum(heights) <= 1:
        assert all(height / 2 - 1e-6 <= place <= 1 - height / 2 + 1e-6
                   for place, height in zip(places, heights, strict=True))  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9, unique=True))
def test_names_with_room_stand_at_their_lines_and_close_ones_share_the_way(tenths: list[int]) -> None:
    centers = [tenth / 10 for tenth in tenths]
    assert spread_apart(centers, [0.08] * len(centers)) == pytest.approx(centers)
    low, high = spread_apart([0.5, 0.5 + 1e-9], [0.1, 0.1])
    assert abs((low + high) / 2 - 0.5) < 1e-6


def test_styles_differ_in_more_than_colour_and_the_same_picture_is_the_same_text() -> None:
    styles = [LineStyle.of(number) for number in range(40)]
    assert len({(str(style.dashes), style.marker) for style in styles}) == 40
    assert len({style.color for style in styles[:8]}) == 8

    def draw() -> str:
        figure, axes = new_figure("x", "y")
        axes.plot([0, 1], [1, 2], **styles[0].line(2))
        label_line_ends(axes, [(2, styles[0], "one"), (2, styles[1], "two")])
        return svg(figure)

    assert draw() == draw()
    assert draw().startswith("<svg") and not re.search(r"<svg[^>]*\bwidth=\"100", draw())


@pytest.mark.parametrize(("points", "whole"), [(4, True), (8, False)])
def test_short_runs_are_whole_in_the_picture_and_long_ones_have_a_frame_for_the_end(points: int, whole: bool) -> None:
    losses = [6.0, *(2.0 - place / 100 for place in range(1, points))]
    rows = [Row(Model("model", LineStyle.of(0)), 0, "training", ("text",), {"step": step, "tokens": 100 * step}, "loss",
                loss, None, 1, "rows", None) for step, loss in enumerate(losses)]  # fmt: skip
    low, high = loss_figure(rows, "tokens", "tokens read", "loss").axes[0].get_ylim()
    assert bool(high > losses[0]) is whole and low < losses[-1]


def test_a_power_law_is_found_again_with_the_interval_of_a_slope() -> None:
    exact = power_law([(10.0**power, 5 * 10.0 ** (-0.05 * power)) for power in range(12, 17)])
    assert exact is not None and (exact.factor, exact.exponent) == (pytest.approx(5), pytest.approx(0.05))
    x, noise = np.arange(4) * math.log(10), np.array([0.01, -0.02, 0.005, 0.01])
    y = math.log(5) - 0.05 * x + noise
    found = power_law(list(zip(np.exp(x).tolist(), np.exp(y).tolist(), strict=True)))
    assert found is not None and found.interval is not None
    design = np.stack([x, np.ones(4)], 1)
    (slope, _), (squares,), *_ = np.linalg.lstsq(design, y, rcond=None)
    reach = stats.t.ppf(0.975, 2) * math.sqrt(squares / 2 * np.linalg.inv(design.T @ design)[0, 0])
    assert [found.interval.low, found.interval.high] == pytest.approx([-slope - reach, -slope + reach])
    assert power_law([(1.0, 2.0), (2.0, 1.0)]) is None and power_law([]) is None
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.5), (1.0, 2.5), (4.0, 1.0), (5.0, 0.5)]
    assert frontier(points) == [(1.0, 2.5), (3.0, 1.0), (5.0, 0.5)], "models that cheaper ones beat are not fitted"


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
    inputs = gather(sorted(folder.glob("*/*")))
    (section,) = build_sections(inputs)
    return section, next(one for one in section.tables if one.title.startswith("Loss by training")), inputs.left_out


def flops(width: int) -> float:
    return flops_per_token(dataclasses.replace(GECKO, model_dim=width, ffn_dim=width), 32) * STEPS * 64


def test_a_family_has_a_line_from_three_amounts_of_compute(tmp_path: Path) -> None:
    for width, losses in ((16, (2.0, 2.2)), (32, (1.9, 1.9))):
        for seed, loss in enumerate(losses):
            write(tmp_path, width, loss, seed)
    section, table, _ = training(tmp_path)
    pictures, ends = len(section.pictures), f"{flops(16):.2e} to {flops(32):.2e}"
    assert table.rows == [["model_160", "2", ends, "2", "no fit: it needs 3 amounts of compute"]]
    write(tmp_path, 64, 1.8)
    write(tmp_path, 128, 2.5)  # worse than cheaper ones
    section, table, _ = training(tmp_path)
    law = power_law([(flops(16), 2.1), (flops(32), 1.9), (flops(64), 1.8)])
    assert law is not None and law.interval is not None
    (line,) = table.rows
    assert line[:2] == ["model_160", "4"] and line[3] == "3" and len(section.pictures) == pictures
    assert line[4] == (f"{law.exponent:.4f}", f"{law.interval.low:.4f} to {law.interval.high:.4f}")
    (axes,) = next(one for one in section.pictures if "FLOPs" in one.caption).figure.axes
    filled = [one.get_fillstyle() for one in axes.lines if len(one.get_xdata()) == 1]
    assert filled.count("full") == 3 and filled.count("none") == 1


@pytest.mark.parametrize(
    ("recipe", "families", "unknown"),
    [({"model": {**dataclasses.asdict(GECKO), "memory": "none"}}, 2, []),
     ({"init_from": "runs/other"}, 1, ["model_321"]), ({"model": {"model_type": "another"}}, 1, ["model_321"])],
)  # fmt: skip
def test_other_parts_are_other_families_and_unknown_flops_are_told(
    recipe: dict[str, Any], families: int, unknown: list[str], tmp_path: Path
) -> None:
    write(tmp_path, 16, 2.0)
    write(tmp_path, 32, 1.9, **recipe)
    section, table, left_out = training(tmp_path)
    assert len(table.rows) == families and [what for what, why in left_out if "FLOPs" in why] == unknown
    assert not [one for one in section.pictures if "FLOPs" in one.caption], "a family of one model has no picture"


def test_speed_is_drawn_by_the_length_of_a_row(tmp_path: Path) -> None:
    write(tmp_path, 16, 2.0)
    write(tmp_path, 16, 1.9, sequence_length=64)
    write(tmp_path, 16, 1.9, sequence_length=128, precision="bfloat16")
    section, *_ = training(tmp_path)
    (picture,) = (one for one in section.pictures if one.caption.startswith("Training: tokens/s"))
    lines = [one.get_xdata() for one in picture.figure.axes[0].lines if len(one.get_xdata()) == 2]
    assert [list(map(int, one)) for one in lines[:1]] == [[32, 64]], "other arithmetic is another line"


def test_speeds_of_other_batches_are_other_lines_if_they_have_one_length(tmp_path: Path) -> None:
    for seed, (batch_size, length) in enumerate(((2, 32), (2, 64), (8, 32), (8, 64))):
        write(tmp_path, 16, 2.0, seed, batch_size=batch_size, sequence_length=length)
    section, *_ = training(tmp_path)
    (picture,) = (one for one in section.pictures if one.caption.startswith("Training: tokens/s"))
    assert len([one for one in picture.figure.axes[0].lines if len(one.get_xdata()) == 2]) == 2
