"""An interrupted run equals the uninterrupted one bit for bit, and may be extended."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.whole_runs import curve, die, everything, same_end, stop_after

from gecko.train import CheckpointSettings, Run, TrainResult, train


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], TrainResult]:
    """Return a function that trains the same run in another folder, once, and returns its result."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    results: list[TrainResult] = []

    def result(run: Run) -> TrainResult:
        if not results:
            results.append(train(replace(run, output=str(folder / "run"))))
        return results[0]

    return result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("step", [1, 4, 5, 11])
def test_stopped_and_resumed_is_uninterrupted(
    small_run: Run,
    uninterrupted: Callable[[Run], TrainResult],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    number: signal.Signals,
) -> None:
    whole = uninterrupted(small_run)
    stop_after(step, monkeypatch, lambda: signal.raise_signal(number))
    stopped = train(small_run)
    assert (stopped.step, stopped.finished) == (step, False)
    resumed = train(small_run, resume=True)
    assert resumed.finished
    assert same_end(whole, resumed)
    assert curve(resumed.run) == curve(whole.run)
    assert resumed.evaluation == whole.evaluation


@pytest.mark.parametrize("step", [2, 7, 12])
def test_killed_and_resumed_is_uninterrupted(
    small_run: Run, uninterrupted: Callable[[Run], TrainResult], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """An error inside a step replaces a kill: nothing is saved, and the steps are repeated."""
    whole = uninterrupted(small_run)
    stop_after(step, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    with (small_run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "st')
    resumed = train(small_run, resume=True)
    assert same_end(whole, resumed)
    assert curve(resumed.run) == curve(whole.run)


_CHILD = """
import json, sys
from gecko.train import CheckpointSettings, Run, train
result = train(Run.load(sys.argv[1]))
assert not result.finished
"""


def test_sigterm_from_outside_exits_clean_and_says_how_to_resume(small_run: Run, tmp_path: Path) -> None:
    long_run = replace(small_run, steps=100_000, checkpoint=CheckpointSettings(every=1000))
    long_run.save(tmp_path / "run.json")
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _CHILD, str(tmp_path / "run.json")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = ""
    while "step 5 of" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "SIGTERM: saved after step" in rest
    assert "--resume" in rest
    records = [record for record in curve(long_run) if record["kind"] == "train"]
    longer = replace(long_run, steps=len(records) + 3)
    assert train(longer, resume=True).step == len(records) + 3


def test_resuming_a_finished_run_trains_no_more(small_run: Run) -> None:
    first = train(small_run)
    before = curve(small_run)
    again = train(small_run, resume=True)
    assert (again.step, again.evaluation, curve(small_run)) == (12, first.evaluation, before)


def test_fewer_steps_than_are_done_are_refused(small_run: Run) -> None:
    train(replace(small_run, steps=4))
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match="steps must be at least the 4 that are done; got 3"):
        train(replace(small_run, steps=3), resume=True)
    assert everything(small_run.folder) == before


def test_a_longer_run_does_not_keep_the_results_of_the_shorter_one(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped longer run would otherwise look finished, with the loss after fewer steps."""
    train(replace(small_run, steps=4))
    results = [small_run.folder / name for name in ("results.json", "report.html", "sample.txt")]
    assert all(path.is_file() for path in results)
    stop_after(6, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert not train(small_run, resume=True).finished
    assert not any(path.exists() for path in results)
    assert train(small_run, resume=True).finished
    assert all(path.is_file() for path in results)


def test_a_damaged_checkpoint_is_passed_over(small_run: Run, uninterrupted: Callable[[Run], TrainResult]) -> None:
    whole = uninterrupted(small_run)
    shutil.copytree(whole.run.folder, small_run.folder)
    weights = small_run.folder / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.warns(UserWarning, match=r"step-00000012.*model\.safetensors"):
        resumed = train(small_run, resume=True)
    assert same_end(whole, resumed)


def test_a_damaged_checkpoint_is_neither_the_result_nor_kept(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run is stopped again before the damaged step, its own checkpoint is the newest."""
    train(small_run)
    (small_run.folder / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        assert train(replace(small_run, steps=8), resume=True).checkpoint.name == "step-00000008"
    run = replace(small_run, checkpoint=CheckpointSettings(every=100, keep=1))
    stop_after(10, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        stopped = train(run, resume=True)
    assert (stopped.step, stopped.checkpoint.name) == (10, "step-00000010")
    # The checkpoint before it stays until a step is taken from this one.
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(run, resume=True).checkpoint.name == "step-00000012"


def test_a_complete_run_says_so(small_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run)
    assert "the run is complete" not in capsys.readouterr().out
    train(small_run, resume=True)
    assert "the run is complete" in capsys.readouterr().out
