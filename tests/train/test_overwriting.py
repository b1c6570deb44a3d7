"""Files of a run in its folder are neither overwritten nor mixed with those of another run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import curve, die, everything, stop_after

import gecko
from gecko.config import GeckoConfig
from gecko.train import Run, train


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


def test_the_curve_of_a_run_without_a_checkpoint_is_not_overwritten(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless ``resume`` is given, which here starts from the beginning. The numbers of step 2 are read in step 3."""
    stop_after(3, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    before = curve(small_run)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(small_run)
    assert curve(small_run) == before and before[-1]["step"] == 1
    assert train(small_run, resume=True).finished


def test_another_run_without_a_checkpoint_is_not_overwritten(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although ``resume`` is given: the files are the start of another run."""
    stop_after(3, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
    before = everything(small_run.folder)
    with pytest.raises(ValueError, match=r"^seed must be what the run in .* was begun with, 0; got 7"):
        train(replace(small_run, seed=7), resume=True)
    assert everything(small_run.folder) == before


def test_a_run_that_never_made_a_step_may_be_another_one(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a run whose first step did not fit into memory, and that then gets a smaller batch size."""
    stop_after(1, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(small_run)
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
