"""The beginning of a run: its tokenizer and the field of its records."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.corpora import as_shards, words, write_tokenizer

from gecko.data import load_tokenizer
from gecko.data.tokenizers import holds_byte_tokenizer
from gecko.io.checkpoints import SHARDS, read_manifest
from gecko.recipes import apply_overrides
from gecko.train import Run, train
from gecko.train.checkpoints import latest_checkpoint
from gecko.train.model import known_tokenizer

# ---- Fine-tuning uses the token ids that the model was trained with.


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
    entries = json.loads((first.checkpoint / "manifest.json").read_text())["files"]
    del entries["tokenizer.json"]
    (first.checkpoint / "manifest.json").write_text(json.dumps({"files": entries}))
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


def test_a_checkpoint_in_parts_is_to_be_joined_and_a_folder_may_be_in_the_home_folder(
    read_by: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(read_by("first", "bytes"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train(read_by("again", "bytes", Path("~/first"))).finished
    (first.checkpoint / SHARDS).mkdir()
    (first.checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"several ranks.* gecko consolidate {first.checkpoint}$"):
        train(read_by("in parts", "bytes", first.checkpoint))


# ---- A checkpoint contains the tokenizer that its model was trained with.

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
    longer = replace(read_by_file, steps=16)
    assert train(longer, resume=True).step == 16
    newest = latest_checkpoint(longer.folder / "checkpoints")
    assert newest is not None and read_manifest(newest).keys() > FILES
    assert Run.load(newest / "recipe.json") == Run.load(longer.folder / "recipe.json") == longer
    (tmp_path / "made").rename(tmp_path / "gone")
    monkeypatch.chdir("/")
    known = known_tokenizer(checkpoint)
    assert known is not None and load_tokenizer(known).digest == digest


def test_a_run_on_bytes_keeps_no_tokenizer_of_a_session_before(small_run: Run) -> None:
    left = Path(write_tokenizer(small_run.folder, []))
    (small_run.folder / "tokenizer").mkdir()
    left.rename(small_run.folder / "tokenizer" / "tokenizer.json")
    small_run.save(small_run.folder / "recipe.json")
    checkpoint = train(small_run).checkpoint
    assert holds_byte_tokenizer(checkpoint)
    assert known_tokenizer(checkpoint) == "bytes"


# ---- Records whose text is in another field than ``text``.

TEXTS = [words(60, number) for number in range(20)]


def write_records(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"id": 1, "content": text, "title": text[:9]}) + "\n" for text in texts))
    return str(path)


def test_the_field_is_named_in_the_run_and_is_that_of_all_sources(small_run: Run, tmp_path: Path) -> None:
    """Except for shards, which were made from one field."""
    source, held_out = (write_records(tmp_path / f"{count}.jsonl", TEXTS[:count]) for count in (20, 4))
    records = replace(small_run, steps=1, data=replace(small_run.data, source=source))
    with pytest.raises(ValueError, match=r"the field 'text'.* got the fields \['content', 'id', .*data\.field=NAME"):
        train(records)
    mixture = f"{source}=1,{as_shards(TEXTS, tmp_path)}=1"
    changes = [f"data.sources={mixture}", f"data.validation={held_out}", "evaluation.final_rows=1000"]
    result = train(apply_overrides(records, ["data.field=content", *changes]))
    assert result.evaluation is not None and result.evaluation.tokens == sum(len(text) + 1 for text in TEXTS[:4])
    with pytest.raises(ValueError, match=r"data\.field must be what the checkpoint was trained with, 'content'"):
        train(apply_overrides(records, ["data.field=title", *changes]), resume=True)
