"""Means, intervals and choices equal the same numbers computed by hand; the display and the end of a run."""

from __future__ import annotations

import io
import json
import math
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

import gecko.experiments.compare.runs
from gecko.experiments.compare import ComparisonPlan, Tuning
from gecko.experiments.compare.plan import RESULTS, Planned
from gecko.experiments.compare.results import RunResult, summarise
from gecko.experiments.compare.runs import Pool, Progress, edge_notes, machine_notes, progress_of, trial_of, tuned_rates
from gecko.train import Run
from gecko.train.evaluate import Evaluation
from gecko.train.metrics import MetricsWriter, record_session

losses = st.floats(0.5, 5.0)
BYTES_PER_TOKEN = 3.0


def result(recipe: str, seed: int, rows: list[float], targets: list[int]) -> RunResult:
    loss = sum(rows) / sum(targets)
    evaluation = Evaluation(loss, loss / BYTES_PER_TOKEN, [], 1, sum(targets), rows, targets)
    values = {"recipe": recipe, "seed": seed, "parameters": 1000, "learning_rate": 1e-3, "seconds": 1.0 + seed,
              "tokens_per_second": 50.0}  # fmt: skip
    return RunResult(values, evaluation)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_over_seeds(data: st.DataObject, count: int) -> None:
    """Check mean, standard error, Student's t, and differences within seeds."""
    found = {name: data.draw(st.lists(losses, min_size=count, max_size=count, unique=True)) for name in ("a", "b")}
    order = data.draw(st.permutations([(name, seed) for name in ("a", "b") for seed in range(count)]))
    runs = [result(name, seed, [found[name][seed]], [1]) for name, seed in order]
    for summary in summarise(runs, "a"):
        values = np.array([found[summary["recipe"]][seed] for seed in summary["seeds"]]) / BYTES_PER_TOKEN
        assert sorted(summary["seeds"]) == list(range(count))
        check_interval(summary["nats_per_byte"], summary["interval"], values)
        assert summary["standard_error"] == pytest.approx(stats.sem(values))
        if summary["recipe"] == "a":
            assert (summary["difference"], summary["difference_interval"]) == (None, None)
        else:
            pairs = (np.array(found["b"]) - np.array(found["a"])) / BYTES_PER_TOKEN
            check_interval(summary["difference"], summary["difference_interval"], pairs)


def check_interval(mean: float, interval: dict[str, Any], values: np.ndarray) -> None:
    assert mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
    reach = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    expected = values.mean() - reach, values.mean() + reach
    assert (interval["low"], interval["high"]) == pytest.approx(expected, rel=1e-7, abs=1e-10)
    assert interval["method"] == f"Student's t over {len(values)} seeds, 95 %"


def test_one_seed_is_judged_by_held_out_rows() -> None:
    """The rows of two models differ far more than the models: only the paired interval distinguishes them."""
    random = np.random.default_rng(0)
    targets = random.integers(20, 30, 200).tolist()
    rows = (np.array(targets) * random.uniform(1, 3, 200)).tolist()
    better = (np.array(rows) - 0.02 * np.array(targets) * random.uniform(0, 2, 200)).tolist()
    first, other = summarise([result("a", 0, rows, targets), result("b", 0, better, targets)], "a")
    assert first["nats_per_byte"] == pytest.approx(sum(rows) / sum(targets) / BYTES_PER_TOKEN)
    own, difference = first["interval"], other["difference_interval"]
    assert own["low"] < first["nats_per_byte"] < own["high"] and own["low"] < other["nats_per_byte"]
    assert (first["standard_error"], own["method"]) == (None, "bootstrap over 200 held-out rows, 95 %")
    expected = (sum(better) - sum(rows)) / sum(targets) / BYTES_PER_TOKEN
    assert other["difference"] == pytest.approx(expected) and difference["low"] < expected < difference["high"] < 0
    spread = np.std((np.array(better) - rows) / targets) / math.sqrt(200) / BYTES_PER_TOKEN
    assert difference["high"] - difference["low"] == pytest.approx(2 * 1.96 * spread, rel=0.15)
    with pytest.raises(ValueError, match="on the same held-out rows"):
        summarise([result("a", 0, [1.0, 2.0], [3, 4]), result("b", 0, [1.0, 2.0], [4, 3])], "a")


