"""Workers, and the display of their progress."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gecko.experiments.compare import ComparisonPlan
from gecko.experiments.compare.runs import Pool, Progress, progress_of
from gecko.train import Run
from gecko.train.metrics import MetricsWriter


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


def test_a_run_that_cannot_start_ends_with_its_message(base: Run, tmp_path: Path) -> None:
    planned = tmp_path / "planned.json"
    replace(base, output=str(tmp_path / "run"), data=replace(base.data, source=str(tmp_path / "nowhere"))).save(planned)
    command = [sys.executable, "-m", "gecko.experiments.compare.runs", str(planned)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        printed = worker.stderr.read()
    assert worker.returncode == 1
    assert "error: a source of documents must be" in printed and "Traceback" not in printed
