import csv
import gzip
import io
import json
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import load_documents
from gecko.runtime.process import require

characters = partial(st.characters, exclude_categories=["Cs"])
documents = st.lists(st.text(characters(), min_size=1, max_size=30), min_size=1, max_size=6)
any_case = settings(max_examples=20, deadline=None)


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def parquet_of(texts: Sequence[str | None], field: str = "text") -> bytes:
    parquet, pyarrow, file = require("pyarrow.parquet", "data"), require("pyarrow", "data"), io.BytesIO()
    parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), file)
    return file.getvalue()


def frames(content: bytes) -> bytes:
    """Return a file of two zstd frames, as parallel compressors write."""
    middle = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:middle], content[middle:]))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": partial(gzip.compress, mtime=0), ".zst": frames}


def csv_rows(texts: list[str], separator: str) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator).writerows([["id", "body"], *([1, text] for text in texts)])
    return file.getvalue().encode()


RECORDS: dict[str, Callable[[list[str]], bytes]] = {
    ".jsonl": lambda texts: json_lines(texts, "body") + b"\n",
    ".ndjson": lambda texts: json_lines(texts, "body"),
    ".json": lambda texts: json.dumps([{"id": 1, "body": text} for text in texts], indent=1).encode(),
    ".JSON": lambda texts: json_lines(texts, "body"),
    ".csv": lambda texts: csv_rows(texts, ","),
    ".tsv": lambda texts: csv_rows(texts, "\t"),
    ".tab": lambda texts: csv_rows(texts, "\t"),
    ".jl": lambda texts: json_lines(texts, "body"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.mark.parametrize("suffix", RECORDS)
@any_case
@given(documents.filter(lambda texts: len(texts) > 1))
def test_records_of_every_format(folder: Path, suffix: str, texts: list[str]) -> None:
    """Also compressed; a byte-order mark is no text."""
    if suffix in (".csv", ".tsv", ".tab"):
        texts = [text.replace("\0", "0") for text in texts]
    for compression, compress in COMPRESSIONS.items():
        path = folder / f"records{suffix}{compression}"
        path.write_bytes(compress(b"\xef\xbb\xbf" + RECORDS[suffix](texts)))
        assert list(load_documents(str(path), field="body")) == texts


@any_case
@given(st.text(characters(exclude_characters="\0\ufeff"), min_size=1))
def test_text_keeps_every_character(folder: Path, text: str) -> None:
    for compression, compress in COMPRESSIONS.items():
        path = folder / f"book.txt{compression}"
        path.write_bytes(compress(text.encode()))
        assert list(load_documents(path)) == [text]
    path.write_bytes(compress(b"\xef\xbb\xbf" + text.encode()))
    assert list(load_documents(path)) == [text]


@any_case
@given(documents)
def test_parquet(folder: Path, texts: list[str]) -> None:
    """Also of many batches."""
    for written in (texts, texts * 500):
        (folder / "rows.parquet").write_bytes(parquet_of(written, "body"))
        assert list(load_documents(str(folder / "rows.parquet"), field="body")) == written


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_lines_across_pieces(tmp_path: Path, suffix: str) -> None:
    texts = [str(size) * size for size in (3_000_000, 1, 1_500_000, 7)]
    path = tmp_path / f"long.jsonl{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](json_lines(texts)))
    assert list(load_documents(path)) == texts


LEFTOVERS = (
    "a.txt~", "b/#a.txt#", ".#a.txt", ".a.txt.swp", "~$a.txt", "a.txt.bak", "a.txt.ORIG", ".DS_Store", "Thumbs.db",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return files that were not created in the order of their names, with hidden and empty ones in between."""
    names = ("y/a.txt", "b/z.txt", "b/a.txt", "a.txt", "c.jsonl", ".hidden.txt", ".git/config", "b/empty.txt", "B.txt")
    for name in (*names, *LEFTOVERS):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json_lines(["c1", "", "c2"]) if name == "c.jsonl" else name.encode())
    (tmp_path / "b/empty.txt").write_bytes(b"")
    return tmp_path


def test_folder_is_read_at_any_depth_in_order_of_paths(tree: Path) -> None:
    assert list(load_documents(str(tree))) == ["B.txt", "a.txt", "b/a.txt", "b/z.txt", "c1", "c2", "y/a.txt"]


@pytest.mark.parametrize(
    ("sources", "texts"),
    [
        (["/**/*.txt"], ["B.txt", "a.txt", "b/a.txt", "b/z.txt", "y/a.txt"]),
        (["/[ab].*"], ["a.txt"]),
        (["/a.txt~"], ["a.txt~"]),  # what editors leave is read if it is named
        (["/*~"], ["a.txt~"]),
        (["/*.bak"], ["a.txt.bak"]),
        (["~/a.txt", "~/b/*.txt"], ["a.txt", "b/a.txt", "b/z.txt"]),
        (["/b/z.txt", "/b", "/a.txt", "/b/../a.txt"], ["b/z.txt", "b/a.txt", "a.txt"]),  # no file twice
    ],
)
def test_globs_lists_and_the_home_folder(
    tree: Path, sources: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tree))
    named = [source if source.startswith("~") else f"{tree}{source}" for source in sources]
    assert list(load_documents(named if len(named) > 1 else named[0])) == texts


def test_a_name_like_a_glob_and_a_link_beside_its_file(tree: Path) -> None:
    """If a source contained a document twice, one copy could be trained on and the other held out."""
    (tree / "[ab].txt").write_text("brackets")
    assert list(load_documents(f"{tree}/[ab].txt")) == ["brackets"]
    (tree / "b" / "again.txt").symlink_to(tree / "b" / "a.txt")
    assert list(load_documents(tree / "b")) == ["b/a.txt", "b/z.txt"]


def test_stdlib_is_large_and_always_the_same() -> None:
    texts = list(load_documents("stdlib"))
    assert texts == list(load_documents("stdlib"))
    assert sum(map(len, texts)) > 5_000_000
    assert any("class JSONDecoder" in text for text in texts)
    assert not any("class TestCase(unittest" in text for text in texts)


def test_stdlib_leaves_tests_and_other_encodings_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"needs the standard library's \.py files"):
        load_documents("stdlib")
    names = ["os.py", "a/b.py", "test/x.py", "json/tests/x.py", "site-packages/x.py", "_sysconfigdata_x.py", "x.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    assert list(load_documents("stdlib")) == ["a/b.py", "os.py"]


@pytest.mark.parametrize("split", ["", ":train"])
def test_hugging_face_data_set(tmp_path: Path, split: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(json_lines(["one", "two"]))
    assert list(load_documents(f"hf:{tmp_path}{split}")) == ["one", "two"]
    with pytest.raises(ValueError, match="record 0, must have the field 'body'"):
        list(load_documents(f"hf:{tmp_path}{split}", field="body"))


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


# ---- Inputs that must be refused, and the words of the message that say why and where.


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_no_text(tmp_path: Path, name: str, whole_folder: bool) -> None:
    compress = COMPRESSIONS.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(b""))
    with pytest.raises(ValueError, match="which is empty"):
        list(load_documents(tmp_path if whole_folder else tmp_path / name))
    if compress is not bytes:  # the file was truncated at its start
        (tmp_path / name).write_bytes(b"")
        (tmp_path / "other.txt").write_text("text")
        with pytest.raises(ValueError, match=r"a whole (gzip|zstd) file.*it is empty"):
            list(load_documents(tmp_path if whole_folder else tmp_path / name))


def test_zstd_with_a_long_window(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    content = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(content.compress(b"far back") + content.flush())
    assert list(load_documents(tmp_path)) == ["far back"]


@pytest.mark.parametrize("row", [1, 2, 1500])
def test_parquet_that_is_not_utf_8_names_file_and_row(tmp_path: Path, row: int) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = [b"fine"] * (row - 1) + [b"a\xffc"] + [b"fine"] * 3
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=rf"x\.parquet, row {row}, must be UTF-8 text; .* 0xff at byte offset 1"):
        list(load_documents(tmp_path / "x.parquet"))


def test_files_that_are_small_or_long(tmp_path: Path) -> None:
    """One record is as a list of it; a cell may be longer than the CSV module takes by itself."""
    (tmp_path / "x.json").write_text('{"text": "one"}')
    (tmp_path / "y.json").write_text("\n")
    (tmp_path / "z.csv").write_text("")
    text = "long, " * 100_000
    (tmp_path / "zz.csv").write_text(f'text\n"{text}"\n')
    assert list(load_documents(tmp_path)) == ["one", text]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("", ValueError, "a source of documents must be named"),
        ([], ValueError, "a source of documents must be named"),
        (["a.txt", ""], ValueError, "a source of documents must be named"),
        ("empty", FileNotFoundError, "must hold at least one file"),
        ("./*.csv", FileNotFoundError, r"a glob must match at least one file; got .*\*\.csv"),
        ("book.txt", FileNotFoundError, r"book\.txt', which does not exist\. Did you mean .*books\.txt'"),
        ("stdlb", FileNotFoundError, "Did you mean 'stdlib'"),
        ("hf:", ValueError, r"must be named as hf:NAME\[:split\]"),
        ("hf:a:", ValueError, r"must be named as hf:NAME\[:split\]"),
        ("hf:a:b:c:d", ValueError, r"must be named as hf:NAME\[:split\]"),
    ],
)
def test_sources_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | list[str], error: type[Exception], message: str
) -> None:
    """They are refused at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        load_documents(source)


def test_a_data_set_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be one that can be reached"):
        list(load_documents("hf:./missing"))


JSON_LINES = {
    b'{"text": "a"': "must hold one JSON object; got invalid JSON",
    b"[" * 100_000: "must hold one JSON object; got invalid JSON",
    b'{"text": ' + b"1" * 5000 + b"}": "must hold one JSON object; got invalid JSON",
    b'{"text": "a", "id": 1, "text": "b"}': "must hold one JSON object; .* .the name 'text' is twice in one object",
    b"[1]": "must hold one JSON object; got a list",
    b'{"body": "a", "id": 1}': r"must have the field 'text' .* got the fields \['body', 'id'\]",
    b'{"text": 5}': "must hold a string in its field 'text'; got a int",
    b'{"text": null}': "must hold a string in its field 'text'; got null",
    b'{"text": "\xff"}': "must be UTF-8 text; got the invalid byte 0xff at byte offset 10",
    b'{"text": "\\ud800"}': "must hold text that UTF-8 can write; got half a surrogate pair",
}
BINARY = {b"ab\0cd": "a NUL byte at byte offset 2", b"abc\xff": "the invalid byte 0xff at byte offset 3"}
CUT = bytes(range(32, 127)) * 300


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("x.jsonl", json_lines(["fine"]) + b"\n" + line + b"\n", rf"x\.jsonl, line 3, {message}")
          for line, message in JSON_LINES.items()),
        *((name := f"x{suffix}", compress(content), f"{re.escape(name)} must be UTF-8 text; got {message}")
          for suffix, compress in COMPRESSIONS.items() for content, message in BINARY.items()),
        ("x.txt.gz", "this was never compressed", r"x\.txt\.gz must be a whole gzip file"),
        ("x.txt.zst", "this was never compressed", r"x\.txt\.zst must be a whole zstd file"),
        *((f"x.txt{suffix}", COMPRESSIONS[suffix](CUT)[: int(len(COMPRESSIONS[suffix](CUT)) * kept)],
           "must be a whole (gzip|zstd) file.*truncated or damaged")
          for suffix in (".gz", ".zst") for kept in (0.1, 0.4, 0.99)),
        *(("x.parquet", content, r"x\.parquet must be a whole Parquet file; got one that is truncated")
          for content in (lambda: parquet_of(["a", "b"])[:-9], "x", "")),
        ("x.parquet", lambda: parquet_of(["a", None]), "row 2, must hold a string in its field 'text'; got null"),
        ("x.parquet", lambda: parquet_of(["a"], "body"), r"the column 'text' .* got the columns \['id', 'body'\]"),
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
def test_files_that_are_malformed(tmp_path: Path, name: str, content: object, message: str) -> None:
    content = content() if callable(content) else content
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(tmp_path))}.*{message}"):
        list(load_documents(tmp_path / name))


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


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/*/*.txt", "/s*/c.txt", "/**"])
def test_a_folder_that_cannot_be_listed_is_an_error(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents would be left out in silence. A folder that the glob does not enter may be closed."""
    for name in ("a.txt", "sub/c.txt", "closed/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    listed = Path.iterdir

    def closed(path: Path) -> Any:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    if pattern == "/s*/c.txt":
        assert list(load_documents(f"{tmp_path}{pattern}")) == ["sub/c.txt"]
    else:
        with pytest.raises(PermissionError, match="closed"):
            load_documents(f"{tmp_path}{pattern}")


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    """As folders and as globs: linked folders are read, each file once, and a link to nothing is an error."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    (tmp_path / "data" / "c").mkdir(parents=True)
    (tmp_path / "data" / "c" / "a.txt").write_text("a")
    for name, target in (("data/d", "../elsewhere"), ("data/one", "."), ("data/c/two", "..")):
        (tmp_path / name).symlink_to(target)
    for source in ("data", "data/**/*.txt", "data/**", "data/[cd]/*.txt"):
        assert list(load_documents(str(tmp_path / source))) == ["a", "b"], source
    (tmp_path / "data" / "broken.txt").symlink_to("nowhere")
    for source in ("data", "data/**/*.txt", "data/*.txt"):
        with pytest.raises(FileNotFoundError, match=r"broken\.txt"):
            list(load_documents(str(tmp_path / source)))