def test_differences_are_of_seeds_that_both_have() -> None:
    runs = [result("a", seed, [1.0 + seed], [1]) for seed in (0, 1, 2)]
    runs += [result("b", seed, [1.5 + seed], [1]) for seed in (1, 2, 5)]
    _, other = summarise(runs, "a")
    assert (other["seeds"], other["difference_seeds"]) == ([1, 2, 5], [1, 2])
    assert other["difference"] == pytest.approx(0.5 / BYTES_PER_TOKEN)
    (alone,) = summarise([result("b", 5, [2.0], [1])], "a")
    assert (alone["difference"], alone["difference_seeds"]) == (None, [])


def test_seconds_are_those_of_training_steps(base: Run, tmp_path: Path) -> None:
    """Evaluations and checkpoints in between do not count; a resumed run contains every step once."""
    run = replace(base, output=str(tmp_path / "run"), steps=4)
    one = Planned("a", "seed-0", run)
    with MetricsWriter(run.folder, None) as metrics:
        metrics.write("validation", 0, {"nats_per_byte": 5.0, "loss": 5.0})
        for step, speed in enumerate((12.0, 48.0, 24.0, 96.0), start=1):
            skipped = {"skipped": "a spike"} if step == 2 else {}
            metrics.write("train", step, {"tokens_per_second": speed, "seconds": 100.0 * step, "loss": 1.0, **skipped})
            if step % 2 == 0:
                loss = 4.0 - step if step < 4 else float("nan")
                metrics.write("validation", step, {"nats_per_byte": loss, "loss": loss})
    assert RunResult.of(one, 7) is None
    (run.folder / RESULTS).write_text(json.dumps(vars(Evaluation(2.0, 1.0, [], 1, 9, [18.0], [9]))))
    result = RunResult.of(one, 7)
    assert result is not None and run.tokens_per_step == 48
    found = result.values
    assert [found[name] for name in ("seconds", "tokens_per_second", "tokens", "skipped_steps")] == [7.5, 36.0, 192, 1]
    assert [tuple(point.values()) for point in found["curve"]] == [(0, 0, 0.0, 5.0), (2, 96, 5.0, 2.0),
                                                                  (4, 192, 7.5, None)]  # fmt: skip
    with MetricsWriter(run.folder, 3):
        pass
    with pytest.raises(ValueError, match="one line for each of 4 steps; it has 3"):
        RunResult.of(one, 7)
    (run.folder / RESULTS).write_text(json.dumps(vars(Evaluation(math.nan, math.nan, [], 1, 9, [], []))))
    trial = trial_of(one, "finished")
    assert (trial["nats_per_byte"], trial["tokens"], trial["learning_rate"]) == (None, 9, 1e-2), "a loss is finite"


RATES = (1e-3, 2e-3, 4e-3, 8e-3)


@given(st.lists(st.one_of(st.none(), losses), min_size=4, max_size=4))
def test_the_lowest_held_out_loss_is_taken(found: list[float | None]) -> None:
    plan = ComparisonPlan(Path("x"), {"a": None, "b": None}, {}, (0,), Tuning(RATES, 5))  # type: ignore[dict-item]
    trials = [
        {"recipe": recipe, "learning_rate": rate, "state": "diverged" if loss is None else "finished",
         "nats_per_byte": loss} for rate, loss in zip(RATES, found, strict=True) for recipe in ("a", "b")
    ]  # fmt: skip
    rates = tuned_rates(plan, trials)
    finite = [loss for loss in found if loss is not None]
    assert set(rates) == ({"a", "b"} if finite else set())
    assert all(found[RATES.index(rate)] == min(finite) for rate in rates.values())
    notes = " ".join(edge_notes(plan, rates))
    for end, word in ((RATES[0], "lowest"), (RATES[-1], "highest")):
        assert (word in notes) == (end in rates.values())
    # A run that failed for another reason, or does not exist yet, makes the tuning unequal.
    for state in ("failed", "stopped", "waiting"):
        assert "b" not in tuned_rates(plan, [*trials[:-1], {**trials[-1], "state": state, "nats_per_byte": None}])


