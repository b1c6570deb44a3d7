"""The report is one page without external files, in which text is escaped."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gecko.pages.figures import chunk_borders
from gecko.runtime.process import code_name, code_version
from gecko.train import Run, SampleSettings
from gecko.train.evaluate import Evaluation
from gecko.train.finish import MARKS, RunFacts, loss_curve, step_curve, write_report
from gecko.train.metrics import MetricsWriter
from gecko.train.settings import flatten


@pytest.fixture
def page(small_run: Run) -> str:
    mixture = replace(small_run.data, sources=("prose=0.75", "code=0.25"))
    run = replace(small_run, data=mixture, sample=SampleSettings(prompt="<script>alert(1)</script>"))
    with MetricsWriter(run.folder, None) as metrics:
        metrics.write("validation", 0, {"loss": 5.5, "row_losses": [11.0, 12.0, 10.0]})
        for step in range(1, 13):
            loss = float("nan") if step == 3 else 5.0 / step
            skipped = {"skipped": "the output of x"} if step == 3 else {}
            speeds = {"seconds": step, "tokens_per_second": 48.0, "learning_rate": 0.01 / step, "grad_norm": loss}
            metrics.write("train", step, {"loss": loss, **speeds, **skipped})
        metrics.write("validation", 12, {"loss": float("nan")})
    evaluation = Evaluation(2.5, 1.25, [None, *([2.5] * 23)], 1, 100)
    facts = RunFacts(1234, evaluation, "red ", "</pre><img src=x>&", {"Processor": "<b>fast</b>"})
    return write_report(run, facts).read_text(encoding="utf-8")


def test_loads_nothing_from_elsewhere(page: str) -> None:
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)[^\"'#>\s]", re.sub(r"&\w+;|xlink:href=\"#", "", page)
                         .replace("src=x", ""))  # fmt: skip
    assert "<script" not in page
    assert "@import" not in page


def test_text_is_escaped(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;/pre&gt;&lt;img src=x&gt;&amp;" in page
    assert "&lt;b&gt;fast&lt;/b&gt;" in page


def test_holds_pictures_numbers_settings_and_commands(page: str) -> None:
    assert page.count("<svg") == 5
    assert code_name(code_version()) in page
    for text in ("1.2500 nats per byte", "of which skipped: 1", "optimizer.learning_rate", "gecko train", "1,234"):
        assert text in page


def test_settings_are_grouped_and_folded(page: str, small_run: Run) -> None:
    groups = re.findall(r"<details><summary>(\w+) <small>\((\d+)\)</small></summary>(.*?)</details>", page, re.DOTALL)
    assert [name for name, _, _ in groups][:4] == ["Run", "Model", "Data", "Optimizer"]
    assert all(content.count("<tr>") == int(count) for _, count, content in groups)
    shown = {name: value for *_, content in groups for name, value in re.findall("row.>(.*?)</th><td>(.*?)<", content)}
    expected = {name for name in flatten(small_run.to_dict()) if name != "overrides"}
    assert shown.keys() == expected
    assert shown["optimizer.learning_rate"] == "0.01"


@pytest.mark.parametrize("steps", [1, 2, 8, 300])
def test_axes_fit_the_run(steps: int) -> None:
    training = [{"step": step, "loss": 5 / step} for step in range(1, steps + 1)]
    axes = loss_curve(training, [{"step": 0, "loss": 6.0}, {"step": steps, "loss": 1.0}], MARKS).axes[0]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left == 0 and steps < right <= 1.1 * steps
    assert all(tick == int(tick) for tick in axes.get_xticks())
    shown = [loss for record in training if low <= (loss := record["loss"]) <= high]
    assert len(shown) == steps if steps < 50 else len(shown) >= 0.9 * steps
    assert (low <= 6.0 <= high) == (steps < 50)
    assert [text.get_text() for text in axes.texts] == [words for loss, words in MARKS.items() if low < loss < high]


def test_a_spike_of_the_gradient_norm_does_not_hide_the_rest() -> None:
    records = [{"step": step, "grad_norm": 1.0} for step in range(1, 100)]
    assert step_curve(records, "grad_norm", "norm").axes[0].get_yscale() == "linear"
    records[50]["grad_norm"] = 1e4
    assert step_curve(records, "grad_norm", "norm").axes[0].get_yscale() == "log"
    assert step_curve(records, "learning_rate", "rate") is None


def test_says_what_was_read(page: str) -> None:
    assert "12 steps on prose=0.75, code=0.25: held-out loss" in page
    assert "Held out: the same 3 rows each time" in page


@pytest.mark.parametrize(("length", "borders"), [(24, [8, 16]), (8, []), (25, [8, 16, 24])])
def test_chunk_borders(length: int, borders: list[int]) -> None:
    assert chunk_borders(length, 8) == borders


def test_many_chunk_borders_are_thinned() -> None:
    borders = chunk_borders(32_768, 64)
    assert 20 < len(borders) <= 40
    assert all(border % 64 == 0 for border in borders)
