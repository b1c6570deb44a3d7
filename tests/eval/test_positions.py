"""Loss by position, and the test of chunk borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gecko.eval import GeckoModel, Results
from gecko.eval.perplexity import PositionGrid, positions

TEXT = np.random.default_rng(0).integers(97, 123, 4000, dtype=np.uint8).tobytes()
GRID = PositionGrid(length=64, chunk=8, bin=2, first=2)


def value(results: Results, name: str) -> float:
    return next(score.value for score in results.scores if score.name == name)


def test_numbers_are_those_of_all_losses_at_once(model: GeckoModel, write: Any) -> None:
    results = positions(model, write(TEXT[:1000]), GRID)
    rows = torch.tensor(list(TEXT[:960])).view(-1, 64)
    losses = model.model.token_losses(torch.cat([torch.full((15, 1), 256), rows[:, :-1]], dim=1), rows)[0].numpy()
    chunks = losses[:, 8:].reshape(-1, 8)
    curves = {"by_position": losses.reshape(15, 32, 2).mean(2), "in_chunk": chunks.reshape(-1, 4, 2).mean(2)}
    for name, bins in curves.items():
        curve = results.details[name]
        assert [point["position"] for point in curve] == list(range(0, 2 * len(curve), 2))
        np.testing.assert_allclose([point["mean"] for point in curve], bins.mean(0))
        np.testing.assert_allclose([point["standard_error"] for point in curve], stats.sem(bins))
    difference = chunks[:, :2].mean(1) - chunks[:, 2:].mean(1)
    test = stats.ttest_1samp(difference, 0)
    found = [value(results, name) for name in ("border minus rest", "t", "p, two-sided")]
    np.testing.assert_allclose(found, [difference.mean(), test.statistic, test.pvalue])
    interval = next(score.interval for score in results.scores if score.name == "border minus rest")
    assert interval is not None
    np.testing.assert_allclose([interval.low, interval.high], test.confidence_interval())
    assert {score.n for score in results.scores} == {15 * 7}


@pytest.mark.parametrize("rise", [0.0, 0.2])
def test_a_rise_at_borders_is_found_and_only_where_there_is_one(rule_model: Any, write: Any, rise: float) -> None:
    results = positions(rule_model(lambda position, token: token / 26 + rise * (position % 8 < 2)), write(TEXT), GRID)
    p = value(results, "p, two-sided")
    assert p < 1e-3 if rise else p > 0.05
    assert value(results, "border minus rest") == pytest.approx(rise, abs=0.1)
    phases = [point["mean"] for point in results.details["in_chunk"]]
    assert len(phases) == 4 and (phases[0] - np.mean(phases[1:]) > 0.1) == bool(rise)


def test_the_first_chunk_is_not_a_border(rule_model: Any, write: Any) -> None:
    results = positions(rule_model(lambda position, token: 100.0 if position < 8 else 1.0), write(TEXT), GRID)
    assert value(results, "nats after a border") == pytest.approx(1)
    assert results.details["by_position"][0]["mean"] == pytest.approx(100)
    assert not any(score.name == "t" for score in results.scores), "all alike: nothing to test"


def test_what_is_missing_is_said(model: GeckoModel, write: Any) -> None:
    one = positions(model, write(TEXT[:100], TEXT[:20]), GRID)
    assert any("shorter than a segment" in note for note in one.notes)
    assert any("no standard error" in note for note in one.notes)
    assert all(point["standard_error"] is None for point in one.details["by_position"])
    with pytest.raises(ValueError, match="at least as long as a segment, 64 tokens; none of 1"):
        positions(model, write(TEXT[:63]), GRID)
    assert positions(model, write(TEXT[:150], TEXT), GRID, segments=3).settings["segments"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"length": 8}, "two whole chunks"), ({"length": 60}, "two whole chunks"), ({"bin": 3}, "must divide a chunk"),
     ({"first": 8}, "1 to 7"), ({"chunk": 1}, "at least 2 tokens")],
)  # fmt: skip
def test_grids_that_show_no_border_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositionGrid(**({"length": 64, "chunk": 8, "bin": 2, "first": 2} | changes))
