import csv
import gzip
import io
import json
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import load_documents
from gecko.runtime.process import require

documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), min_size=1, max_size=6)


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write_parquet(path: Path, texts: Sequence[str | None], field: str = "text") -> None:
    parquet, pyarrow = require("pyarrow.parquet", "data"), require("pyarrow", "data")
    parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path)


def frames(content: bytes) -> bytes:
    """Return a file of two zstd frames, as parallel compressors write."""
    middle = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:middle], content[middle:]))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": partial(gzip.compress, mtime=0), ".zst": frames}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@settings(max_examples=30, deadline=None)
@given(texts=documents)
def test_json_lines(folder: Path, suffix: str, texts: list[str]) -> None:
    path = folder / f"records.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](json_lines(texts, "body") + b"\n"))
    assert list(load_documents(str(path), field="body")) == texts


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), min_size=1))
def test_text_keeps_every_character(folder: Path, suffix: str, text: str) -> None:
    path = folder / f"book.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](text.encode()))
    assert list(load_documents(path)) == [text]


@settings(max_examples=30, deadline=None)
@given(texts=documents)
def test_parquet(folder: Path, texts: list[str]) -> None:
    write_parquet(folder / "rows.parquet", texts, "body")
    assert list(load_documents(str(folder / "rows.parquet"), field="body")) == texts


def test_parquet_of_many_batches(tmp_path: Path) -> None:
    texts = [f"row {row}" for row in range(3000)]
    write_parquet(tmp_path / "rows.parquet", texts)
    assert list(load_documents(tmp_path / "rows.parquet")) == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_lines_across_pieces(tmp_path: Path, suffix: str) -> None:
    texts = [str(size) * size for size in (3_000_000, 1, 1_500_000, 7)]
    path = tmp_path / f"long.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](json_lines(texts)))
    assert list(load_documents(path)) == texts


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["two"]))
    assert list(load_documents(tmp_path)) == ["one", "two"]


