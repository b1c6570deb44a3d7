"""A whole comparison: the order of runs, reuse of finished runs, continuation after an interruption, and the files."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gecko.experiments.compare import ComparisonPlan, Outcome, Tuning
from gecko.train import Run

Call = Callable[..., tuple[Outcome, str]]
STEPS_TO_TUNE = 2


@pytest.fixture
def planned(recipes: list[str], tmp_path: Path) -> Callable[..., ComparisonPlan]:
    def make(
        name: str, seeds: tuple[int, ...] = (0, 1), changes: tuple[str, ...] = (), **options: Any
    ) -> ComparisonPlan:
        options.setdefault("tuning", Tuning((1e-4, 1e-2), STEPS_TO_TUNE))
        return ComparisonPlan.of(recipes, changes, tmp_path / name, seeds=seeds, **options)

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


def test_from_tuning_to_a_page(here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path) -> None:
    outcome, printed = call(planned("out"), jobs=2, page=True)
    assert (outcome.stopped, outcome.failed) == (None, False)
    assert here.started == [
        "whole/tuning-1e-4", "bare/tuning-1e-4", "whole/tuning-1e-2", "bare/tuning-1e-2",
        "whole/seed-0", "bare/seed-0", "whole/seed-1", "bare/seed-1",
    ]  # fmt: skip
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert record["format"] == "gecko-comparison-1"
    assert record["tuning"]["chosen"] == {"whole": 1e-2, "bare": 1e-2}
    trials = {(trial["recipe"], trial["learning_rate"]): trial["nats_per_byte"] for trial in record["tuning"]["trials"]}
    for recipe in ("whole", "bare"):
        assert trials[recipe, 1e-2] < trials[recipe, 1e-4]
    for run in record["runs"]:
        written = json.loads((tmp_path / "out" / run["folder"] / "results.json").read_text())
        recipe = Run.load(tmp_path / "out" / run["folder"] / "recipe.json")
        assert (run["nats_per_byte"], run["held_out_tokens"]) == (written["nats_per_byte"], written["tokens"])
        assert (recipe.seed, recipe.optimizer.learning_rate) == (run["seed"], run["learning_rate"])
        assert [point["step"] for point in run["curve"]] == [0, 3, 6, 8]
        assert (run["steps"], run["tokens"], run["seconds"] > 0) == (8, 8 * 48, True)
    assert record["unfinished"] == {}
    for text in (printed, (tmp_path / "out" / "comparison.html").read_text()):
        for recipe in record["recipes"]:
            assert f"{recipe['nats_per_byte']:.4f}" in text
            assert f"{recipe['parameters']:,}" in text
        assert f"{record['recipes'][1]['difference']:+.4f}" in text
        assert "Student&#39;s t over 2 seeds" in text or "Student's t over 2 seeds" in text
        assert "1e-2, is the highest of those tried" in text
    call(planned("out"))
    assert len(here.started) == 8, "what is finished must not be trained again"
    assert numbers(tmp_path / "out") == numbers_of(record, tmp_path)


def numbers_of(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "comparison.json").write_text(json.dumps(record))
    return numbers(folder)


def test_the_page_needs_nothing_else(here: Any, call: Call, planned: Callable[..., ComparisonPlan]) -> None:
    outcome, _ = call(planned("out<b>", seeds=(0,), tuning=None), page=True)
    assert outcome.page is not None
    page = outcome.page.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)[^\"'#>\s]", page.replace('xlink:href="#', ""))
    assert "<script" not in page and "@import" not in page
    assert page.count("<svg") == 2
    assert {path.name for path in outcome.page.parent.glob("*.png")} == {"loss-by-time.png", "loss-by-tokens.png"}


def test_stopped_and_called_again_is_uninterrupted(
    here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path
) -> None:
    """Stop in the tuning, between tuning and runs, and among the runs."""
    call(planned("whole"))
    here.started.clear()
    here.after = staticmethod(lambda: signal.raise_signal(signal.SIGTERM) if len(here.started) in (1, 4, 6) else None)
    for ended in (1, 4, 6):
        outcome, _ = call(planned("parts"))
        assert outcome.stopped == "SIGTERM" and not outcome.failed
        assert len(here.started) == ended
        assert len(outcome.comparison["runs"]) == max(0, ended - 4)
        assert list(outcome.comparison["unfinished"].values()) == ["waiting"] * {1: 3, 4: 0, 6: 2}[ended]
    call(planned("parts"))
    assert len(here.started) == len(set(here.started)) == 8
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_seeds_can_be_added(here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path) -> None:
    call(planned("out", seeds=(0,), tuning=None))
    call(planned("out", seeds=(0, 1), tuning=None))
    assert here.started == ["whole/seed-0", "bare/seed-0", "whole/seed-1", "bare/seed-1"]
    call(planned("once", tuning=None))
    assert numbers(tmp_path / "out") == numbers(tmp_path / "once")


def test_stopped_while_more_rates_are_tuned_it_keeps_what_it_found(
    here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path
) -> None:
    call(planned("out", seeds=(0,)))
    before = (tmp_path / "out" / "comparison.json").read_bytes()
    here.after = staticmethod(lambda: signal.raise_signal(signal.SIGINT))
    outcome, _ = call(planned("out", seeds=(0,), tuning=Tuning((1e-4, 1e-2, 1e-1), STEPS_TO_TUNE)))
    assert outcome.stopped == "SIGINT"
    assert list(outcome.comparison["unfinished"].values()) == ["waiting"]
    assert (tmp_path / "out" / "comparison.json").read_bytes() == before


def test_a_failing_run_does_not_stop_the_others(
    here: Any, call: Call, planned: Callable[..., ComparisonPlan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gecko.experiments.compare.plan
    import gecko.experiments.compare.runs

    def claim(one: Any) -> Path:
        path = gecko.experiments.compare.plan.claim(one)
        if one.label == "whole seed-0":
            (one.run.folder / "metrics.jsonl").mkdir(exist_ok=True)
        return path

    monkeypatch.setattr("gecko.experiments.compare.runs.claim", claim)
    outcome, printed = call(planned("out", tuning=None), page=True)
    assert outcome.failed and outcome.stopped is None
    runs = [(run["recipe"], run["seed"]) for run in outcome.comparison["runs"]]
    assert runs == [("bare", 0), ("whole", 1), ("bare", 1)]
    assert outcome.comparison["unfinished"] == {"whole seed-0": "failed"}
    assert "IsADirectoryError" in printed and "log.txt" in printed
    assert outcome.comparison["recipes"][0]["difference_seeds"] == [1]
    assert "whole seed-0: failed" in (tmp_path / "out" / "comparison.html").read_text()


def test_a_rate_that_diverges_is_not_taken(
    here: Any, call: Call, base: Run, planned: Callable[..., ComparisonPlan], recipes: list[str]
) -> None:
    """With a clip of 1e30 the first step at this rate makes weights non-finite."""
    for path in recipes:
        run = Run.load(path)
        optimizer = replace(run.optimizer, clip=1e30)
        replace(run, optimizer=optimizer, max_skips=1, skip=replace(run.skip, deviations=None)).save(path)
    outcome, printed = call(planned("out", seeds=(0,), tuning=Tuning((1e-2, 1e38), 6)))
    assert not outcome.failed
    assert outcome.comparison["tuning"]["chosen"] == {"whole": 1e-2, "bare": 1e-2}
    assert {trial["state"] for trial in outcome.comparison["tuning"]["trials"] if trial["learning_rate"] > 1} == {
        "diverged"
    }
    outcome, printed = call(planned("none", seeds=(0,), tuning=Tuning((1e37, 1e38), 6)), page=True)
    assert outcome.failed and outcome.page is None
    assert "whole: no learning rate was found" in printed


def test_what_is_not_of_this_comparison_is_left_alone(
    here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path
) -> None:
    call(planned("out", seeds=(0,), tuning=None))
    started = len(here.started)
    with pytest.raises(ValueError, match=r"whole/seed-0 must hold the run .* steps \(8 there, 9 now\)"):
        call(planned("out", seeds=(0,), tuning=None, changes=("steps=9",)))
    (tmp_path / "out" / "whole" / "seed-1").mkdir()
    (tmp_path / "out" / "whole" / "seed-1" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="seed-1 must be empty or hold a run of this comparison"):
        call(planned("out", tuning=None))
    with pytest.raises(ValueError, match="is that of a run"):
        call(planned("out/whole/seed-0", tuning=None))
    for content in ("{", "[]", '{"format": "other"}'):
        (tmp_path / "out" / "comparison.json").write_text(content)
        with pytest.raises(ValueError, match=r"comparison\.json must have been written by gecko compare"):
            call(planned("out", seeds=(0,), tuning=None))
    assert len(here.started) == started


@pytest.mark.parametrize("name", ["comparison.html", "loss-by-tokens.png", "loss-by-time.png"])
def test_a_page_that_is_not_gecko_s_is_left_alone(
    here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path, name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("<!doctype html><p>mine")
    with pytest.raises(ValueError, match=f"{name} must have been written by gecko compare.*Move it away"):
        call(planned("out", seeds=(0,), tuning=None), page=True)
    assert not here.started
    assert (tmp_path / "out" / name).read_text() == "<!doctype html><p>mine"


def test_damaged_files_of_a_run(here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path) -> None:
    call(planned("out", seeds=(0,), tuning=None))
    before, folder = numbers(tmp_path / "out"), tmp_path / "out" / "whole" / "seed-0"
    (folder / "results.json").unlink()
    call(planned("out", seeds=(0,), tuning=None))
    assert here.started[2:] == ["whole/seed-0"], "missing results are made again from the finished run"
    assert numbers(tmp_path / "out") == before
    for content in ('{"other": 1}', (folder / "results.json").read_text()[:40]):
        (folder / "results.json").write_text(content)
        with pytest.raises(ValueError, match=r"results\.json must be the results of a run"):
            call(planned("out", seeds=(0,), tuning=None))
    (folder / "planned.json").write_text("{")
    with pytest.raises(ValueError, match=r"planned\.json must hold a recipe as JSON"):
        call(planned("out", seeds=(0,), tuning=None))


def test_a_folder_may_be_moved(here: Any, call: Call, planned: Callable[..., ComparisonPlan], tmp_path: Path) -> None:
    """To another machine too, which the notes then name."""
    call(planned("out", seeds=(0,), tuning=None))
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    sessions = tmp_path / "elsewhere" / "whole" / "seed-0" / "sessions.jsonl"
    assert json.loads((tmp_path / "elsewhere" / "comparison.json").read_text())["notes"] == []
    session = json.loads(sessions.read_text())
    sessions.write_text(json.dumps({**session, "hardware": {**session["hardware"], "GPU": "a card"}}) + "\n")
    _, printed = call(planned("elsewhere", seeds=(0,), tuning=None))
    assert len(here.started) == 2
    note = "whole seed-0: trained on a card"
    assert json.loads((tmp_path / "elsewhere" / "comparison.json").read_text())["notes"] == [note] and note in printed
    sessions.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"sessions\.jsonl"):
        call(planned("elsewhere", seeds=(0,), tuning=None))


def test_no_jobs(call: Call, planned: Callable[..., ComparisonPlan]) -> None:
    with pytest.raises(ValueError, match="--jobs must be at least 1; got 0"):
        call(planned("out"), jobs=0)
