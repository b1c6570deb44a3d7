"""A checkpoint contains the tokenizer that its model was trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import write_tokenizer

from gecko.data import load_tokenizer
from gecko.data.byte_files import holds_byte_tokenizer
from gecko.data.tokenizers import copy_tokenizer
from gecko.io.checkpoints import read_manifest
from gecko.train import Run, train
from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.model import known_tokenizer

FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def read_by_file(small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run whose tokenizer is a relative path to a file with an unusual name, in a folder with other files."""
    path = Path(write_tokenizer(tmp_path / "made", [("r", "e"), ("re", "d")]))
    path.rename(path.with_name("merged.json"))
    for name in ("tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (path.parent / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    model = replace(small_run.model, vocab_size=272)
    return replace(small_run, model=model, data=replace(small_run.data, tokenizer="made/merged.json"))


def test_a_checkpoint_is_read_wherever_it_lies(
    read_by_file: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = train(read_by_file).checkpoint
    digest = load_tokenizer("made/merged.json").digest
    assert {name for name in read_manifest(checkpoint) if "token" in name or "chat" in name} == FILES
    (tmp_path / "made").rename(tmp_path / "gone")
    monkeypatch.chdir("/")
    known = known_tokenizer(checkpoint)
    assert known is not None and load_tokenizer(known).digest == digest


def test_a_run_goes_on_with_the_recipe_it_has(read_by_file: Run) -> None:
    train(read_by_file)
    longer = replace(read_by_file, steps=16)
    assert train(longer, resume=True).step == 16
    newest = latest_checkpoint(longer.folder / "checkpoints")
    assert newest is not None and read_manifest(newest).keys() > FILES
    assert Run.load(newest / "recipe.json") == Run.load(longer.folder / "recipe.json") == longer


def test_a_run_on_bytes_keeps_no_tokenizer_of_a_session_before(small_run: Run) -> None:
    left = Path(write_tokenizer(small_run.folder, []))
    (small_run.folder / "tokenizer").mkdir()
    left.rename(small_run.folder / "tokenizer" / "tokenizer.json")
    small_run.save(small_run.folder / "recipe.json")
    checkpoint = train(small_run).checkpoint
    assert holds_byte_tokenizer(checkpoint)
    assert known_tokenizer(checkpoint) == "bytes"


def test_only_the_tokenizer_that_is_read_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json"):
        (source / name).write_text(name)
    copy_tokenizer(str(source), target)
    assert {path.name for path in target.iterdir()} == {"tokenizer.json", "special_tokens_map.json"}
    copy_tokenizer(str(source / "tokenizer.model"), target)
    assert {path.name for path in target.iterdir()} == {"tokenizer.model", "special_tokens_map.json"}
    copy_tokenizer(str(target), target)
    assert (target / "tokenizer.model").read_text() == "tokenizer.model"
