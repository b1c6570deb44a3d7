"""A whole run, an interrupted one, and their files."""

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.whole_runs import curve, everything, killed, same_end, stop_after
from train.conftest import growing

import gecko
from gecko.config import GeckoConfig
from gecko.models.gecko import load
from gecko.parallel.mesh import Ranks
from gecko.train import CheckpointSettings, OptimizerSettings, Run, SampleSettings, TrainResult, train
from gecko.train.checkpoints import Checkpointer
from gecko.train.data import load_data

# ---- A whole run: the files that it leaves, and the order in which they are written.


@pytest.mark.usefixtures("pictures")
def test_what_a_run_leaves_behind(small_run: Run) -> None:
    result = train(small_run)
    assert result.evaluation is not None
    assert load(result.checkpoint).config == small_run.model
    assert Run.load(result.checkpoint / "recipe.json") == result.run
    assert json.loads((small_run.folder / "results.json").read_text())["loss"] == result.evaluation.loss
    assert (small_run.folder / "sample.txt").read_text(encoding="utf-8").startswith("red ")
    assert result.report == small_run.folder / "report.html"
    assert "<svg" in result.report.read_text(encoding="utf-8")
    losses = [record["loss"] for record in curve(small_run) if record["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert [record["step"] for record in curve(small_run) if record["kind"] == "validation"] == [0, 5, 10, 12]


def test_a_sample_without_a_prompt_begins_with_words_of_the_held_out_text(small_run: Run, tmp_path: Path) -> None:
    texts = tmp_path / "held_out.txt"
    texts.write_text("\nWho goes there, he asked. " * 40, encoding="utf-8")
    run = replace(small_run, data=replace(small_run.data, validation=str(texts)), sample=SampleSettings())
    assert load_data(run, Ranks()).prompt.text == "Who goes there, "


def test_the_disk_has_the_numbers_of_all_steps_before_their_checkpoint(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has every step in its curve, even after a power failure."""
    metrics, on_disk, saved = small_run.folder / "metrics.jsonl", [b"{}"], []
    flush, save = os.fsync, Checkpointer.save

    def flushing(file: int) -> None:
        flush(file)
        if metrics.exists() and os.path.samestat(os.fstat(file), metrics.stat()):
            on_disk.append(metrics.read_bytes())

    def saving(self: Checkpointer, model: Any, optimizer: Any, position: Any) -> None:
        saved.append((position.step, json.loads(on_disk[-1].splitlines()[-1]).get("step")))
        save(self, model, optimizer, position)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Checkpointer, "save", saving)
    train(small_run)
    assert saved == [(4, 4), (8, 8), (12, 12)]


def test_one_text_is_trained_on_and_its_end_held_out(
    small_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("red green blue " * 60)
    run = replace(small_run, data=replace(small_run.data, source=str(text), validation_fraction=0.1))
    assert int((load_data(run, Ranks(console=Console())).final.rows.targets >= 0).sum()) == 89
    written = " ".join(capsys.readouterr().out.split())
    assert "training: 1 documents, 813 tokens" in written
    ends = "; 1 of them the end of a document that is trained on"
    assert f"held out: 1 documents, 90 tokens, 9.97% of all{ends}" in written


def test_a_package_that_the_report_lacks_is_named_before_training(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    train(replace(small_run, steps=1))
    out = capsys.readouterr().out
    assert 0 <= out.find("no report will be written: it needs jinja2") < out.find("held-out loss")


# ---- An interrupted run equals the uninterrupted one bit for bit, and may be extended.


WAYS: dict[str, Callable[[Run], Run]] = {
    "plain": lambda run: run,
    "growing batches": growing,
    "muon": lambda run: replace(run, optimizer=OptimizerSettings("muon", 0.01)),
    "float8": lambda run: replace(run, precision="float8_emulated"),
    "carried state": lambda run: replace(
        run, data=replace(run.data, carry_state=True), gradient_accumulation_steps=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_run_is_the_uninterrupted_one(
    run_in: Callable[[str], Run], whole: TrainResult, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal lets it finish its step and save; as after a kill, steps are repeated and a torn line is removed."""
    undisturbed = whole if way == "plain" else train(WAYS[way](run_in("whole")))
    run = WAYS[way](run_in("interrupted"))
    for step, number in ((1, signal.SIGTERM), (4, signal.SIGINT)):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(step, patch, partial(signal.raise_signal, number))
            stopped = train(run, resume=step > 1)
        assert (stopped.step, stopped.finished) == (step, False)
    for step in (7, 12):
        killed(step, run, resume=True)
        with (run.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"kind": "train", "st')
    resumed = train(run, resume=True)
    assert same_end(undisturbed, resumed)
    assert curve(resumed.run) == curve(undisturbed.run)
    assert resumed.evaluation == undisturbed.evaluation
    assert "the run is complete" not in capsys.readouterr().out
    losses = [record["loss"] for record in curve(resumed.run) if record["kind"] == "train"]
    assert losses[-1] < 0.9 * losses[0]


def test_resuming_a_finished_run_trains_no_more(
    finished: Run, whole: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    again = train(finished, resume=True)
    assert (again.step, again.evaluation, curve(finished)) == (12, whole.evaluation, curve(whole.run))
    assert "the run is complete" in capsys.readouterr().out


def test_a_run_gets_longer_and_not_shorter(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped longer run keeps no results of the shorter one: it would look finished, with the loss after fewer."""
    train(replace(small_run, steps=4))
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match="steps must be at least the 4 that are done; got 3"):
        train(replace(small_run, steps=3), resume=True)
    assert everything(small_run.folder) == before
    results = [small_run.folder / name for name in ("results.json", "report.html", "sample.txt")]
    assert all(path.is_file() for path in results)
    stop_after(6, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert not train(small_run, resume=True).finished
    assert not any(path.exists() for path in results)
    assert train(small_run, resume=True).finished
    assert all(path.is_file() for path in results)


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


# ---- Files of a run in its folder are neither overwritten nor mixed with those of another run.


def test_what_a_run_left_is_not_overwritten_and_no_other_run_goes_on_with_it(small_run: Run) -> None:
    """Also if its checkpoints were deleted to free space: its metrics and report are still there."""
    run = replace(small_run, steps=1)
    train(run)
    before = everything(run.folder)
    with pytest.raises(FileExistsError, match="--resume"):
        train(run)
    others: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1}, "batch_size": {"batch_size": 4}, "model.vocab_size": {"model": GeckoConfig.preset("tiny")},
    }  # fmt: skip
    for name, changes in others.items():
        with pytest.raises(ValueError, match=f"^{name} must be what the checkpoint was trained with"):
            train(replace(run, **changes), resume=True)
    assert everything(run.folder) == before
    shutil.rmtree(run.folder / "checkpoints")
    before = everything(run.folder)
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="must hold the checkpoints of its run, which is finished"):
            train(run, resume=resume)
    assert everything(run.folder) == before


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_others_are_not_mixed_with_a_run(run_in: Callable[[str], Run], resume: bool) -> None:
    run = run_in("model")
    gecko.Gecko(run.model).save(run.folder)
    (run.folder / "recipe.json").write_text("{}")
    before = everything(run.folder)
    with pytest.raises(FileExistsError, match=r"must have a folder without a model.* Choose another folder"):
        train(run, resume=resume)
    assert everything(run.folder) == before
    for number, name in enumerate(("recipe.json", "sample.txt", "report.html", "tokenizer/tokenizer.json")):
        run = run_in(f"{number}")
        path = run.folder / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with pytest.raises(FileExistsError, match=rf"has a {name} that no run wrote.* Choose another folder"):
            train(run, resume=resume)
        assert path.read_text() == "mine" and not (run.folder / "metrics.jsonl").exists()


def test_a_run_without_a_checkpoint_is_begun_again_by_itself_alone(small_run: Run) -> None:
    """And only if ``resume`` is given. The numbers of step 2 are read in step 3."""
    killed(3, small_run)
    before = everything(small_run.folder)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(small_run)
    with pytest.raises(ValueError, match=r"^seed must be what the run in .* was begun with, 0; got 7"):
        train(replace(small_run, seed=7), resume=True)
    assert everything(small_run.folder) == before and curve(small_run)[-1]["step"] == 1
    assert train(small_run, resume=True).finished


def test_a_run_that_never_made_a_step_may_be_another_one(small_run: Run) -> None:
    """For example a run whose first step did not fit into memory, and that then gets a smaller batch size."""
    killed(1, small_run)
    assert [record["kind"] for record in curve(small_run)] == ["validation"]
    assert train(replace(small_run, batch_size=small_run.batch_size * 2), resume=True).finished


def test_two_sessions_do_not_train_in_one_folder(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused before it changes anything; the lock ends with the first one."""
    refusals = []

    def meanwhile() -> None:
        # TensorBoard's thread of the first session may write at any time.
        before = everything(small_run.folder, but="tensorboard")
        with pytest.raises(ValueError, match="one process at a time") as refused:
            train(small_run, resume=True)
        refusals.append(str(refused.value))
        assert everything(small_run.folder, but="tensorboard") == before

    stop_after(6, monkeypatch, meanwhile)
    assert train(small_run).finished
    assert len(refusals) == 1 and str(small_run.folder) in refusals[0]
    assert train(small_run, resume=True).finished
