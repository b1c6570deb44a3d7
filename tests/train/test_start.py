"""Fine-tuning uses the token ids that the model was trained with."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import write_tokenizer

from gecko.data import load_tokenizer
from gecko.io.checkpoints import SHARDS
from gecko.train import Run, train


@pytest.fixture
def read_by(run_in: Callable[[str], Run]) -> Callable[..., Run]:
    """Return a function that makes a run of one step with a tokenizer; the model fits all tokenizers here."""

    def make(name: str, tokenizer: str, init_from: Path | None = None) -> Run:
        run = run_in(name)
        data = replace(run.data, tokenizer=tokenizer)
        start = None if init_from is None else str(init_from)
        return replace(run, steps=1, data=data, model=replace(run.model, vocab_size=272), init_from=start)

    return make


def test_the_tokenizer_is_that_of_the_model(read_by: Callable[..., Run], tmp_path: Path) -> None:
    """Tokenizers are compared by their output: one with another name or file format may be equal."""
    merged = write_tokenizer(tmp_path / "merged", [("r", "e"), ("re", "d")])
    other = write_tokenizer(tmp_path / "other", [("r", "u"), ("e", "r")])
    first = train(read_by("first", merged))
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "tokenizer.json"
    copy.write_text(json.dumps(json.loads(Path(merged).read_text()), indent=3))
    assert load_tokenizer(str(copy)).digest != load_tokenizer(merged).digest
    for number, same in enumerate((merged, str(tmp_path / "merged"), str(copy))):
        assert train(read_by(f"same-{number}", same, first.run.folder)).finished
    for init_from in (first.run.folder, first.checkpoint):
        for given in ("bytes", other):
            remedy = f"Set data.tokenizer={first.checkpoint}"
            with pytest.raises(ValueError, match=rf"data\.tokenizer must be .* {remedy}$"):
                train(read_by("refused", given, init_from))


def test_a_tokenizer_beside_the_weights_is_known(read_by: Callable[..., Run], tmp_path: Path) -> None:
    """transformers leaves tokenizers there. Without one, and without a recipe, any tokenizer is accepted."""
    first = train(read_by("first", "bytes"))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(first.checkpoint / name, model / name)
    merged = write_tokenizer(tmp_path / "merged", [("r", "e"), ("re", "d")])
    assert train(read_by("unknown", merged, model)).finished
    shutil.copyfile(merged, model / "tokenizer.json")
    assert train(read_by("same", merged, model)).finished
    with pytest.raises(ValueError, match=rf"Set data\.tokenizer={model}$"):
        train(read_by("refused", "bytes", model))


def test_a_tokenizer_that_is_gone_is_not_the_bytes(read_by: Callable[..., Run], tmp_path: Path) -> None:
    merged = write_tokenizer(tmp_path / "merged", [("r", "e"), ("re", "d")])
    first = train(read_by("first", merged))
    (first.checkpoint / "tokenizer.json").unlink()
    (first.checkpoint / "manifest.json").write_text('{"files": {}}')
    moved = (tmp_path / "merged").rename(tmp_path / "moved") / "tokenizer.json"
    with pytest.raises(ValueError, match=rf"Set data\.tokenizer={merged}$"):
        train(read_by("refused", "bytes", first.run.folder))
    with pytest.warns(UserWarning, match=r"data\.tokenizer could not be compared .*which does not exist"):
        assert train(read_by("moved", str(moved), first.run.folder)).finished


def test_the_bytes_as_transformers_writes_them_are_the_bytes(read_by: Callable[..., Run], tmp_path: Path) -> None:
    hf = pytest.importorskip("gecko.hf")
    first = train(read_by("first", "bytes"))
    hf.byte_tokenizer().save_pretrained(first.checkpoint)
    (first.checkpoint / "recipe.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert train(read_by("again", "bytes", first.checkpoint)).finished


def test_a_checkpoint_in_parts_is_to_be_joined(read_by: Callable[..., Run]) -> None:
    first = train(read_by("first", "bytes"))
    (first.checkpoint / SHARDS).mkdir()
    (first.checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"several ranks.* gecko consolidate {first.checkpoint}$"):
        train(read_by("again", "bytes", first.checkpoint))


def test_a_model_in_the_home_folder(
    read_by: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(read_by("first", "bytes"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train(read_by("again", "bytes", Path("~/first"))).finished