def test_runs_of_other_machines_are_named(base: Run, tmp_path: Path) -> None:
    here = {"Processor": "A, 2 cores, 1 used by PyTorch", "Memory": "1 GiB"}
    more_threads, card = {"Processor": "A, 2 cores, 2 used by PyTorch"}, {**here, "GPU": "C, 9 GiB"}
    planned = [Planned("a", f"seed-{seed}", replace(base, output=str(tmp_path / str(seed)))) for seed in range(4)]
    for one, machines in zip(planned, ([here], [here, more_threads], [here, card], []), strict=True):
        one.run.folder.mkdir()
        for session, machine in enumerate(machines):
            record_session(one.run.folder, session or None, 7, machine, "")
    assert machine_notes(planned, here) == ["a seed-2: trained on C, 9 GiB"]
    assert machine_notes(planned, card) == [f"a seed-{seed}: trained on A" for seed in range(3)]


def test_progress_is_read_from_the_end_of_the_metrics(base: Run, tmp_path: Path) -> None:
    run = replace(base, output=str(tmp_path))
    assert progress_of(run) == Progress()
    with MetricsWriter(tmp_path, None) as metrics:
        metrics.write("validation", 0, {"nats_per_byte": 5.0})
        assert progress_of(run) == Progress(held_out=5.0)
        for step in range(1, 2001):
            metrics.write("train", step, {"loss": 1.0 / step, "tokens_per_second": float(step), "note": "x" * 40})
        metrics.write("validation", 2000, {"nats_per_byte": 4.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2001}\n{"kind": "validation"}\n[1]\n{"kind": "train", "st')
    assert (tmp_path / "metrics.jsonl").stat().st_size > 1 << 17
    assert progress_of(run) == Progress(2000, 1 / 2000, 4.0, 1990.5)


def test_the_live_table(recipes: list[str], tmp_path: Path) -> None:
    plan = ComparisonPlan.of(recipes, ["steps=100"], tmp_path / "out")
    runs, states = plan.main_runs({"whole": 1e-2, "bare": 1e-2}), {}
    pool = Pool(runs, 1, states)
    with MetricsWriter(runs[0].run.folder, None) as metrics:
        for step in range(1, 21):
            metrics.write("train", step, {"loss": 2.5, "tokens_per_second": 48.0})
    states["whole seed-0"] = "training"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(pool.table("training"))
    shown = console.export_text()
    assert "0 of 2 finished, about 0:03:00 left" in shown  # 80 + 100 steps of one second each
    lines = {name: next(line for line in shown.splitlines() if line.strip().startswith(name)) for name in plan.recipes}
    assert all(part in lines["whole"] for part in ("seed-0", "20/100", "2.5000", "48", "0:01:20"))
    assert all(part in lines["bare"] for part in ("waiting", "0/100"))


def test_a_run_that_cannot_start_ends_with_its_message(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's module runs as a script, in this process, whose standard input is not watched."""
    planned = tmp_path / "planned.json"
    replace(base, output=str(tmp_path / "run"), data=replace(base.data, source=str(tmp_path / "nowhere"))).save(planned)
    monkeypatch.setattr(sys, "argv", ["runs.py", str(planned)])
    monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(gecko.experiments.compare.runs.__file__, run_name="__main__")
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert "error: a source of documents must be" in printed and "Traceback" not in printed
