"""Runs in separate processes, interrupted and killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.interrupts import take_interrupts

from gecko.experiments.compare import ComparisonPlan
from gecko.experiments.compare.plan import LOCK
from gecko.experiments.compare.runs import LiveTable, Pool, Progress, progress_of
from gecko.io.files import locked
from gecko.train import Run, latest_checkpoint
from gecko.train.metrics import MetricsWriter, read_metrics

PATIENCE = 90.0
STEPS = 80


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def steps_of(folder: Path) -> int:
    return sum(record["kind"] == "train" for record in read_metrics(folder / "metrics.jsonl"))


def free(folder: Path) -> bool:
    try:
        with locked(folder / LOCK, wait=False):
            return True
    except ValueError:
        return False


def test_killed_and_called_again_is_uninterrupted(
    recipes: list[str], tmp_path: Path, here: Any, call: Callable[..., Any]
) -> None:
    """First Ctrl-C, then a kill: a worker whose parent is gone saves and ends."""
    for path in recipes:
        replace(Run.load(path), steps=STEPS).save(path)
    first, steps = tmp_path / "parts" / "whole" / "seed-0", 0
    for sent in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "-m", "gecko", "compare", *recipes, "--out", str(tmp_path / "parts")],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=take_interrupts, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            until(lambda: steps_of(first) > steps + 3, "the first run must be trained")  # noqa: B023
            process.send_signal(sent)
            printed, _ = process.communicate(timeout=PATIENCE)
        until(lambda: free(first), "the worker must end with its parent")
        steps = steps_of(first)
        assert steps < STEPS
        assert process.returncode == (0 if sent == signal.SIGINT else -signal.SIGKILL)
        assert ("SIGINT: saved. Continue with:\n  gecko compare" in printed) == (sent == signal.SIGINT)
        saved = latest_checkpoint(first / "checkpoints")
        assert saved is not None and saved.name == f"step-{steps:08d}"
    call(ComparisonPlan.of(recipes, [], tmp_path / "parts"))
    assert here.started == ["whole/seed-0", "bare/seed-0"]
    call(ComparisonPlan.of(recipes, [], tmp_path / "whole"))
    parts, whole = (json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("parts", "whole"))
    for one, other in zip(parts["runs"], whole["runs"], strict=True):
        assert [point["nats_per_byte"] for point in one["curve"]] == [
            point["nats_per_byte"] for point in other["curve"]
        ]
        assert one["nats_per_byte"] == other["nats_per_byte"]
    assert parts["recipes"][1]["difference"] == whole["recipes"][1]["difference"]


def test_one_comparison_at_a_time(recipes: list[str], tmp_path: Path, call: Callable[..., Any]) -> None:
    with (
        locked(tmp_path / "out" / LOCK, wait=False),
        pytest.raises(ValueError, match=r"one process at a time .*/out; another one is at work"),
    ):
        call(ComparisonPlan.of(recipes, [], tmp_path / "out"))


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
        file.write('{"kind": "train", "step": 2001}\n{"kind": "validation"}\n{"kind": "train", "st')
    assert (tmp_path / "metrics.jsonl").stat().st_size > 1 << 17
    assert progress_of(run) == Progress(2000, 1 / 2000, 4.0, 1990.5)


def test_the_live_table(recipes: list[str], tmp_path: Path) -> None:
    plan = ComparisonPlan.of(recipes, ["steps=100"], tmp_path / "out")
    with Pool(plan.main_runs({"whole": 1e-2, "bare": 1e-2}), 1) as pool:
        first = pool.planned[0]
        with MetricsWriter(first.run.folder, None) as metrics:
            for step in range(1, 21):
                metrics.write("train", step, {"loss": 2.5, "tokens_per_second": 48.0})
        pool.states[first.label] = "training"
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(LiveTable(console, pool, "training")._table())
    shown = console.export_text()
    assert "0 of 2 finished, about 0:03:00 left" in shown  # 80 + 100 steps of one second each
    lines = {name: next(line for line in shown.splitlines() if line.strip().startswith(name)) for name in plan.recipes}
    assert all(part in lines["whole"] for part in ("seed-0", "20/100", "2.5000", "48", "0:01:20"))
    assert all(part in lines["bare"] for part in ("waiting", "0/100"))


def test_a_run_that_cannot_start_ends_with_its_message(recipes: list[str], tmp_path: Path) -> None:
    run = Run.load(recipes[0])
    planned = tmp_path / "planned.json"
    replace(run, output=str(tmp_path / "run"), data=replace(run.data, source=str(tmp_path / "nowhere"))).save(planned)
    with subprocess.Popen(
        [sys.executable, "-m", "gecko.experiments.compare.runs", str(planned)],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stderr is not None
        printed = worker.stderr.read()
    assert worker.returncode == 1
    assert "error: a source of documents must be" in printed and "Traceback" not in printed
