"""Token shards: rows, held-out documents and refusals."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import IGNORED, ByteTokenizer, ShardFolder, load_tokenizer
from gecko.data.packing import Shuffle
from gecko.data.shards import FIRST_EPOCH, Shard, ShardedRows, ShardRecord, SplitShards, TokenizerRecord
from gecko.data.training_data import DataRequest, open_training_data, read_sources

any_case = settings(max_examples=60, deadline=None)
TOKENIZER = TokenizerRecord("numbers", "numbers", 1 << 20, 0, 0)


class Shards:
    """Shards in memory; every token of the corpus is a different number, so that rows show where they come from."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.shards, self.documents, first = [], [], 0
        for number, of_shard in enumerate(lengths):
            count = sum(of_shard)
            record = ShardRecord(f"{number:05d}", "numbers", len(of_shard), count, count - 2 * len(of_shard), ())
            files = {
                f"{number:05d}.ds": np.arange(first, first + count, dtype="<u4"),
                f"{number:05d}.ds.index": np.cumsum(of_shard, dtype="<u8"),
                f"{number:05d}.ds.bytes": np.array(of_shard, "<u8") - 2,
            }
            shard = Shard(Path(), record, TOKENIZER.dtype, lambda path, _, files=files: files[path.name])
            begins = first + np.cumsum(of_shard) - np.array(of_shard)
            self.documents += [range(int(b), int(b) + n) for b, n in zip(begins, of_shard, strict=True)]
            self.shards.append(shard)
            first += count
        self.folder = ShardFolder(Path("numbers"), TOKENIZER, tuple(self.shards))

    def document_of(self, token: int) -> int:
        return next(number for number, document in enumerate(self.documents) if token in document)


corpora = st.lists(st.lists(st.integers(3, 20), min_size=1, max_size=8), min_size=1, max_size=5).filter(
    lambda lengths: sum(map(len, lengths)) > 1
)


@any_case
@given(corpora, st.floats(0.01, 0.99), st.integers(0, 2**60))
def test_every_token_is_either_trained_on_or_held_out(lengths: list[list[int]], fraction: float, seed: int) -> None:
    corpus = Shards(lengths)
    split = SplitShards(corpus.folder, fraction, seed)
    held_out = split.held_out_corpus(10**9)
    documents = [tuple(held_out.document(index)) for index in range(len(held_out))]
    total = sum(map(sum, lengths))
    assert len(set(documents)) == len(documents) == split.held_out_documents
    assert split.documents + len(documents) == len(corpus.documents) + split.divided
    assert 0 < held_out.num_tokens == split.held_out_tokens <= max(fraction * total, 3)
    whole = {tuple(document) for document in corpus.documents}
    assert sum(document not in whole for document in documents) == split.divided <= len(lengths)
    assert sum(part.tokens for part in split.training) == split.tokens == total + split.divided - held_out.num_tokens
    again = SplitShards(corpus.folder, fraction, seed).held_out_corpus(10**9)
    assert [tuple(again.document(index)) for index in range(len(again))] == documents


@any_case
@given(corpora, st.integers(1, 20), st.integers(0, 2**60), st.integers(0, 3))
def test_every_epoch_covers_the_training_documents_once(
    lengths: list[list[int]], length: int, seed: int, epoch: int
) -> None:
    corpus = Shards(lengths)
    split = SplitShards(corpus.folder, 0.3, seed)
    held_out = set(split.held_out_corpus(10**9).tokens.tolist())
    if sum(part.tokens for part in split.training) <= length:
        return
    rows = ShardedRows(split, length)
    seen, scored, count = Counter[int](), Counter[int](), rows.rows_per_epoch
    for row in range(count):
        tokens, targets, segments = rows.row(epoch * count + row)
        filled = min(length, split.tokens - Shuffle(count, seed, FIRST_EPOCH + epoch)[row] * length)
        assert len(tokens) == length and set(targets[filled:]) <= {IGNORED}
        assert set(segments[filled:]) <= {segments[filled - 1] + 1}
        tokens, targets, segments = tokens[:filled], targets[:filled], segments[:filled]
        of = [corpus.document_of(token) for token in tokens]
        ordinals = list(dict.fromkeys(of))
        assert segments.tolist() == [ordinals.index(document) for document in of]
        for token, target, document in zip(tokens, targets, of, strict=True):
            ends = token == corpus.documents[document][-1] or token + 1 in held_out
            assert target == (IGNORED if ends else token + 1)
        seen.update(tokens.tolist())
        scored.update(target for target in targets.tolist() if target != IGNORED)
    starts = {document[0] for document in corpus.documents}
    # The start of a document that is divided is in both parts.
    divided = {part.shard.tokens[part.first_token] for part in split.training if part.cut}
    trained = {token for document in corpus.documents for token in document} - (held_out - divided)
    assert scored == Counter(trained - starts)
    assert held_out & set(seen) <= divided
    # The last token of all is a target, and need not be an input.
    assert set(seen.values()) == {1} and len(trained - set(seen)) <= 1


def test_rows_of_the_first_layout_never_change() -> None:
    """They omit tokens that do not fill a row; a run that started with them needs them until its end."""
    rows = SplitShards(Shards([[9, 14], [12, 11, 8]]).folder, 0.2, 5, layout=1).rows(6)
    assert [rows.row(index)[0].tolist() for index in range(2 * rows.rows_per_epoch)] == FIRST_LAYOUT


