"""Values on the axes of curves."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gecko.experiments.report.material import RunFolder
from gecko.experiments.report.training import (
    Point,
    Trained,
    _finished_row,
    held_out_points,
    mean_over_seeds,
    minute_clock,
    token_clock,
    training_points,
)
from gecko.train.metrics import Record

RECIPE = {"batch_size": 2, "sequence_length": 300, "seed": 0}


def run(*records: Record) -> RunFolder:
    return RunFolder(Path("run"), RECIPE, list(records), None, [])


def step(number: int, loss: float | None, speed: float = 10.0, seconds: float = 0.0) -> Record:
    return {"kind": "train", "step": number, "loss": loss, "tokens_per_second": speed, "seconds": seconds}


def held_out(number: int, loss: float | None) -> Record:
    return {"kind": "validation", "step": number, "loss": 9.0, "nats_per_byte": loss}


def test_clocks_count_tokens_and_the_time_of_steps_alone() -> None:
    """600 tokens at 10 tokens/s take a minute, whatever time evaluations took."""
    it = run(held_out(0, 5), step(1, 4, 10, 1000), step(2, 3, 20, 3000), held_out(2, 2))
    assert token_clock(it) == {0: 0, 1: 600, 2: 1200}
    assert minute_clock(it) == pytest.approx({0: 0, 1: 1, 2: 1.5})
    assert held_out_points(it, token_clock(it)) == [(0, 0, 5), (2, 1200, 2)]
    assert held_out_points(it, minute_clock(it)) == [(0, 0, 5), (2, 1.5, 2)]
    assert training_points(it, token_clock(it)) == [(1, 600, 4), (2, 1200, 3)]


def test_interval_of_one_seed_is_over_rows() -> None:
    """Half of 400 rows have a loss of 1 nat per token, the others of 3; a token has two bytes."""
    losses = [20.0 * (1 + 2 * (row % 2)) for row in range(400)]
    results = {"loss": 2.0, "nats_per_byte": 1.0, "tokens": 8000, "row_losses": losses, "row_targets": [20] * 400}
    cells = _finished_row(Trained(Mock(label="model"), {0: RunFolder(Path("run"), RECIPE, [], results, [])}))
    assert cells is not None
    for cell, scale in zip(cells[2:4], (0.5, 1), strict=True):
        low, high = map(float, cell.detail.split(" to "))
        assert high - low == pytest.approx(2 * 1.96 * scale / 20, rel=0.1) and low < 2 * scale < high
    none = _finished_row(
        Trained(Mock(label="model"), {0: RunFolder(Path("run"), RECIPE, [], {**results, "row_losses": []}, [])})
    )
    assert none is not None and none[2].detail == "no interval"


def test_losses_that_are_not_finite_are_not_drawn() -> None:
    it = run(step(1, None), held_out(1, None), step(2, 3), held_out(2, 2))
    assert held_out_points(it, token_clock(it)) == [(2, 1200, 2)]
    assert training_points(it, token_clock(it)) == [(2, 1200, 3)]


def test_seeds_are_averaged_at_the_steps_that_all_have() -> None:
    """Seeds may have held-out losses at different steps, and lack those that were not finite."""
    often = run(held_out(0, 6), held_out(100, 4), held_out(150, None), held_out(200, 2), held_out(300, 1))
    seldom = run(held_out(0, 8), held_out(150, 5), held_out(200, 3))
    seeds = [held_out_points(it, token_clock(it)) for it in (often, seldom)]
    assert mean_over_seeds(seeds) == mean_over_seeds(seeds[::-1]) == [(0, 0, 7), (200, 200 * 600, 2.5)]
    assert mean_over_seeds(seeds[:1]) == seeds[0]
    assert mean_over_seeds([[Point(1, 1, 1)], [Point(2, 2, 2)]]) == mean_over_seeds([]) == []


def test_smoothed_losses_of_seeds_are_of_the_same_steps() -> None:
    """Although one seed was stopped in the middle of a group, and one had a non-finite step."""
    recipe = {**RECIPE, "steps": 200}
    lengths, gap = {0: 200, 1: 90}, 6
    runs = [
        RunFolder(
            Path("run"), recipe, [step(n, None if seed and n == gap else n) for n in range(1, length + 1)], None, []
        )
        for seed, length in lengths.items()
    ]
    whole, stopped = [training_points(it, token_clock(it)) for it in runs]
    assert [point.step for point in whole] == list(range(3, 200, 4))
    assert [point.step for point in stopped] == list(range(3, 88, 4))
    assert [point.loss for point in stopped[:3]] == pytest.approx([2.5, (5 + 7 + 8) / 3, 10.5])
    assert [point.step for point in mean_over_seeds([whole, stopped])] == [point.step for point in stopped]
