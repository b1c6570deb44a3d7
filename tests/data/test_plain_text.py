"""Commands that read one text refuse files of records: markup is not text, and these commands have no field option."""

from __future__ import annotations

import pytest

from gecko.cli.arguments import named_text
from gecko.data.readers import check_plain_text
from gecko.eval.scored_model import open_texts

RECORDS = ("a.jsonl", "a.ndjson", "a.json", "a.JSON", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.zst")
OTHERS = ("a.pdf", "a.zip", "a.docx", "a.parquet.gz")
PLAIN = ("a", "a.txt", "a.txt.gz", "a.md", "a.py.zst", "a.json.txt", "json")
READERS = {
    "read and generate": named_text,
    "eval": lambda source: open_texts([source], joined=False),
    "eval --joined": lambda source: open_texts([source], joined=True),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("name", [*RECORDS, *OTHERS])
def test_a_file_of_another_format_is_refused(name, reader, tmp_path):
    path = tmp_path / name
    path.write_bytes(b'{"text": "hello"}\n')
    with pytest.raises(ValueError, match=r"must be plain text; got .* rename it to end in \.txt"):
        reader(str(path))


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("name", PLAIN)
def test_a_text_is_opened(name, reader, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"hello")
    check_plain_text(path)
    assert reader(str(path))
