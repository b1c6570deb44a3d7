"""Rows: documents packed into them, and lanes that they join to."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.corpora import as_lines, as_shards, words

from gecko.data import ByteTokenizer, DataRequest, TokenizedCorpus, Tokenizer, open_training_data
from gecko.data.loader import IGNORED, LaneRows, PackedRows, Rows
from gecko.data.packing import permutation
from gecko.data.tokenizers import TokenIds
from gecko.data.training_data import lane_counts

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12).filter(any)
any_case = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_case
@given(texts=texts)
def test_documents_are_kept_between_their_borders(tokenizer: Tokenizer, texts: list[str]) -> None:
    corpus = TokenizedCorpus.build(iter(texts), tokenizer)
    expected = [
        [tokenizer.document_start, *tokenizer.encode(text).tolist(), tokenizer.document_end] for text in texts if text
    ]
    assert [corpus.document(index).tolist() for index in range(len(corpus))] == expected
    assert corpus.num_tokens == sum(map(len, expected)) == len(corpus.tokens)


def test_text_without_tokens_is_no_document() -> None:
    class Stripping(ByteTokenizer):
        def encode(self, text: str) -> TokenIds:
            return super().encode(text.strip())

    corpus = TokenizedCorpus.build(["  ", "a", "\n"], Stripping())
    assert corpus.tokens.tolist() == [256, 97, 256]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_stored_in_the_smallest_type(vocab_size: int, dtype: type) -> None:
    class Wide(ByteTokenizer):
        document_start = document_end = vocab_size - 1

    Wide.vocab_size = vocab_size
    corpus = TokenizedCorpus.build(["ab"], Wide())
    assert corpus.tokens.dtype == dtype
    assert corpus.document(0).tolist() == [vocab_size - 1, 97, 98, vocab_size - 1]


def numbered(lengths: list[int]) -> TokenizedCorpus:
    """Return a corpus in which every token is another number."""
    return TokenizedCorpus.of_whole(np.arange(sum(lengths), dtype=np.uint32), lengths)


def ids_of(corpus: TokenizedCorpus) -> list[int]:
    return [int(index) for document in range(len(corpus)) for index in corpus.document(document)]


sizes = st.one_of(st.integers(3, 9), st.integers(3, 2000))


@any_case
@given(
    lengths=st.lists(sizes, min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 3),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**40),
)
@example(lengths=[1000], fraction=0.05, seed=0)
@example(lengths=[1000, 1200], fraction=0.05, seed=0)
@example(lengths=[50_000, *[500] * 100], fraction=0.05, seed=3)
@example(lengths=[100] * 30, fraction=0.05, seed=0)
def test_no_more_than_the_fraction_is_held_out(lengths: list[int], fraction: float, seed: int) -> None:
    corpus = numbered(lengths)
    training, held_out = corpus.split(fraction, seed)
    assert 0 < held_out.num_tokens <= max(fraction * sum(lengths), 3)
    assert held_out.num_tokens >= fraction * sum(lengths) / 2 - 3
    divided = len(training) + len(held_out) - len(corpus)
    assert divided in (0, 1)
    trained, kept = ids_of(training), ids_of(held_out)
    # The start of a document that is divided is in both parts.
    assert len(set(trained) & set(kept)) == divided and sorted({*trained, *kept}) == ids_of(corpus)
    assert all(training.lengths >= 2) and all(held_out.lengths >= 3)
    assert [ids_of(part) for part in corpus.split(fraction, seed)] == [trained, kept]


@pytest.mark.parametrize(
    ("lengths", "fraction", "seed", "held"),
    [
        ([40], 0.1, 0, [0, 35, 36, 37, 38, 39]),
        ([9, 14, 12, 11, 8], 0.3, 5, [*range(46, 54), *range(35, 46)]),
        ([5, 900, 6], 0.05, 1, [*range(905, 911)]),
    ],
)
def test_splits_of_earlier_layouts_never_change(
    lengths: list[int], fraction: float, seed: int, held: list[int]
) -> None:
    """A run that started with one would otherwise train on what it held out."""
    training, held_out = numbered(lengths).split(fraction, seed, layout=2)
    assert ids_of(held_out) == held
    assert set(ids_of(training)) - {0} == set(range(sum(lengths))) - set(held) - {0}


def test_split_depends_on_the_seed() -> None:
    corpus = TokenizedCorpus.build((f"document {index}" for index in range(50)), ByteTokenizer())
    assert len({tuple(corpus.split(0.2, seed)[1].offsets.tolist()) for seed in range(10)}) == 10


@any_case
@given(texts=texts, max_tokens=st.integers(2, 100))
def test_head_is_the_first_tokens(texts: list[str], max_tokens: int) -> None:
    corpus = TokenizedCorpus.build(texts, ByteTokenizer())
    head = corpus.head(max_tokens)
    whole = np.concatenate([corpus.document(index) for index in range(len(corpus))])
    kept = np.concatenate([head.document(index) for index in range(len(head))])
    assert kept.tolist() == whole[: len(kept)].tolist()
    # A single border token at the cut is dropped: as a document it would have nothing to predict.
    assert min(max_tokens, len(whole)) - len(kept) in (0, 1)
    assert head.lengths.min() >= 2


@any_case
@given(texts=texts, first=st.integers(2, 100), second=st.integers(2, 100))
def test_a_head_of_a_head_is_the_shorter_of_both(texts: list[str], first: int, second: int) -> None:
    corpus = TokenizedCorpus.build(texts, ByteTokenizer())
    twice, once = corpus.head(first).head(second), corpus.head(min(first, second))
    assert twice.lengths.tolist() == once.lengths.tolist()
    assert twice.offsets.tolist() == once.offsets.tolist()


def test_permutation_never_changes() -> None:
    """These numbers hold for every version of NumPy; a change would break resuming old runs."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    assert sorted(permutation(100, 3, 4).tolist()) == list(range(100))


PERMUTATION = [5, 6, 3, 2, 1, 0, 4, 7]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="a corpus must hold at least one document with text; got none"):
        TokenizedCorpus.build(texts, ByteTokenizer())


def test_of_a_single_document_the_end_is_held_out() -> None:
    text = bytes(32 + place % 90 for place in range(300)).decode()
    corpus = TokenizedCorpus.build([text], ByteTokenizer())
    training, held_out = corpus.split(0.05, 0)
    assert (len(training), len(held_out)) == (1, 1)
    start, end = training.document(0), held_out.document(0)
    assert bytes(start[1:].tolist() + end[1:-1].tolist()).decode() == text
    assert start[0] == end[0] == end[-1] == 256
    assert len(end) == 15


def test_split_of_one_document() -> None:
    with pytest.raises(ValueError, match=r"a source must have at least 4 tokens, .* got 3"):
        TokenizedCorpus.build(["a"], ByteTokenizer()).split(0.1, 0)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="validation_fraction must lie between 0 and 1"):
        TokenizedCorpus.build(["a", "b"], ByteTokenizer()).split(fraction, 0)


def test_negative_seed_and_empty_head() -> None:
    corpus = TokenizedCorpus.build(["a", "b"], ByteTokenizer())
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0; got -1"):
        corpus.split(0.5, -1)
    with pytest.raises(ValueError, match="max_tokens must be at least 2"):
        corpus.head(1)


# ---- Lanes: the rows of a lane join to consecutive text, in documents that keep one segment id; lanes share no token.

any_lanes = settings(max_examples=60, deadline=None)
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


@any_lanes
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


@any_lanes
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
