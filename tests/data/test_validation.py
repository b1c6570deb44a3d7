"""Held-out documents, plain texts, and what needs extra packages."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpora import as_files, as_lines, as_shards

from gecko.cli.arguments import named_text
from gecko.data import ByteTokenizer, DataRequest, TokenizedCorpus, TrainingData, open_training_data
from gecko.data.readers import check_plain_text
from gecko.eval.scored_model import open_texts
from gecko.runtime.process import require

# ---- Held-out documents from a separate source.

LENGTH = 8
TRAINED = [f"trained on {number:02d}" for number in range(20)]
HELD_OUT = [f"held out {number}" for number in range(7)]
KINDS = [as_shards, as_lines, as_files]
Kind = Callable[[list[str], Path], str]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("train", "rest"):
        (tmp_path / name).mkdir()
    return tmp_path / "train", tmp_path / "rest"


def opened(source: str, validation: str | None, seed: int = 0, sources: tuple[str, ...] = ()) -> TrainingData:
    request = DataRequest(LENGTH, validation_fraction=0.3, seed=seed)
    return open_training_data(source, sources, ByteTokenizer(), request, validation=validation)


def documents(corpus: TokenizedCorpus) -> list[str]:
    return [bytes(corpus.document(index)[1:-1].tolist()).decode() for index in range(len(corpus))]


@pytest.mark.parametrize(("kind", "held_out_kind"), [*zip(KINDS, KINDS, strict=True), (as_shards, as_files)])
def test_all_of_the_source_trains_and_all_of_the_other_is_held_out(
    kind: Kind, held_out_kind: Kind, folders: tuple[Path, Path]
) -> None:
    source, validation = kind(TRAINED, folders[0]), held_out_kind(HELD_OUT, folders[1])
    orders = []
    for seed in range(3):
        data = opened(source, validation, seed)
        assert (data.documents, data.tokens) == (len(TRAINED), sum(len(text) + 2 for text in TRAINED))
        rows = (data.rows.row(index)[0].tolist() for index in range(data.rows.rows_per_epoch))
        epoch = [token for row in rows for token in row if token]  # padding is 0
        # The last token of the corpus is only a target, unless padding follows it.
        assert data.tokens - 1 - len(epoch) in range(-1, LENGTH)
        assert set(epoch) <= set("".join(TRAINED).encode()) | {256}
        orders.append(documents(data.held_out(10**6)))
        assert data.held_out_documents == len(HELD_OUT)
        assert data.held_out_tokens == sum(len(text) + 2 for text in HELD_OUT)
        assert data.held_out(30).num_tokens >= 30
    # The texts and their order do not depend on the seed: losses of several seeds are over the same rows.
    assert orders[0] == orders[1] == orders[2] != HELD_OUT
    assert sorted(orders[0]) == HELD_OUT


def test_a_single_document_may_be_held_out_or_a_fraction(folders: tuple[Path, Path]) -> None:
    source = as_lines(TRAINED, folders[0])
    assert documents(opened(source, as_files(["alone"], folders[1])).held_out(100)) == ["alone"]
    data = opened(source, None)
    assert (data.documents, data.held_out_documents) == (14, 6)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        opened(source, str(folders[1] / "missing"))


def test_all_of_a_mixture_trains(folders: tuple[Path, Path], tmp_path: Path) -> None:
    sources = (f"{as_shards(TRAINED[:8], folders[0])}=3", f"{as_files(TRAINED[8:], tmp_path)}=1")
    data = opened("ignored", as_lines(HELD_OUT, folders[1]), sources=sources)
    assert data.documents == len(TRAINED)
    assert sorted(documents(data.held_out(10**6))) == HELD_OUT


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("validation", "named"),
    [
        ("SOURCE", "train/00"), ("train", "train/00"), ("train/0[35].txt", "train/03.txt"),
        ("link.txt", "train/03.txt"), ("rest/../train/shards/", "train/shards"), ("copies", "copies/a.txt"),
        ("train/texts.jsonl", "train/texts.jsonl"),
    ],
)  # fmt: skip
def test_what_is_trained_on_is_not_held_out(
    validation: str, named: str, mixed: bool, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source = (as_shards if named.endswith(("shards", "jsonl")) else as_files)(TRAINED, folders[0])
    (tmp_path / "link.txt").symlink_to(folders[0] / "03.txt")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "a.txt").write_text(TRAINED[3])
    (tmp_path / "copies" / "b.txt").write_text("another" + TRAINED[3])
    held_out = source if validation == "SOURCE" else f"{tmp_path}/{validation}"
    with pytest.raises(ValueError, match=r"data\.validation must hold other texts") as caught:
        opened("ignored" if mixed else source, held_out, sources=(f"{source}=1",) if mixed else ())
    assert str(tmp_path / named) in str(caught.value)
    assert ("from a file with the same bytes" in str(caught.value)) == (validation == "copies")
    assert ("and 1 more" in str(caught.value)) == ("[35]" in validation)


def test_a_file_that_was_written_after_the_shards_of_its_place_is_held_out(folders: tuple[Path, Path]) -> None:
    shards, path = as_shards(TRAINED, folders[0]), Path(as_lines(HELD_OUT, folders[0]))
    later = (folders[0] / "shards" / "manifest.json").stat().st_mtime + 10
    os.utime(path, (later, later))
    assert opened(shards, str(path)).held_out_documents == len(HELD_OUT)


@pytest.mark.parametrize("validation", ["hf:wiki:train", "hf:wiki:default:train"])
def test_a_data_set_and_its_default_split_are_the_same(validation: str) -> None:
    with pytest.raises(ValueError, match=r"data\.validation must hold other texts .* wiki \(default, train\)"):
        opened("hf:wiki", validation)


def test_a_small_file_may_stand_on_both_sides(folders: tuple[Path, Path]) -> None:
    """As a license does."""
    source = as_files([*TRAINED, "license"], folders[0])
    held_out = as_files([*HELD_OUT, "x" * 1000, "license"], folders[1])
    assert opened(source, held_out).held_out_documents == len(HELD_OUT) + 2


# ---- Commands that read one text refuse files of records: markup is not text, and these commands have no field option.

RECORDS = ("a.jsonl", "a.ndjson", "a.json", "a.JSON", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.zst")
OTHERS = ("a.pdf", "a.zip", "a.docx", "a.parquet.gz")
PLAIN = ("a", "a.txt", "a.txt.gz", "a.md", "a.py.zst", "a.json.txt", "json")
READERS = {
    "read and generate": named_text,
    "eval": lambda source: open_texts([source], joined=False),
    "eval --joined": lambda source: open_texts([source], joined=True),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_a_file_of_another_format_is_refused_and_a_text_is_opened(reader, tmp_path):
    for name in (*RECORDS, *OTHERS, *PLAIN):
        path = tmp_path / name
        path.write_bytes(b'{"text": "hello"}\n')
        if name in PLAIN:
            check_plain_text(path)
            assert reader(str(path))
        else:
            with pytest.raises(ValueError, match=r"must be plain text; got .* rename it to end in \.txt"):
                reader(str(path))


def test_modules_that_are_missing_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks a dependency speaks for itself."""
    assert require("json", "data") is json
    with pytest.raises(ImportError, match=r"'not_a_module\.part'.*pip install 'gecko-lm\[data\]'"):
        require("not_a_module.part", "data")
    (tmp_path / "lacks_one.py").write_text("import another_missing_module")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError, match="another_missing_module") as caught:
        require("lacks_one", "data")
    assert "pip install" not in str(caught.value)
