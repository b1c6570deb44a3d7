"""The format of results, and intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gecko.eval import Results, Score
from gecko.eval.results import Interval, bootstrap, bootstrap_mean, share, share_by_row, wilson
from gecko.runtime.process import code_version


def test_wilson_is_the_published_one() -> None:
    """0 of 10 and 8 of 10, as in tables of the score interval."""
    for successes, low, high in ((0, 0.0, 0.2775), (8, 0.4902, 0.9433)):
        interval = wilson(successes, 10)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4) and "Wilson" in interval.method


def test_bootstrap_covers_and_repeats_and_keeps_units_together() -> None:
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap_mean(values, "items", 1)
    assert interval is not None
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert interval == bootstrap_mean(values, "items", 1) != bootstrap_mean(values, "items", 2)
    assert interval.method == "bootstrap over 400 items, 95 %" and interval.map(math.exp).low == math.exp(interval.low)
    same = bootstrap([values, values], lambda a, b, axis=-1: (a - b).mean(axis), "items", 0)
    assert same is not None and (same.low, same.high) == (0, 0)
    assert bootstrap_mean(values[:1], "items", 0) is None


def test_intervals_are_over_rows_whose_answers_depend_on_each_other() -> None:
    """In a row all answers are right with a probability of its own: Wilson's interval of the answers is too narrow."""
    generator, covered = np.random.default_rng(0), np.zeros(2)
    for _ in range(100):
        rows = [[bool(hit) for hit in generator.random(50) < generator.choice([0.2, 0.8])] for _ in range(40)]
        flat = [hit for row in rows for hit in row]
        for method, (_, interval) in enumerate((share_by_row(rows), share(flat))):
            covered[method] += interval is not None and interval.low <= 0.5 <= interval.high
    assert covered[0] > 88 and covered[1] < 60
    assert share_by_row([[True], [False], [True]]) == share([True, False, True])
    alike = share_by_row([[True] * 50] * 20)[1]
    assert alike is not None and alike.low == pytest.approx(wilson(20, 20).low) and "over rows" in alike.method
    assert share_by_row([[True, False]])[1] is None


def test_a_saved_result_says_how_to_get_it_again(tmp_path: Path) -> None:
    scores = [Score("acc", 0.25, 8, "items", Interval(0.1, 0.5, "Wilson, 95 %"), {"task": "x", "context": 1024}),
              Score("p", 1e-9, 8, "items", None, {"task": "x"})]  # fmt: skip
    results = Results("test", scores, {"limit": 8}, 3, ["something was skipped"], {"curve": [1, 2]})
    results.save(tmp_path / "new" / "results.json", {"name": "m"}, "gecko eval test", {"Processor": "cpu"})
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    said = {"model": {"name": "m"}, "command": "gecko eval test", "seed": 3, "notes": results.notes,
            "hardware": {"Processor": "cpu"}, "details": {"curve": [1, 2]}, **code_version()}  # fmt: skip
    assert saved == saved | said
    first = saved["scores"][0]
    assert (first["value"], first["n"], first["unit"]) == (0.25, 8, "items")
    assert first["interval"] == {"low": 0.1, "high": 0.5, "method": "Wilson, 95 %"}
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results.table("title"))
    shown = console.export_text()
    for part in ("0.2500", "0.1000 .. 0.5000", "8 items", "1.000e-09", "none", "1,024"):
        assert part in shown
    assert results.methods() == "Wilson, 95 %"


@pytest.mark.parametrize(
    ("value", "n", "message"),
    [(math.nan, 1, r"must be finite; acc \(task x\) is"), (math.inf, 1, "must be finite"), (0.0, 0, "of none")],
)
def test_a_number_that_is_none_or_of_nothing_is_refused(value: float, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Score("acc", value, n, "items", None, {"task": "x"})
