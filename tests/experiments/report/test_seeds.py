"""Means and intervals over seeds."""

from __future__ import annotations

from typing import Any

import pytest

from gecko.eval.results import over_seeds
from gecko.experiments.report.tables import error_bars, estimate


def score(value: float, low: float | None = None, high: float | None = None, n: int = 10) -> dict[str, Any]:
    interval = None if low is None else {"low": low, "high": high, "method": "Wilson, 95 %"}
    return {"name": "acc", "value": value, "n": n, "unit": "items", "interval": interval, "where": {}}


def test_one_seed_keeps_the_evaluations_interval() -> None:
    found = estimate([score(0.5, 0.2, 0.8)])
    assert (found.mean, found.interval and found.interval.low, found.n) == (0.5, 0.2, "10 items")
    assert estimate([score(0.5)]).interval is None


def test_several_seeds_have_students_interval() -> None:
    """t(0.975, 2) = 4.3027; values 1, 2, 3 have a standard error of 1/√3."""
    found = estimate([score(value, 0, 9) for value in (1.0, 2.0, 3.0)])
    assert found.mean == 2
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), 1e-4)
    assert found.interval.method == "Student's t over 3 seeds, 95 %"
    assert over_seeds([1.0]) is None


def test_shares_over_seeds_stay_shares() -> None:
    """Student's interval of 0.9, 1 and 1 alone would be 0.823 to 1.110."""
    found = estimate([score(value) for value in (0.9, 1.0, 1.0)], (0, 1)).interval
    assert found is not None and (found.low, found.high) == (pytest.approx(0.8232, abs=1e-4), 1)
    assert found.method == "Student's t over 3 seeds, 95 %, cut at 0 and 100 %"
    percent = estimate([score(value) for value in (0.0, 0.0, 10.0)], (0, 100)).interval
    assert percent is not None and (percent.low, percent.high) == (0, pytest.approx(17.68, abs=1e-2))


def test_equal_seeds_do_not_pretend_to_be_sure() -> None:
    found = estimate([score(0.0, 0.0, 0.3), score(0.0, 0.0, 0.2)])
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (0, 0.3)


def test_n_tells_of_differences() -> None:
    assert estimate([score(1, n=10), score(2, n=1000)]).n == "10 to 1,000 items"


def test_error_bars_reach_to_the_interval() -> None:
    assert error_bars([estimate([score(0.5, 0.2, 0.9)]), estimate([score(0.5)])]) == [[0.3, 0.0], [0.4, 0.0]]
