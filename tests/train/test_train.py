"""A whole run, an interrupted one, and their files."""

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
from support.whole_runs import curve, everything, killed, same_end, stop_after

import gecko
from gecko.config import GeckoConfig
from gecko.models.gecko import load
from gecko.parallel.mesh import Ranks
from gecko.train import CheckpointSettings, Run, SampleSettings, TrainResult, train
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
    data = replace(small_run.data, validation=str(texts))
    train(replace(small_run, data=data, steps=2, sample=SampleSettings(tokens=4)))
    assert (small_run.folder / "sample.txt").read_text(encoding="utf-8").startswith("Who goes there, ")


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


def test_one_text_is_trained_on_and_its_end_held_out(
    small_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("red green blue " * 60)
    data = replace(small_run.data, source=str(text), validation_fraction=0.1)
    result = train(replace(small_run, data=data, steps=2))
    assert result.evaluation is not None and result.evaluation.tokens == 89
    written = capsys.readouterr().out
    assert "training: 1 documents, 813 tokens" in written
    ends = "; 1 of them the end of a document that is trained on"
    assert f"held out: 1 documents, 90 tokens, 9.97% of all{ends}" in written


def test_a_package_that_the_report_lacks_is_named_before_training(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    train(small_run)
    out = capsys.readouterr().out
    assert 0 <= out.find("no report will be written: it needs jinja2") < out.find("held-out loss")


# ---- An interrupted run equals the uninterrupted one bit for bit, and may be extended.


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
    small_run: Run, whole: TrainResult, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """An error inside a step replaces a kill: nothing is saved, and the steps are repeated."""
    killed(step, small_run)
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


# ---- Files of a run in its folder are neither overwritten nor mixed with those of another run.


def test_a_used_folder_is_not_overwritten(small_run: Run) -> None:
    run = replace(small_run, steps=1)
    train(run)
    with pytest.raises(FileExistsError, match="--resume"):
        train(run)


@pytest.mark.parametrize("resume", [False, True])
def test_a_model_is_not_mixed_with_a_run(small_run: Run, resume: bool) -> None:
    gecko.Gecko(small_run.model).save(small_run.folder)
    (small_run.folder / "recipe.json").write_text("{}")
    before = everything(small_run.folder)
    with pytest.raises(FileExistsError, match=r"must have a folder without a model.* Choose another folder"):
        train(small_run, resume=resume)
    assert everything(small_run.folder) == before


@pytest.mark.parametrize("name", ["recipe.json", "sample.txt", "report.html", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_that_no_run_wrote_are_not_replaced(small_run: Run, name: str, resume: bool) -> None:
    path = small_run.folder / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=rf"has a {name} that no run wrote.* Choose another folder"):
        train(small_run, resume=resume)
    assert path.read_text() == "mine"
    assert not (small_run.folder / "metrics.jsonl").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_finished_run_left_is_not_overwritten(small_run: Run, resume: bool) -> None:
    """Its checkpoints were deleted to free space; its metrics and report are still there."""
    run = replace(small_run, steps=1)
    train(run)
    shutil.rmtree(run.folder / "checkpoints")
    before = everything(run.folder)
    with pytest.raises(FileExistsError, match="must hold the checkpoints of its run, which is finished"):
        train(run, resume=resume)
    assert everything(run.folder) == before


def test_the_curve_of_a_run_without_a_checkpoint_is_not_overwritten(small_run: Run) -> None:
    """Unless ``resume`` is given, which here starts from the beginning. The numbers of step 2 are read in step 3."""
    killed(3, small_run)
    before = curve(small_run)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(small_run)
    assert curve(small_run) == before and before[-1]["step"] == 1
    assert train(small_run, resume=True).finished


def test_another_run_without_a_checkpoint_is_not_overwritten(small_run: Run) -> None:
    """Although ``resume`` is given: the files are the start of another run."""
    killed(3, small_run)
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match=r"^seed must be what the run in .* was begun with, 0; got 7"):
        train(replace(small_run, seed=7), resume=True)
    assert everything(small_run.folder) == before


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


def test_other_text_under_the_same_name_is_refused(small_run: Run, corpus: Path, tmp_path: Path) -> None:
    """Rows depend on all documents: some documents would be read twice, and held-out ones would be trained on."""
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