LEFTOVERS = (
    "a.txt~",
    "b/#a.txt#",
    ".#a.txt",
    ".a.txt.swp",
    "~$a.txt",
    "a.txt.bak",
    "a.txt.ORIG",
    ".DS_Store",
    "Thumbs.db",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return files that were not created in the order of their names, with hidden and empty ones in between."""
    for name in (
        "y/a.txt",
        "b/z.txt",
        "b/a.txt",
        "a.txt",
        "c.jsonl",
        ".hidden.txt",
        *LEFTOVERS,
        ".git/config",
        "b/empty.txt",
        "B.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json_lines(["c1", "", "c2"]) if name == "c.jsonl" else name.encode())
    (tmp_path / "b/empty.txt").write_bytes(b"")
    return tmp_path


def test_folder_is_read_at_any_depth_in_order_of_paths(tree: Path) -> None:
    assert list(load_documents(str(tree))) == ["B.txt", "a.txt", "b/a.txt", "b/z.txt", "c1", "c2", "y/a.txt"]


def test_glob(tree: Path) -> None:
    assert list(load_documents(f"{tree}/**/*.txt")) == ["B.txt", "a.txt", "b/a.txt", "b/z.txt", "y/a.txt"]
    assert list(load_documents(f"{tree}/[ab].*")) == ["a.txt"]


def test_what_editors_leave_is_read_if_it_is_named(tree: Path) -> None:
    assert list(load_documents(f"{tree}/a.txt~")) == list(load_documents(f"{tree}/*~")) == ["a.txt~"]
    assert list(load_documents(f"{tree}/*.bak")) == ["a.txt.bak"]


def test_file_whose_name_is_like_a_glob(tree: Path) -> None:
    (tree / "[ab].txt").write_text("brackets")
    assert list(load_documents(f"{tree}/[ab].txt")) == ["brackets"]


def test_home_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert list(load_documents(["~/a.txt", "~/b/*.txt"])) == ["a.txt", "b/a.txt", "b/z.txt"]


def test_list_keeps_its_order_and_reads_no_file_twice(tree: Path) -> None:
    sources = [f"{tree}/b/z.txt", f"{tree}/b", f"{tree}/a.txt", f"{tree}/b/../a.txt"]
    assert list(load_documents(sources)) == ["b/z.txt", "b/a.txt", "a.txt"]


def test_a_link_beside_its_file_is_not_read_again(tree: Path) -> None:
    """If a source contained a document twice, one copy could be trained on and the other held out."""
    (tree / "b" / "again.txt").symlink_to(tree / "b" / "a.txt")
    assert list(load_documents(tree / "b")) == ["b/a.txt", "b/z.txt"]


def test_stdlib_is_large_and_always_the_same() -> None:
    first, second = list(load_documents("stdlib")), list(load_documents("stdlib"))
    assert first == second
    assert sum(map(len, first)) > 5_000_000
    assert any("class JSONDecoder" in text for text in first)
    assert not any("class TestCase(unittest" in text for text in first)


def test_stdlib_leaves_tests_and_other_encodings_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["os.py", "a/b.py", "test/x.py", "json/tests/x.py", "site-packages/x.py", "_sysconfigdata_x.py", "x.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(load_documents("stdlib")) == ["a/b.py", "os.py"]


def test_stdlib_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"needs the standard library's \.py files"):
        load_documents("stdlib")


@pytest.mark.parametrize("split", ["", ":train"])
def test_hugging_face_data_set(tmp_path: Path, split: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(json_lines(["one", "two"]))
    assert list(load_documents(f"hf:{tmp_path}{split}")) == ["one", "two"]


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [("hf:a/b", ("a/b", None, "train")), ("hf:a:test", ("a", None, "test")), ("hf:a:cfg:test", ("a", "cfg", "test"))],
)
def test_hugging_face_name(spec: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (name, config, split) == arguments and streaming
        return [{"text": "one"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert list(load_documents(spec)) == ["one"]


# Inputs that must be refused, and the words of the message that say why and where.


def refuse(source: str | Path | list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(load_documents(source))


def test_missing_path_is_refused_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "books.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"book\.txt', which does not exist\. Did you mean .*books\.txt'"):
        load_documents(str(tmp_path / "book.txt"))
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'stdlib'"):
        load_documents("stdlb")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_no_text(tmp_path: Path, name: str, whole_folder: bool) -> None:
    (tmp_path / name).write_bytes(COMPRESSIONS.get(Path(name).suffix, bytes)(b""))
    refuse(tmp_path if whole_folder else tmp_path / name, ValueError, "which is empty")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_compressed_file_of_no_bytes(tmp_path: Path, name: str, whole_folder: bool) -> None:
    """The file was truncated at its start."""
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "other.txt").write_text("text")
    refuse(tmp_path if whole_folder else tmp_path / name, ValueError, "a whole (gzip|zstd) file.*it is empty")


def test_zstd_with_a_long_window(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    content = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(content.compress(b"far back") + content.flush())
    assert list(load_documents(tmp_path)) == ["far back"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.1, 0.4, 0.99])
def test_truncated_compressed_file(tmp_path: Path, suffix: str, keep: float) -> None:
    content = COMPRESSIONS[suffix](bytes(range(32, 127)) * 300)
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(content[: int(len(content) * keep)])
    refuse(path, ValueError, f"{re.escape(str(path))} must be a whole (gzip|zstd) file.*truncated or damaged")


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: b"x", lambda content: b""])
def test_truncated_parquet(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, ["a", "b"])
    path.write_bytes(damage(path.read_bytes()))
    refuse(path, ValueError, r"rows\.parquet must be a whole Parquet file; got one that is truncated")


def test_parquet_without_the_column_or_the_text(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, ["a", None])
    refuse(path, ValueError, "row 2, must hold a string in its field 'text'; got null")
    write_parquet(path, ["a"], "body")
    refuse(path, ValueError, r"must have the column 'text' .* got the columns \['id', 'body'\]")


@pytest.mark.parametrize("row", [1, 2, 1500])
def test_parquet_that_is_not_utf_8_names_file_and_row(tmp_path: Path, row: int) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = [b"fine"] * (row - 1) + [b"a\xffc"] + [b"fine"] * 3
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    refuse(tmp_path / "x.parquet", ValueError, rf"x\.parquet, row {row}, must be UTF-8 text; .* 0xff at byte offset 1")


def csv_rows(texts: list[str], separator: str) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator).writerows([["id", "body"], *([1, text] for text in texts)])
    return file.getvalue().encode()


RECORDS: dict[str, Callable[[list[str]], bytes]] = {
    ".ndjson": lambda texts: json_lines(texts, "body"),
    ".json": lambda texts: json.dumps([{"id": 1, "body": text} for text in texts], indent=1).encode(),
    ".JSON": lambda texts: json_lines(texts, "body"),
    ".csv": lambda texts: csv_rows(texts, ","),
    ".tsv": lambda texts: csv_rows(texts, "\t"),
    ".tab": lambda texts: csv_rows(texts, "\t"),
    ".jl": lambda texts: json_lines(texts, "body"),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("suffix", RECORDS)
@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=2)
)
def test_records_of_other_formats(folder: Path, suffix: str, compression: str, texts: list[str]) -> None:
    path = folder / f"records{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](b"\xef\xbb\xbf" + RECORDS[suffix](texts)))
    assert list(load_documents(str(path), field="body")) == texts


def test_one_record_as_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"text": "one"}')
    (tmp_path / "y.json").write_text("\n")
    (tmp_path / "z.csv").write_text("")
    assert list(load_documents(tmp_path)) == ["one"]


def test_a_cell_longer_than_the_csv_module_takes_by_itself(tmp_path: Path) -> None:
    text = "long, " * 100_000
    (tmp_path / "x.csv").write_text(f'text\n"{text}"\n')
    assert list(load_documents(tmp_path)) == [text]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("", ValueError, "a source of documents must be named"),
        ([], ValueError, "a source of documents must be named"),
        (["a.txt", ""], ValueError, "a source of documents must be named"),
        (".", FileNotFoundError, "must hold at least one file"),
        ("./*.txt", FileNotFoundError, r"a glob must match at least one file; got .*\*\.txt"),
        ("hf:", ValueError, r"must be named as hf:NAME\[:split\]"),
        ("hf:a:", ValueError, r"must be named as hf:NAME\[:split\]"),
        ("hf:a:b:c:d", ValueError, r"must be named as hf:NAME\[:split\]"),
        ("hf:./missing", ValueError, "must be one that can be reached"),
    ],
)
def test_sources_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | list[str], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(source, error, message)


JSON_LINES = {
    b'{"text": "a"': "must hold one JSON object; got invalid JSON",
    b"[" * 100_000: "must hold one JSON object; got invalid JSON",
    b'{"text": ' + b"1" * 5000 + b"}": "must hold one JSON object; got invalid JSON",
    b"[1]": "must hold one JSON object; got a list",
    b'{"body": "a", "id": 1}': r"must have the field 'text' .* got the fields \['body', 'id'\]",
    b'{"text": 5}': "must hold a string in its field 'text'; got a int",
    b'{"text": null}': "must hold a string in its field 'text'; got null",
    b'{"text": "\xff"}': "must be UTF-8 text; got the invalid byte 0xff at byte offset 10",
    b'{"text": "\\ud800"}': "must hold text that UTF-8 can write; got half a surrogate pair",
}
BINARY = {b"ab\0cd": "a NUL byte at byte offset 2", b"abc\xff": "the invalid byte 0xff at byte offset 3"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("x.jsonl", json_lines(["fine"]) + b"\n" + line + b"\n", rf"x\.jsonl, line 3, {message}")
          for line, message in JSON_LINES.items()),
        *((name := f"x{suffix}", compress(content), f"{re.escape(name)} must be UTF-8 text; got {message}")
          for suffix, compress in COMPRESSIONS.items() for content, message in BINARY.items()),
        ("x.txt.gz", "this was never compressed", r"x\.txt\.gz must be a whole gzip file"),
        ("x.txt.zst", "this was never compressed", r"x\.txt\.zst must be a whole zstd file"),
        ("x.json", '[{"text": "a"}, 5]', r"x\.json, record 2, must hold one JSON object; got a int"),
        ("x.json", '[{"text": "a"}, {"body": "a"}]', r"record 2, must have the field 'text' .*\['body'\]"),
        ("x.json", '[{"text": "a"}', r"x\.json must hold a list of JSON objects.*invalid JSON"),
        ("x.json", '{"text": "a"}\n{"text": 1}', r"x\.json, line 2, must hold a string"),
        ("x.json", "[" * 100_000, r"x\.json must hold a list of JSON objects"),
        ("x.json", '{"name": "package"}', "must have the field 'text'"),
        ("x.csv", "a,b\n1,2\n", r"must have the column 'text' .* got the columns \['a', 'b'\]"),
        ("x.csv", "text,text\n1,2\n", "must have one column 'text'; got 2"),
        ("x.csv", "id,text\n1,one, two\n", r"x\.csv, line 2, must have 2 cells.*got 3"),
        ("x.csv", "id,text\n1,one\n2\n", r"x\.csv, line 3, must have 2 cells.*got 1"),
        ("x.csv", 'id,text\n1,"one\n2,two\n', r"x\.csv, line 3, must be CSV with the quotes"),
        ("x.csv", "id,text\n1,a\0b\n", r"x\.csv, line 2, must be UTF-8 text; got a NUL byte at byte offset 3"),
    ],
)  # fmt: skip
def test_files_that_are_malformed(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    refuse(tmp_path / name, ValueError, f"(?s){re.escape(str(tmp_path))}.*{message}")


def test_a_data_set_without_the_field(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(json_lines(["one"], "body"))
    refuse(f"hf:{tmp_path}", ValueError, "record 0, must have the field 'text'")


@pytest.mark.parametrize(
    "name",
    ["x.zip", "x.tar", "x.tar.gz", "x.PDF", "x.docx", "x.pkl", "x.arrow", "x.parquet.gz", "x.xz", "x.ipynb", "x.psv"],
)
def test_formats_that_are_no_text_are_refused_at_once(tmp_path: Path, name: str) -> None:
    """Also if each byte of the file could be text, as in a pickle of protocol 0, and for whole folders."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).write_text("could be text")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} must be text, \.jsonl.* or \.parquet; got '\..*', which is"):
            load_documents(str(source))