FIRST_LAYOUT = [
    [*range(first, first + 6)] if first != 18 else [18, 19, 20, 21, 22, 35]
    for first in (0, 36, 6, 42, 18, 12, 18, 0, 6, 36, 12, 42)
]


@any_case
@given(st.integers(1, 300), st.integers(0, 2**60), st.integers(0, 2**60))
def test_shuffle_is_a_permutation(count: int, seed: int, stream: int) -> None:
    shuffle = Shuffle(count, seed, stream)
    assert sorted(shuffle[index] for index in range(count)) == list(range(count))


def test_shuffle_never_changes_and_mixes() -> None:
    """These numbers hold for every version; a change would break resuming old runs."""
    assert [Shuffle(10, 1, 2)[index] for index in range(10)] == [4, 2, 1, 8, 0, 9, 3, 5, 6, 7]
    first, second = ([Shuffle(10_000, 0, stream)[index] for index in range(10_000)] for stream in (0, 1))
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert 0 <= Shuffle(10**15, 3, 4)[10**15 - 1] < 10**15


# Shards on disk.

REQUEST = DataRequest(sequence_length=8, validation_fraction=0.2, seed=0)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture
def settled(shard_folder: Path) -> Path:
    """Return the folder with files that changed long ago."""
    for path in shard_folder.iterdir():
        os.utime(path, (0, 0))
    return shard_folder


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Open training data; return the sorted names of the files that are read to be verified."""
    read: list[str] = []
    digest = hashlib.file_digest

    def reading(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, name)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", reading)
        open_training_data(str(folder), (), ByteTokenizer(), REQUEST)
    return sorted(read)


def test_a_file_that_was_verified_is_not_read_again(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(opened(settled, monkeypatch)) == 9
    assert opened(settled, monkeypatch) == []
    os.utime(settled / "00001.ds", (1, 1))
    assert opened(settled, monkeypatch) == ["00001.ds"]
    (settled / ".verified" / "00002.ds.json").write_text("{")
    assert opened(settled, monkeypatch) == ["00002.ds"]


def test_a_byte_that_changes_after_the_stamp_is_found(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its size and the time of its last change are as before."""
    opened(settled, monkeypatch)
    flip(settled / "00001.ds", 0)
    os.utime(settled / "00001.ds", (0, 0))
    with pytest.raises(ValueError, match=r"00001\.ds is damaged"):
        opened(settled, monkeypatch)


def test_a_file_that_changed_just_now_gets_no_stamp(shard_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(shard_folder, monkeypatch) == opened(shard_folder, monkeypatch) != []


def test_few_files_are_open_at_a_time(shard_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus may have more files than a process may open."""
    whole = open_training_data(str(shard_folder), (), ByteTokenizer(), REQUEST).loader(4)
    expected = [whole.batch(step).tokens for step in range(20)]
    del whole
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("gecko.data.shards.OPEN_FILES", 2)
    loader = open_training_data(str(shard_folder), (), ByteTokenizer(), REQUEST).loader(4)
    for step, tokens in enumerate(expected):
        assert loader.batch(step).tokens.equal(tokens)
    assert len(os.listdir("/proc/self/fd")) - before <= 2


@pytest.mark.parametrize("suffix", [".ds", ".ds.index", ".ds.bytes"])
def test_a_changed_byte_is_found(shard_folder: Path, suffix: str) -> None:
    flip(shard_folder / f"00001{suffix}", 16)
    with pytest.raises(ValueError, match=rf"00001\{suffix} is damaged: it does not match its SHA-256, .*Restore it"):
        open_training_data(str(shard_folder), (), ByteTokenizer(), REQUEST)
    # Each of two ranks checks its own shards.
    request = DataRequest(8, 0.2, 0, rank=0, ranks=2)
    read_sources(str(shard_folder), (), ByteTokenizer(), request)


def test_folders_that_do_not_fit_are_refused(shard_folder: Path, bpe_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"made with the tokenizer 'bytes' \(257 ids.*Set data\.tokenizer=bytes"):
        open_training_data(str(shard_folder), (), load_tokenizer(str(bpe_folder)), REQUEST)
    path = shard_folder / "00000.ds"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=rf"00000\.ds must have {size} bytes; it has {size - 2}\."):
        ShardFolder.open(shard_folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"00000\.ds must have .* there is none"):
        ShardFolder.open(shard_folder)
    for content in ("{", "[]", '{"format": "other"}', '{"format": "gecko-shards-1", "shards": []}'):
        (shard_folder / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match="must hold a manifest of token shards"):
            ShardFolder.open(shard_folder)


def test_data_opens_from_shards(shard_folder: Path, texts: list[str]) -> None:
    """Unless they are too few."""
    data = open_training_data(str(shard_folder), (), ByteTokenizer(), REQUEST)
    assert data.documents + data.held_out_documents == len(texts)
    assert data.loader(4).batch(3).tokens.shape == (4, 8)
    assert data.loader(4, parts=2).batch(0).tokens.shape == (2, 8)
    assert data.held_out(30).num_tokens >= 29  # a single border token at the cut is dropped
    with pytest.raises(ValueError, match=r"one batch takes 9999 rows and .* before the first comes again \(\d+ doc"):
        data.loader(9999)
    with pytest.raises(ValueError, match=r"a row takes sequence_length \+ 1 = 100001 tokens"):
        open_training_data(str(shard_folder), (), ByteTokenizer(), DataRequest(100_000, 0.2, 0))
    with pytest.raises(ValueError, match=r"a source must have at least 4 tokens, .* got 3"):
        SplitShards(Shards([[3]]).folder, 0.1, 0)
