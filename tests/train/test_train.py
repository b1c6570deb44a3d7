"""A whole run: the files that it leaves, and the order in which they are written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.whole_runs import curve

from gecko.models.gecko import load
from gecko.parallel.mesh import Ranks
from gecko.train import Run, SampleSettings, train
from gecko.train.checkpoints.checkpointer import Checkpointer
from gecko.train.data import load_data


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
