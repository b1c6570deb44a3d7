"""Rows: documents packed into them, and lanes that they join to."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from data.test_loader import numbered_corpus
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.corpora import as_lines, as_shards, words

from gecko.data import ByteTokenizer, DataRequest, TokenizedCorpus, Tokenizer, open_training_data
from gecko.data.loader import IGNORED, LaneRows, PackedRows, Rows
from gecko.data.packing import held_out_count, permutation
from gecko.data.tokenizers import TokenIds
from gecko.data.training_data import apportioned

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12).filter(any)
any_case = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(any_case, max_examples=30)
@given(texts=texts)
def test_documents_are_kept_between_their_borders(tokenizer: Tokenizer, texts: list[str]) -> None:
    corpus = TokenizedCorpus.build(iter(texts), tokenizer)
    start, end = tokenizer.document_start, tokenizer.document_end
    expected = [[start, *tokenizer.encode(text).tolist(), end] for text in texts if text]
    assert [corpus.document(index).tolist() for index in range(len(corpus))] == expected
    assert corpus.num_tokens == sum(map(len, expected)) == len(corpus.tokens)


def test_text_without_tokens_is_no_document() -> None:
    class Stripping(ByteTokenizer):
        def encode(self, text: str) -> TokenIds:
            return super().encode(text.strip())

    assert TokenizedCorpus.build(["  ", "a", "\n"], Stripping()).tokens.tolist() == [256, 97, 256]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_stored_in_the_smallest_type(vocab_size: int, dtype: type) -> None:
    class Wide(ByteTokenizer):
        document_start = document_end = vocab_size - 1

    Wide.vocab_size = vocab_size
    corpus = TokenizedCorpus.build(["ab"], Wide())
    assert corpus.tokens.dtype == dtype
    assert corpus.document(0).tolist() == [vocab_size - 1, 97, 98, vocab_size - 1]


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
    corpus = numbered_corpus(lengths)
    training, held_out = corpus.split(fraction, seed)
    assert 0 < held_out.num_tokens <= max(fraction * sum(lengths), 3)
    assert held_out.num_tokens >= fraction * sum(lengths) / 2 - 3
    divided = len(training) + len(held_out) - len(corpus)
    assert divided in (0, 1)
    assert not divided or held_out.num_tokens == max(int(fraction * sum(lengths)), 3)
    trained, kept = ids_of(training), ids_of(held_out)
    # The start of a document that is divided is in both parts.
    assert len(set(trained) & set(kept)) == divided and sorted({*trained, *kept}) == ids_of(corpus)
    for part, least in ((training, 2), (held_out, 3)):
        assert all(part.lengths >= least)
        assert {int(part.document(index)[0]) for index in range(len(part))} <= set(corpus.offsets.tolist())
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
    training, held_out = numbered_corpus(lengths).split(fraction, seed, layout=2)
    assert ids_of(held_out) == held
    assert set(ids_of(training)) - {0} == set(range(sum(lengths))) - set(held) - {0}


@pytest.mark.parametrize("fraction", [0, 0.001, 0.3, 1])
@pytest.mark.parametrize("count", [2, 7, 100])
def test_count_of_held_out_documents_up_to_the_second_layout(count: int, fraction: float) -> None:
    found = held_out_count(count, fraction, 2, 1)
    assert found == fraction * count if fraction in (0, 1) else 1 <= found < count


def test_split_depends_on_the_seed() -> None:
    corpus = numbered_corpus([12] * 50)
    assert len({tuple(corpus.split(0.2, seed)[1].offsets.tolist()) for seed in range(10)}) == 10


@any_case
@given(texts=texts, first=st.integers(2, 100), second=st.integers(2, 100))
def test_head_is_the_first_tokens(texts: list[str], first: int, second: int) -> None:
    """A head of a head is the shorter of both."""
    corpus = TokenizedCorpus.build(texts, ByteTokenizer())
    head, whole = corpus.head(first), ids_of(corpus)
    kept = ids_of(head)
    assert kept == whole[: len(kept)]
    # A single border token at the cut is dropped: as a document it would have nothing to predict.
    assert min(first, len(whole)) - len(kept) in (0, 1)
    assert head.lengths.min() >= 2
    twice, once = head.head(second), corpus.head(min(first, second))
    assert twice.lengths.tolist() == once.lengths.tolist()
    assert twice.offsets.tolist() == once.offsets.tolist()


def test_permutation_never_changes() -> None:
    """These numbers hold for every version of NumPy; a change would break resuming old runs."""
    assert permutation(8, 1, 2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]
    assert sorted(permutation(100, 3, 4).tolist()) == list(range(100))


AB = numbered_corpus([3, 3])
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: TokenizedCorpus.build([], ByteTokenizer()), "at least one document with text; got none"),
    (lambda: TokenizedCorpus.build(["", ""], ByteTokenizer()), "at least one document with text; got none"),
    (lambda: numbered_corpus([3]).split(0.1, 0), r"a source must have at least 4 tokens, .* got 3"),
    (lambda: AB.split(-0.1, 0), "validation_fraction must lie between 0 and 1"),
    (lambda: AB.split(1.1, 0), "validation_fraction must lie between 0 and 1"),
    (lambda: AB.split(float("nan"), 0), "validation_fraction must lie between 0 and 1"),
    (lambda: AB.split(0.5, -1), "seed must be a whole number of at least 0; got -1"),
    (lambda: AB.head(1), "max_tokens must be at least 2"),
    (lambda: apportioned([0.99, 0.01], 8, "{}: lanes {}"), r"\[0\.99, 0\.01\]: lanes \[8, 0\]"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_divided(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- Lanes: the rows of a lane join to consecutive text, in documents that keep one segment id; lanes share no token.


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


@any_case
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32)
)
def test_lanes_read_consecutive_tokens_once_an_epoch(lengths: list[int], length: int, lanes: int, seed: int) -> None:
    """No document goes on into the next epoch."""
    corpus = numbered_corpus(lengths)
    if (corpus.num_tokens - 1) // length < lanes:
        return
    rows = LaneRows(PackedRows(corpus, length, seed), lanes, seed)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen, epochs = Counter[int](), [set[int]()]
    for lane in range(lanes):
        read = check_lane(rows, lanes, lane, rows.rows_per_lane)
        seen.update(token for _, token in read)
        epochs[0].update(segment for segment, _ in read)
        assert len({(segment, document[token]) for segment, token in read}) == len({segment for segment, _ in read})
    assert set(seen.values()) == {1}
    assert corpus.num_tokens - 1 - sum(seen.values()) in range(length * lanes)
    count = rows.rows_per_epoch
    epochs += [{int(x) for n in range(e * count, (e + 1) * count) for x in rows.row(n)[2]} for e in (1, 2)]
    assert all(first.isdisjoint(second) for first, second in combinations(epochs, 2))


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
    mixture = [f"{sources[0]}=3", f"{sources[1]}=1"]
    data = open_training_data("", mixture, ByteTokenizer(), DataRequest(16, 0.1, 0, lanes=4))
    for lane, letters in enumerate(["ab", "ab", "ab", "cd"]):
        read = check_lane(data.rows, 4, lane, data.rows.rows_per_epoch // 4)
        assert {token for _, token in read if 0 < token < 256} == set(letters.encode())
    with pytest.raises(ValueError, match=r"carry_state each source must have a lane.*Try a larger batch_size"):
        open_training_data("", mixture, ByteTokenizer(), DataRequest(16, 0.1, 0, lanes=1))


def test_lanes_are_divided_by_the_weights() -> None:
    assert apportioned([0.7, 0.3], 10, "") == [7, 3]
    with pytest.raises(ValueError, match="must be a number above 0"):
        apportioned([1e308, 1e308], 4, "")
    assert apportioned([1, 1, 1], 4, "") in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
