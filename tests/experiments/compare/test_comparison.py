"""A whole comparison: the order of runs, reuse of finished runs, continuation after an interruption, and the files.

Runs train in this process. Most tests begin with a copy of one finished comparison.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.interrupts import take_interrupts

import gecko.experiments.compare.runs
from gecko.experiments.compare import ComparisonPlan, Outcome, Tuning, compare
from gecko.experiments.compare.plan import LOCK
from gecko.experiments.compare.runs import DIVERGED
from gecko.io.files import locked
from gecko.train import NonFiniteError, Run, latest_checkpoint, train
from gecko.train.metrics import read_metrics

PATIENCE = 90.0
TUNING = Tuning((1e-4, 1e-2), 2)
MAIN = ["whole/seed-0", "bare/seed-0", "whole/seed-1", "bare/seed-1"]


class TrainsHere:
    """Replaces ``subprocess.Popen``: does a worker's job in its constructor."""

    started: list[str]
    """Folders of the runs in the order of their start."""
    after: Callable[[], None]
    """Called when a run has ended."""

    def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
        path, self.stdin, self.returncode = Path(command[-1]), io.BytesIO(), 0
        self.started.append(f"{path.parent.parent.name}/{path.parent.name}")
        try:
            train(Run.load(path), resume=True)
        except NonFiniteError:
            self.returncode = DIVERGED
        except Exception:
            stdout.write(traceback.format_exc().encode())
            self.returncode = 1
        type(self).after()

    def poll(self) -> int:
        return self.returncode

    wait = terminate = kill = poll


