"""Labels beside lines, and line styles that can be told apart."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.experiments.figures import loss_figure
from gecko.experiments.rows import Model, Row
from gecko.pages import LineStyle, label_line_ends, new_figure, spread_apart, svg

INTERVALS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.07, 0.14])), min_size=1, max_size=14)


@given(INTERVALS)
def test_names_do_not_overlap_and_keep_their_order(intervals: list[tuple[float, float]]) -> None:
    centers, heights = zip(*intervals, strict=True)
    places = spread_apart(centers, heights)
    order = sorted(range(len(centers)), key=lambda i: places[i])
    for low, high in pairwise(order):
        assert places[low] + heights[low] / 2 <= places[high] - heights[high] / 2 + 1e-6
        assert centers[low] <= centers[high]
    if sum(heights) <= 1:
        assert all(height / 2 - 1e-6 <= place <= 1 - height / 2 + 1e-6
                   for place, height in zip(places, heights, strict=True))  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9, unique=True))
def test_names_with_room_stand_at_their_lines(tenths: list[int]) -> None:
    centers = [tenth / 10 for tenth in tenths]
    assert spread_apart(centers, [0.08] * len(centers)) == pytest.approx(centers)


def test_two_close_names_share_the_way() -> None:
    low, high = spread_apart([0.5, 0.5 + 1e-9], [0.1, 0.1])
    assert abs((low + high) / 2 - 0.5) < 1e-6


def test_styles_differ_in_more_than_colour() -> None:
    styles = [LineStyle.of(number) for number in range(40)]
    assert len({(str(style.dashes), style.marker) for style in styles}) == 40
    assert len({style.color for style in styles[:8]}) == 8


def test_the_same_picture_is_the_same_text() -> None:
    def draw() -> str:
        figure, axes = new_figure("x", "y")
        axes.plot([0, 1], [1, 2], **LineStyle.of(0).line(2))
        label_line_ends(axes, [(2, LineStyle.of(0), "one"), (2, LineStyle.of(1), "two")])
        return svg(figure)

    assert draw() == draw()
    assert draw().startswith("<svg") and not re.search(r"<svg[^>]*\bwidth=\"100", draw())


@pytest.mark.parametrize(("points", "whole"), [(2, True), (4, True), (8, False), (40, False)])
def test_short_runs_are_whole_in_the_picture_and_long_ones_have_a_frame_for_the_end(points: int, whole: bool) -> None:
    model = Model("model", LineStyle.of(0))
    losses = [6.0, *(2.0 - place / 100 for place in range(1, points))]
    rows = [
        Row(model, 0, "training", ("text",), {"step": step, "tokens": 100 * step}, "loss", loss, None, 1, "rows", None)
        for step, loss in enumerate(losses)
    ]
    (axes,) = loss_figure(rows, "tokens", "tokens read", "loss").axes
    low, high = axes.get_ylim()
    assert bool(high > losses[0]) is whole and low < losses[-1]
