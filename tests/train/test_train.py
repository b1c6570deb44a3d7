"""Whole runs: an interrupted run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from gecko.config import GeckoConfig
from gecko.model import load
from gecko.parallel.mesh import Ranks
from gecko.train import CheckpointSettings, Run, TrainResult, train
from gecko.train.loop import Trainer
from gecko.train.metrics import read_metrics
from gecko.train.nonfinite import NonFiniteError
from gecko.train.saver import Saver
from gecko.train.texts import load_data

_TIMES = ("seconds", "tokens_per_second", "mfu", "memory_gib", "data_seconds")


def curve(run: Run) -> list[dict[str, Any]]:
    records = read_metrics(run.folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in _TIMES} for record in records]


def same_end(one: TrainResult, other: TrainResult) -> bool:
    """Weights and optimizer state are equal in every bit."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = load_file(one.checkpoint / name), load_file(other.checkpoint / name)
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
    """Call ``stop`` inside the given step of the next run, once."""
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        if self.position.step == step - 1:
            monkeypatch.setattr(Trainer, "_step", original)
            stop()
        original(self)

    monkeypatch.setattr(Trainer, "_step", stepping)


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], TrainResult]:
    """The result of the same run in another folder, trained once."""
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
    """An error inside a step stands for a kill: nothing is saved on the way out, and steps are done again."""

    def die() -> None:
        raise KeyboardInterrupt

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


def test_a_used_folder_is_not_overwritten(small_run: Run) -> None:
    run = replace(small_run, steps=1)
    train(run)
    with pytest.raises(FileExistsError, match="--resume"):
        train(run)


def everything(folder: Path, but: str = "") -> dict[Path, bytes]:
    """Files and their contents, those of the folder ``but`` left out."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != but}


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_finished_run_left_is_not_overwritten(small_run: Run, resume: bool) -> None:
    """Its checkpoints were deleted, for room; its numbers and report are still there."""
    run = replace(small_run, steps=1)
    train(run)
    shutil.rmtree(run.folder / "checkpoints")
    before = everything(run.folder)
    with pytest.raises(FileExistsError, match="must hold the checkpoints of its run, which is finished"):
        train(run, resume=resume)
    assert everything(run.folder) == before


def test_the_curve_of_a_run_without_a_checkpoint_is_not_overwritten(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is asked to go on, which here is to begin again."""

    def die() -> None:
        raise KeyboardInterrupt

    stop_after(3, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    before = curve(small_run)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(small_run)
    assert curve(small_run) == before and before[-1]["step"] == 2
    assert train(small_run, resume=True).finished


def test_another_run_without_a_checkpoint_is_not_overwritten(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it asks to go on: what is there is the beginning of something else."""

    def die() -> None:
        raise KeyboardInterrupt

    stop_after(3, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match=r"^seed must be what the run in .* was begun with, 0; got 7"):
        train(replace(small_run, seed=7), resume=True)
    assert everything(small_run.folder) == before


def test_two_sessions_do_not_train_in_one_folder(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused before it touches anything, and the lock ends with the first one."""
    refusals = []

    def meanwhile() -> None:
        # TensorBoard's thread of the first session writes when it has time.
        before = everything(small_run.folder, but="tensorboard")
        with pytest.raises(ValueError, match="one process at a time") as refused:
            train(small_run, resume=True)
        refusals.append(str(refused.value))
        assert everything(small_run.folder, but="tensorboard") == before

    stop_after(6, monkeypatch, meanwhile)
    assert train(small_run).finished
    assert len(refusals) == 1 and str(small_run.folder) in refusals[0]
    assert train(small_run, resume=True).finished


def test_resuming_a_finished_run_trains_no_more(small_run: Run) -> None:
    first = train(small_run)
    before = curve(small_run)
    again = train(small_run, resume=True)
    assert (again.step, again.evaluation, curve(small_run)) == (12, first.evaluation, before)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 4}, "batch_size"),
        ({"model": GeckoConfig.preset("tiny")}, "model.vocab_size"),
    ],
    ids=["seed", "batch", "model"],
)
def test_resuming_another_run_is_refused(small_run: Run, changes: dict[str, Any], name: str) -> None:
    train(replace(small_run, steps=1))
    with pytest.raises(ValueError, match=f"^{name} must be what the checkpoint was trained with"):
        train(replace(small_run, **changes), resume=True)