@contextmanager
def training_here() -> Iterator[type[TrainsHere]]:
    """Train runs in this process, without their reports."""
    here = type("Here", (TrainsHere,), {"started": [], "after": staticmethod(lambda: None)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gecko.experiments.compare.runs.Popen", here)
        patch.setattr("gecko.train.finish.write_report", lambda *_: None)
        patch.setattr("gecko.experiments.compare.runs._POLL_SECONDS", 0)
        yield here


@pytest.fixture
def here() -> Iterator[Any]:
    with training_here() as here:
        yield here


def call(plan: ComparisonPlan, jobs: int = 1, *, page: bool = False) -> tuple[Outcome, str]:
    """Run ``compare``, and return what it prints too. The page is slow, so it is optional."""
    console = Console(file=io.StringIO(), width=200, highlight=False, markup=False)
    with pytest.MonkeyPatch.context() as patch:
        if not page:
            patch.setattr("gecko.experiments.compare.results.write_page", lambda *_: None)
        outcome = compare(plan, jobs=jobs, command="gecko compare …", console=console)
    return outcome, console.file.getvalue()  # type: ignore[attr-defined]


Finished = tuple[Path, Outcome, str, list[str]]


@pytest.fixture(scope="session")
def finished(recipes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return the folder of a tuned comparison, its outcome, what it printed, and the runs in the order of start."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    with training_here() as here:
        plan = ComparisonPlan.of(recipes, [], folder, seeds=(0, 1), tuning=TUNING)
        return folder, *call(plan, jobs=2, page=True), list(here.started)


@pytest.fixture
def planned(recipes: list[str], tmp_path: Path, finished: Finished) -> Callable[..., ComparisonPlan]:
    """Return a function that plans a comparison in a folder, of one seed without tuning if nothing else is given; with
    ``copied`` the folder begins as a copy of the finished comparison."""

    def make(name: str = "out", changes: tuple[str, ...] = (), copied: bool = True, **options: Any) -> ComparisonPlan:
        if copied and not (tmp_path / name).exists():
            shutil.copytree(finished[0], tmp_path / name)
        return ComparisonPlan.of(recipes, changes, tmp_path / name, **options)

    return make


def numbers(folder: Path) -> dict[str, Any]:
    """Return the results that do not depend on folder and speed."""
    record = json.loads((folder / "comparison.json").read_text())
    del record["hardware"]
    for values in (*record["runs"], *record["recipes"]):
        del values["seconds"], values["tokens_per_second"]
        for point in values.get("curve", []):
            del point["seconds"]
    return record


def test_from_tuning_to_a_page(here: Any, planned: Any, finished: Finished, tmp_path: Path) -> None:
    folder, outcome, printed, started = finished
    assert (outcome.stopped, outcome.failed) == (None, False)
    assert started[:4] == ["whole/tuning-1e-4", "bare/tuning-1e-4", "whole/tuning-1e-2", "bare/tuning-1e-2"]
    assert started[4:] == MAIN
    record = json.loads((folder / "comparison.json").read_text())
    assert record["format"] == "gecko-comparison-1" and record["unfinished"] == {}
    assert record["tuning"]["chosen"] == {"whole": 1e-2, "bare": 1e-2}
    trials = {(trial["recipe"], trial["learning_rate"]): trial["nats_per_byte"] for trial in record["tuning"]["trials"]}
    assert all(trials[recipe, 1e-2] < trials[recipe, 1e-4] for recipe in ("whole", "bare"))
    for run in record["runs"]:
        written = json.loads((folder / run["folder"] / "results.json").read_text())
        recipe = Run.load(folder / run["folder"] / "recipe.json")
        assert (run["nats_per_byte"], run["held_out_tokens"]) == (written["nats_per_byte"], written["tokens"])
        assert (recipe.seed, recipe.optimizer.learning_rate) == (run["seed"], run["learning_rate"])
        assert [point["step"] for point in run["curve"]] == [0, 3, 6, 8]
        assert (run["steps"], run["tokens"], run["seconds"] > 0) == (8, 8 * 48, True)
    page = (folder / "comparison.html").read_text()
    for text in (printed, page):
        for recipe in record["recipes"]:
            assert f"{recipe['nats_per_byte']:.4f}" in text and f"{recipe['parameters']:,}" in text
        assert f"{record['recipes'][1]['difference']:+.4f}" in text
        assert "Student&#39;s t over 2 seeds" in text or "Student's t over 2 seeds" in text
        assert "1e-2, is the highest of those tried" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)[^\"'#>\s]", page.replace('xlink:href="#', ""))
    assert "<script" not in page and "@import" not in page and page.count("<svg") == 2
    assert {path.name for path in folder.glob("*.png")} == {"loss-by-time.png", "loss-by-tokens.png"}
    call(planned(seeds=(0, 1), tuning=TUNING))
    assert here.started == [], "what is finished must not be trained again"
    assert numbers(tmp_path / "out") == numbers(folder)


def test_stopped_and_called_again_is_uninterrupted(here: Any, planned: Any, finished: Finished, tmp_path: Path) -> None:
    """Stop in the tuning, between tuning and runs, and among the runs."""
    here.after = staticmethod(lambda: signal.raise_signal(signal.SIGTERM) if len(here.started) in (1, 4, 6) else None)
    for ended in (1, 4, 6):
        outcome, _ = call(planned("parts", copied=False, seeds=(0, 1), tuning=TUNING))
        assert outcome.stopped == "SIGTERM" and not outcome.failed
        assert len(here.started) == ended
        assert len(outcome.comparison["runs"]) == max(0, ended - 4)
        assert list(outcome.comparison["unfinished"].values()) == ["waiting"] * {1: 3, 4: 0, 6: 2}[ended]
    call(planned("parts", seeds=(0, 1), tuning=TUNING))
    assert len(here.started) == len(set(here.started)) == 8
    assert numbers(tmp_path / "parts") == numbers(finished[0])


def test_seeds_and_rates_can_be_added(here: Any, planned: Any, finished: Finished, tmp_path: Path) -> None:
    """Stopped while more rates are tuned, a comparison keeps what it found."""
    plan = planned()
    for name in ("whole", "bare"):
        shutil.rmtree(tmp_path / "out" / name / "seed-1")
    call(plan)
    assert [run["seed"] for run in numbers(tmp_path / "out")["runs"]] == [0, 0] and here.started == []
    call(planned(seeds=(0, 1)))
    assert here.started == MAIN[2:]
    assert all(numbers(tmp_path / "out")[key] == numbers(finished[0])[key] for key in ("runs", "recipes"))
    before = (tmp_path / "out" / "comparison.json").read_bytes()
    here.after = staticmethod(lambda: signal.raise_signal(signal.SIGINT))
    outcome, _ = call(planned(tuning=Tuning((1e-4, 1e-2, 1e-1), 2)))
    assert outcome.stopped == "SIGINT"
    assert list(outcome.comparison["unfinished"].values()) == ["waiting"]
    assert (tmp_path / "out" / "comparison.json").read_bytes() == before


def test_a_failing_run_does_not_stop_the_others(here: Any, planned: Any, monkeypatch: Any, tmp_path: Path) -> None:
    claimed = gecko.experiments.compare.runs.claim

    def claim(one: Any) -> Path:
        path = claimed(one)
        if one.label == "whole seed-0":
            (one.run.folder / "metrics.jsonl").mkdir(exist_ok=True)
        return path

    monkeypatch.setattr("gecko.experiments.compare.runs.claim", claim)
    plan = planned(seeds=(0, 1))
    for name in ("whole/seed-0", "bare/seed-0"):
        shutil.rmtree(tmp_path / "out" / name)
    outcome, printed = call(plan, page=True)
    assert outcome.failed and outcome.stopped is None and here.started == MAIN[:2]
    runs = [(run["recipe"], run["seed"]) for run in outcome.comparison["runs"]]
    assert runs == [("bare", 0), ("whole", 1), ("bare", 1)]
    assert outcome.comparison["unfinished"] == {"whole seed-0": "failed"}
    assert "must be a file of JSON Lines" in printed and "log.txt" in printed
    assert outcome.comparison["recipes"][0]["difference_seeds"] == [1]
    assert "whole seed-0: failed" in (tmp_path / "out" / "comparison.html").read_text()


def test_a_rate_that_diverges_is_not_taken(here: Any, recipes: list[str], tmp_path: Path) -> None:
    """With a clip of 1e30 the first step at this rate makes weights non-finite."""
    changes = ["optimizer.clip=1e30", "max_skips=1", "skip.deviations=none", "steps=4"]
    for chosen, rates in (({"whole": 1e-2, "bare": 1e-2}, (1e-2, 1e38)), ({}, (1e37, 1e38))):
        plan = ComparisonPlan.of(recipes, changes, tmp_path / f"out{len(chosen)}", tuning=Tuning(rates, 4))
        outcome, printed = call(plan, page=not chosen)
        tuning = outcome.comparison["tuning"]
        assert outcome.failed is not bool(chosen) and outcome.page is None and tuning["chosen"] == chosen
        assert {trial["state"] for trial in tuning["trials"] if trial["learning_rate"] > 1} == {"diverged"}
    assert "whole: no learning rate was found" in printed


def test_runs_of_texts_that_have_changed_are_not_compared(here: Any, planned: Any, tmp_path: Path) -> None:
    plan = planned(seeds=(0, 1))
    sessions = tmp_path / "out" / "bare" / "seed-1" / "sessions.jsonl"
    sessions.write_text(re.sub('"data": "[^"]*"', '"data": "other"', sessions.read_text()))
    with pytest.raises(ValueError, match=r"must read the same texts; those of .* and .*bare/seed-1 differ"):
        call(plan)


def test_what_is_not_of_this_comparison_is_left_alone(here: Any, planned: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned()
    shutil.rmtree(out / "whole" / "seed-1")
    (out / "whole" / "seed-1").mkdir()
    (out / "whole" / "seed-1" / "notes.txt").write_text("mine")
    refused = [
        ({"changes": ("steps=9",)}, r"whole/seed-0 must hold the run .* steps \(8 there, 9 now\)"),
        ({"seeds": (0, 1)}, "seed-1 must be empty or hold a run of this comparison"),
        ({"name": "out/whole/seed-0"}, "is that of a run"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            call(planned(**options))
    for content in ("{", "[]", '{"format": "other"}'):
        (out / "comparison.json").write_text(content)
        with pytest.raises(ValueError, match=r"comparison\.json must have been written by gecko compare"):
            call(planned())
    for name in ("comparison.html", "loss-by-tokens.png", "loss-by-time.png"):
        plan = planned(f"of {name}", copied=False)
        plan.folder.mkdir()
        (plan.folder / name).write_text("<!doctype html><p>mine")
        with pytest.raises(ValueError, match=f"{name} must have been written by gecko compare.*Move it away"):
            call(plan, page=True)
        assert (plan.folder / name).read_text() == "<!doctype html><p>mine"
    with (
        locked(tmp_path / "busy" / LOCK, wait=False),
        pytest.raises(ValueError, match=r"one process at a time .*/busy; another one is at work"),
    ):
        call(planned("busy", copied=False))
    with pytest.raises(ValueError, match="--jobs must be at least 1; got 0"):
        call(planned(), jobs=0)
    assert not here.started


def test_damaged_files_of_a_run(here: Any, planned: Any, tmp_path: Path) -> None:
    call(planned())
    before, folder = numbers(tmp_path / "out"), tmp_path / "out" / "whole" / "seed-0"
    (folder / "results.json").unlink()
    call(planned())
    assert here.started == ["whole/seed-0"], "missing results are made again from the finished run"
    assert numbers(tmp_path / "out") == before
    for content in ('{"other": 1}', (folder / "results.json").read_text()[:40]):
        (folder / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"results\.json must be the results of a run"):
            call(planned())
    (folder / "planned.json").write_text("{")
    with pytest.raises(ValueError, match=r"planned\.json must hold a recipe as JSON"):
        call(planned())


def test_a_folder_may_be_moved(here: Any, planned: Any, tmp_path: Path) -> None:
    """To another machine too, which the notes then name."""
    sessions = tmp_path / "out<b>" / "whole" / "seed-0" / "sessions.jsonl"
    outcome, _ = call(planned("out<b>"))
    assert outcome.comparison["notes"] == []
    session = json.loads(sessions.read_text())
    sessions.write_text(json.dumps({**session, "hardware": {**session["hardware"], "GPU": "a card"}}) + "\n")
    outcome, printed = call(planned("out<b>"))
    note = "whole seed-0: trained on a card"
    assert outcome.comparison["notes"] == [note] and note in printed and here.started == []
    sessions.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"sessions\.jsonl"):
        call(planned("out<b>"))


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_killed_and_called_again_is_uninterrupted(here: Any, recipes: list[str], tmp_path: Path) -> None:
    """First Ctrl-C, then the end of a worker's parent, which closes its standard input: it saves and ends."""
    changes, out = ["steps=80", "evaluation.every=20", "checkpoint.every=3"], tmp_path / "parts"
    first, steps = out / "whole" / "seed-0", 0

    def trained() -> int:
        return sum(record["kind"] == "train" for record in read_metrics(first / "metrics.jsonl"))

    for command in (
        ["gecko", "compare", *recipes, *changes, "--out", str(out)],
        ["gecko.experiments.compare.runs", str(first / "planned.json")],
    ):
        with subprocess.Popen(
            [sys.executable, "-m", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=take_interrupts,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            until(lambda: trained() > steps + 3, "the first run must be trained")  # noqa: B023
            if command[0] == "gecko":
                process.send_signal(signal.SIGINT)
                printed, _ = process.communicate(timeout=PATIENCE)
                assert "SIGINT: saved. Continue with:\n  gecko compare" in printed
        saved, steps = latest_checkpoint(first / "checkpoints"), trained()
        assert steps < 80 and saved is not None and saved.name == f"step-{steps:08d}"
    call(ComparisonPlan.of(recipes, changes, out))
    assert here.started == MAIN[:2]
    alone = Run.load(first / "planned.json").with_settings(f"output={tmp_path / 'alone'}", "checkpoint.every=80")
    train(alone)
    parts, whole = ((folder / "results.json").read_text() for folder in (first, alone.folder))
    assert parts == whole
    parts, whole = (read_metrics(folder / "metrics.jsonl") for folder in (first, alone.folder))
    assert [(one["step"], one["loss"]) for one in parts] == [(one["step"], one["loss"]) for one in whole]
