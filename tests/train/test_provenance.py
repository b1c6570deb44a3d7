"""A run records code and machine of each of its sessions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import as_shards

from gecko.data import ShardFolder
from gecko.data.packing import ROW_LAYOUT
from gecko.data.shards import ShardedRows, SplitShards
from gecko.io.checkpoints import read_manifest
from gecko.models.gecko import Gecko
from gecko.runtime.process import code_version
from gecko.train import Run, train
from gecko.train.checkpoints.folders import write_manifest
from gecko.train.data import replayed
from gecko.train.metrics import DATA, SESSIONS, DataRecord, read_sessions, row_layout


def test_every_session_leaves_a_line(small_run: Run) -> None:
    assert read_sessions(small_run.folder) == []
    train(small_run)
    train(small_run, resume=True)
    first, second = read_sessions(small_run.folder)
    assert (first["step"], second["step"]) == (0, small_run.steps)
    for line in (first, second):
        assert {"version": line["version"], "commit": line["commit"]} == code_version()
        assert line["parameters"] == sum(p.numel() for p in Gecko(small_run.model).parameters())
        assert "PyTorch" in line["hardware"]["Software"]


def test_a_new_run_starts_a_new_file(small_run: Run) -> None:
    small_run.folder.mkdir()
    (small_run.folder / SESSIONS).write_text('{"step": 0}\n')
    train(small_run)
    assert [line["step"] for line in read_sessions(small_run.folder)] == [0]
    assert "version" in read_sessions(small_run.folder)[0]


def changed_data(run: Run, corpus: Path, folder: Path) -> Run:
    """Return ``run`` with a copy of the corpus that has one more document."""
    shutil.copytree(corpus, folder)
    (folder / "0-new.txt").write_text("one more document")
    return replace(run, data=replace(run.data, source=str(folder)))


@pytest.mark.parametrize("told_by", ["checkpoint", "sessions", "neither"])
def test_who_says_what_a_run_was_trained_on(
    small_run: Run, corpus: Path, tmp_path: Path, told_by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of earlier versions do not record it: then the sessions do; without those the run prints a notice."""
    run = changed_data(replace(small_run, steps=4), corpus, tmp_path / "texts")
    checkpoint = train(run).checkpoint
    if told_by != "checkpoint":
        as_before(checkpoint)
    if told_by != "sessions":
        (run.folder / SESSIONS).unlink()
    (tmp_path / "texts" / "0-new.txt").write_text("another document!")
    longer = replace(run, steps=6)
    capsys.readouterr()
    if told_by != "neither":
        with pytest.raises(ValueError, match=r"the texts and the tokenizer must be those .* was begun with"):
            train(longer, resume=True)
        (tmp_path / "texts" / "0-new.txt").write_text("one more document")
    assert train(longer, resume=True).step == 6
    assert ("cannot check that the texts are those" in capsys.readouterr().out) == (told_by == "neither")


def as_before(checkpoint: Path) -> None:
    """Turn the checkpoint into one of a version that did not record its data."""
    (checkpoint / DATA).unlink()
    write_manifest(checkpoint, {name: entry for name, entry in read_manifest(checkpoint).items() if name != DATA})


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_run_keeps_the_rows_that_it_was_begun_with(
    small_run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """Earlier versions dropped the tokens of token shards that filled no row."""
    shards = as_shards([path.read_text() for path in sorted(corpus.glob("*.txt"))], tmp_path)
    run = replace(small_run, data=replace(small_run.data, source=shards))
    newest = train(replace(run, steps=2)).checkpoint
    if old:
        as_before(newest)
    layouts: list[int] = []
    rows = SplitShards.rows

    def looked_at(self: SplitShards, length: int) -> ShardedRows:
        layouts.append(self.layout)
        return rows(self, length)

    monkeypatch.setattr(SplitShards, "rows", looked_at)
    for steps in (4, 6):
        newest = train(replace(run, steps=steps), resume=True).checkpoint
        assert list(replayed(run, 1))
        assert DataRecord.load(newest) == DataRecord(ShardFolder.open(shards).digest, 1 if old else ROW_LAYOUT)
    assert layouts == [1 if old else ROW_LAYOUT] * 4


def test_a_damaged_or_newer_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATA).write_text("[]")
    with pytest.raises(ValueError, match=r"data\.json must hold the digest and the row layout"):
        DataRecord.load(tmp_path)
    newer = ROW_LAYOUT + 1
    DataRecord("", newer).save(tmp_path)
    with pytest.raises(ValueError, match=rf"row layout from 1 to {ROW_LAYOUT}; got {newer}.*newer version"):
        row_layout(tmp_path)