def test_fewer_steps_than_are_done_are_refused(small_run: Run) -> None:
    train(replace(small_run, steps=4))
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match="steps must be at least the 4 that are done; got 3"):
        train(replace(small_run, steps=3), resume=True)
    assert everything(small_run.folder) == before


def test_a_longer_run_does_not_keep_the_results_of_the_shorter_one(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on its way, it would pass for finished, with the loss of another number of steps."""
    train(replace(small_run, steps=4))
    results = [small_run.folder / name for name in ("results.json", "report.html", "sample.txt")]
    assert all(path.is_file() for path in results)
    stop_after(6, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert not train(small_run, resume=True).finished
    assert not any(path.exists() for path in results)
    assert train(small_run, resume=True).finished
    assert all(path.is_file() for path in results)


def test_other_text_under_the_same_name_is_refused(small_run: Run, corpus: Path, tmp_path: Path) -> None:
    """Rows are a function of all documents: some would be read twice, and held-out ones trained on."""
    texts = tmp_path / "texts"
    shutil.copytree(corpus, texts)
    run = replace(small_run, data=replace(small_run.data, source=str(texts)), steps=4)
    train(run)
    (texts / "0-new.txt").write_text("one more document")
    longer = replace(run, steps=6)
    with pytest.raises(ValueError, match=r"the texts and the tokenizer must be those .* was begun with"):
        train(longer, resume=True)
    (texts / "0-new.txt").unlink()
    assert train(longer, resume=True).step == 6


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
    """Stopped again before its step, the run has its own checkpoint, and goes on from it."""
    train(small_run)
    (small_run.folder / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        assert train(replace(small_run, steps=8), resume=True).checkpoint.name == "step-00000008"
    run = replace(small_run, checkpoint=CheckpointSettings(every=100, keep=1))
    stop_after(10, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000012"):
        stopped = train(run, resume=True)
    assert (stopped.step, stopped.checkpoint.name) == (10, "step-00000010")
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000010"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(run, resume=True).checkpoint.name == "step-00000012"


def test_what_a_run_leaves_behind(small_run: Run) -> None:
    result = train(small_run)
    assert result.evaluation is not None
    assert load(result.checkpoint).config == small_run.model
    assert Run.load(result.checkpoint / "recipe.json") == result.run
    assert json.loads((small_run.folder / "results.json").read_text())["loss"] == result.evaluation.loss
    assert (small_run.folder / "sample.txt").read_text(encoding="utf-8").startswith("red ")
    assert result.report == small_run.folder / "report.html"
    losses = [record["loss"] for record in curve(small_run) if record["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert [record["step"] for record in curve(small_run) if record["kind"] == "validation"] == [0, 5, 10, 12]


def test_the_disk_has_the_numbers_of_all_steps_before_their_checkpoint(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure too a run that goes on has every step in its curve."""
    metrics, on_disk, saved = small_run.folder / "metrics.jsonl", [b"{}"], []
    flush, save = os.fsync, Saver.save

    def flushing(file: int) -> None:
        flush(file)
        if metrics.exists() and os.path.samestat(os.fstat(file), metrics.stat()):
            on_disk.append(metrics.read_bytes())

    def saving(self: Saver, model: Any, optimizer: Any, position: Any) -> None:
        saved.append((position.step, json.loads(on_disk[-1].splitlines()[-1]).get("step")))
        save(self, model, optimizer, position)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Saver, "save", saving)
    train(small_run)
    assert saved == [(4, 4), (8, 8), (12, 12)]


