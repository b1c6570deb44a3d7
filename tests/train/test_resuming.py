"""An interrupted run equals the uninterrupted one bit for bit, and may be extended."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.whole_runs import curve, die, everything, same_end, stop_after

from gecko.train import CheckpointSettings, Run, TrainResult, train


@pytest.mark.parametrize(
    ("step", "number"), [(1, signal.SIGTERM), (4, signal.SIGINT), (5, signal.SIGTERM), (11, signal.SIGINT)]
)
def test_stopped_and_resumed_is_uninterrupted(
    small_run: Run, whole: TrainResult, monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals
) -> None:
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
    small_run: Run, whole: TrainResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """An error inside a step replaces a kill: nothing is saved, and the steps are repeated."""
    stop_after(step, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    with (small_run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "st')
    resumed = train(small_run, resume=True)
    assert same_end(whole, resumed)
    assert curve(resumed.run) == curve(whole.run)
    assert "the run is complete" not in capsys.readouterr().out


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


def test_resuming_a_finished_run_trains_no_more(
    finished: Run, whole: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    again = train(finished, resume=True)
    assert (again.step, again.evaluation, curve(finished)) == (12, whole.evaluation, curve(whole.run))
    assert "the run is complete" in capsys.readouterr().out


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


def test_a_damaged_checkpoint_is_passed_over(finished: Run, whole: TrainResult) -> None:
    weights = finished.folder / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.warns(UserWarning, match=r"step-00000012.*model\.safetensors"):
        resumed = train(finished, resume=True)
    assert same_end(whole, resumed)


def test_a_damaged_checkpoint_is_neither_the_result_nor_kept(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run is stopped again before the damaged step, its own checkpoint is the newest."""
    (finished.folder / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        assert train(replace(finished, steps=8), resume=True).checkpoint.name == "step-00000008"
    run = replace(finished, checkpoint=CheckpointSettings(every=100, keep=1))
    stop_after(10, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        stopped = train(run, resume=True)
    assert (stopped.step, stopped.checkpoint.name) == (10, "step-00000010")
    # The checkpoint before it stays until a step is taken from this one.
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(run, resume=True).checkpoint.name == "step-00000012"
