"""Lanes: the rows of a lane join to consecutive text, in documents that keep one segment id; lanes share no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import as_lines, as_shards, words

from gecko.data import ByteTokenizer, DataRequest, TokenizedCorpus, open_training_data
from gecko.data.loader import IGNORED, LaneRows, PackedRows, Rows
from gecko.data.training_data import lane_counts

any_case = settings(max_examples=60, deadline=None)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=12)


def check_lane(rows: Rows, lanes: int, lane: int, steps: int) -> list[tuple[int, int]]:
    """Check that each row of a lane goes on where the one before ended. Return all its segment ids and tokens."""
    read: list[tuple[int, int]] = []
    expected = IGNORED
    for step in range(steps):
        tokens, targets, segments = rows.row(step * lanes + lane)
        if expected != IGNORED:
            assert (tokens[0], segments[0]) == (expected, read[-1][0])
        elif read:
            assert segments[0] != read[-1][0]
        expected = targets[-1]
        read += zip(segments.tolist(), tokens.tolist(), strict=True)
    return read


def numbered(lengths: list[int]) -> TokenizedCorpus:
    """Return a corpus in which every token is another number."""
    return TokenizedCorpus.of_whole(np.arange(sum(lengths), dtype=np.uint32), lengths)


@any_case
@given(lengths, st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_an_epoch_of_lanes_reads_consecutive_tokens_once(
    lengths: list[int], length: int, lanes: int, seed: int
) -> None:
    corpus = numbered(lengths)
    if (corpus.num_tokens - 1) // length < lanes:
        return
    rows = LaneRows(PackedRows(corpus, length, seed), lanes, seed)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen: Counter[int] = Counter()
    for lane in range(lanes):
        read = check_lane(rows, lanes, lane, rows.rows_per_lane)
        seen.update(token for _, token in read)
        assert len({(segment, document[token]) for segment, token in read}) == len({segment for segment, _ in read})
    assert set(seen.values()) == {1}
    assert corpus.num_tokens - 1 - sum(seen.values()) in range(length * lanes)


@any_case
@given(lengths, st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_no_document_goes_on_into_the_next_epoch(lengths: list[int], length: int, lanes: int, seed: int) -> None:
    corpus = numbered(lengths)
    if (corpus.num_tokens - 1) // length < lanes:
        return
    rows = LaneRows(PackedRows(corpus, length, seed), lanes, seed)
    per_epoch = [
        {
            int(segment)
            for index in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch)
            for segment in rows.row(index)[2]
        }
        for epoch in range(3)
    ]
    assert not (per_epoch[0] & per_epoch[1] or per_epoch[1] & per_epoch[2] or per_epoch[0] & per_epoch[2])


@pytest.mark.parametrize("make", [as_lines, as_shards])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_lanes_of_every_kind_of_source(make: Callable[[list[str], Path], str], batch_size: int, tmp_path: Path) -> None:
    texts = [words(5 + 7 * number, number) for number in range(9)]
    request = DataRequest(16, 0.2, 3, lanes=batch_size)
    data = open_training_data(make(texts, tmp_path), (), ByteTokenizer(), request)
    decode = ByteTokenizer().decode
    for lane in range(batch_size):
        read = check_lane(data.rows, batch_size, lane, data.rows.rows_per_epoch // batch_size)
        for segment in {segment for segment, _ in read}:
            found = decode([token for at, token in read if at == segment and token < 256])
            assert any(found.rstrip("\0") in text for text in texts)


def test_each_source_of_a_mixture_has_its_lanes(tmp_path: Path) -> None:
    sources = []
    for name in ("ab", "cd"):
        (tmp_path / name).mkdir()
        sources.append(as_lines([name * (20 + number) for number in range(30)], tmp_path / name))
    request = DataRequest(16, 0.1, 0, lanes=4)
    data = open_training_data("", [f"{sources[0]}=3", f"{sources[1]}=1"], ByteTokenizer(), request)
    for lane, letters in enumerate(["ab", "ab", "ab", "cd"]):
        read = check_lane(data.rows, 4, lane, data.rows.rows_per_epoch // 4)
        assert {token for _, token in read if 0 < token < 256} == set(letters.encode())


def test_lanes_are_divided_by_the_weights() -> None:
    assert lane_counts([0.7, 0.3], 10) == [7, 3]
    assert lane_counts([1, 1, 1], 4) in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    with pytest.raises(ValueError, match=r"carry_state each source must have a lane.*Try a larger batch_size"):
        lane_counts([0.99, 0.01], 8)