def test_a_time_budget_becomes_a_number_of_steps_once(run_in: Callable[[str], Run]) -> None:
    timed = train(replace(run_in("timed"), steps=None, minutes=0.01))
    assert timed.run.steps == timed.step >= 1
    assert f"steps={timed.step}" in timed.run.command()
    counted = train(replace(run_in("counted"), steps=timed.step))
    assert same_end(timed, counted)
    again = train(replace(run_in("timed"), steps=None, minutes=0.01), resume=True)
    assert again.run.steps == timed.step


def test_other_minutes_than_those_that_became_steps_are_refused(run_in: Callable[[str], Run]) -> None:
    """They would change nothing but the recipe; steps do."""
    run = replace(run_in("timed"), steps=None, minutes=0.01)
    done = train(run).step
    before = everything(run.folder)
    with pytest.raises(ValueError, match=rf"fixed at {done}; got minutes=0\.02\. Set steps="):
        train(replace(run, minutes=0.02), resume=True)
    assert everything(run.folder) == before
    assert train(replace(run, minutes=0.02, steps=done + 1), resume=True).step == done + 1


def test_killed_before_its_first_checkpoint_a_run_keeps_its_measured_steps(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(run_in("killed"), steps=None, minutes=0.02)

    def die() -> None:
        raise KeyboardInterrupt

    stop_after(2, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    found = Run.load(run.folder / "recipe.json").steps
    monkeypatch.setattr("gecko.train.session.steps_in_budget", lambda *_: pytest.fail("it was measured again"))
    assert train(run, resume=True).step == found


def poison(model: Any, steps: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one module return NaN in the given steps."""
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        module = self.model.blocks[1].feed_forward.fc2  # type: ignore[union-attr]
        hook = module.register_forward_hook(lambda m, i, out: out * float("nan"))
        if self.position.step + 1 not in steps:
            hook.remove()
        original(self)
        hook.remove()

    monkeypatch.setattr(Trainer, "_step", stepping)


def test_a_non_finite_step_is_named_and_skipped(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(small_run, range(3, 5), monkeypatch)
    result = train(replace(small_run, max_skips=3))
    skipped = {record["step"]: record for record in curve(small_run) if "skipped" in record}
    assert list(skipped) == [3, 4]
    assert skipped[3]["loss"] is None
    assert "blocks.1.feed_forward.fc2" in skipped[3]["skipped"]
    assert result.finished
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result.checkpoint / "model.safetensors").values())


def test_too_many_in_a_row_end_the_run_and_keep_the_checkpoint(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(small_run, range(6, 100), monkeypatch)
    with pytest.raises(NonFiniteError, match=r"steps 6 to 8 .*blocks\.1\.feed_forward\.fc2.*--resume"):
        train(replace(small_run, max_skips=3))
    assert [path.name for path in (small_run.folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_held_out_texts_of_their_own_are_the_same_for_every_seed(run_in: Callable[[str], Run], tmp_path: Path) -> None:
    (tmp_path / "rest").mkdir()
    texts = ["the red river falls", "a green stone", "slowly"]
    for number, text in enumerate(texts):
        (tmp_path / "rest" / f"{number}.txt").write_text(text)
    first = []
    for seed in (0, 1):
        run = run_in(f"seed-{seed}")
        run = replace(run, seed=seed, data=replace(run.data, validation=str(tmp_path / "rest")))
        assert train(run).evaluation.tokens == sum(len(text) + 1 for text in texts)  # type: ignore[union-attr]
        first.append(load_data(run, Ranks(), Console(quiet=True)).final.rows.tokens)
    assert torch.equal(*first)
    with pytest.raises(ValueError, match=r"data\.validation must hold other texts"):
        train(replace(run_in("both"), data=replace(run.data, validation=run.data.source)))
    with pytest.raises(ValueError, match=r"data\.validation must be what the checkpoint was trained with"):
        train(replace(run, data=replace(run.data, validation=None)), resume=True)
