"""Batches of one source and of mixtures."""

import itertools
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import as_files, as_shards

from gecko.data import (
    IGNORED,
    Batch,
    ByteTokenizer,
    DataRequest,
    Loader,
    PackedLoader,
    TokenizedCorpus,
    open_training_data,
    validation_batches,
)
from gecko.data.training_data import BLOCK, MixedRows, parse_source

any_case = settings(max_examples=80, deadline=None)
lengths = st.lists(st.integers(3, 32), min_size=1, max_size=12)
sizes = st.integers(1, 20)
seeds = st.integers(0, 2**70)


def numbered_corpus(lengths: list[int]) -> TokenizedCorpus:
    """Return documents with the given numbers of tokens; all are different, so that rows show where they come from."""
    return TokenizedCorpus.of_whole(np.arange(sum(lengths), dtype=np.uint32), lengths)


def check_row(corpus: TokenizedCorpus, tokens: list[int], targets: list[int], segments: list[int]) -> None:
    """Check that targets and segment ids of one row match the documents of its tokens."""
    documents = [int(np.searchsorted(corpus.offsets, token, side="right")) - 1 for token in tokens]
    ordinals = list(dict.fromkeys(documents))
    assert segments == [ordinals.index(document) for document in documents]
    for position, target in enumerate(targets):
        ends = tokens[position] == corpus.offsets[documents[position]] + corpus.lengths[documents[position]] - 1
        assert target == (IGNORED if ends else tokens[position] + 1)
        if position + 1 < len(tokens) and not ends:
            assert tokens[position + 1] == target


def rows_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    return list(zip(batch.tokens.tolist(), batch.targets.tolist(), batch.segment_ids.tolist(), strict=True))


@any_case
@given(lengths=lengths, length=sizes, seed=seeds, epoch=st.integers(0, 3))
def test_every_epoch_covers_every_token_once(lengths: list[int], length: int, seed: int, epoch: int) -> None:
    corpus = numbered_corpus(lengths)
    if corpus.num_tokens <= length:
        return
    loader = PackedLoader(corpus, 1, length, seed)
    rows = loader.rows_per_epoch
    assert corpus.num_tokens - 1 - rows * length in range(length)
    seen, scored = Counter[int](), Counter[int]()
    for step in range(epoch * rows, (epoch + 1) * rows):
        ((tokens, targets, segments),) = rows_of(loader.batch(step))
        check_row(corpus, tokens, targets, segments)
        seen.update(tokens)
        scored.update(target for target in targets if target != IGNORED)
    assert set(seen.values()) == {1} and len(seen) == rows * length
    assert set(scored.values()) <= {1}


@any_case
@given(lengths=lengths, length=sizes, seed=seeds, data=st.data())
def test_row_is_a_function_of_seed_and_index(lengths: list[int], length: int, seed: int, data: st.DataObject) -> None:
    corpus = numbered_corpus(lengths)
    if corpus.num_tokens <= length:
        return
    single = PackedLoader(corpus, 1, length, seed)
    expected = [row for step in range(24) for row in rows_of(single.batch(step))]
    batch_size = data.draw(st.sampled_from([1, 2, 3, 8]))
    loader = PackedLoader(corpus, batch_size, length, seed)
    steps = data.draw(st.permutations(range(24 // batch_size)))
    with ThreadPoolExecutor(3) as pool:
        for step, found in zip(steps, pool.map(lambda step: rows_of(loader.batch(step)), steps), strict=True):
            assert found == expected[step * batch_size : (step + 1) * batch_size]
    assert rows_of(PackedLoader(corpus, batch_size, length, seed).batch(steps[0])) == rows_of(loader.batch(steps[0]))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    corpus = numbered_corpus([5] * 30)
    places = itertools.product(range(4), range(4))
    orders = [PackedLoader(corpus, 1, 149, seed).batch(epoch).tokens[0].tolist() for seed, epoch in places]
    assert len(set(map(tuple, orders))) == 16


def test_rows_of_a_long_document_do_not_follow_each_other() -> None:
    loader, orders = PackedLoader(numbered_corpus([4001]), 4, 10, 0), set()
    for epoch in range(3):
        batches = [loader.batch(epoch * 100 + step) for step in range(100)]
        orders.add(tuple(row[0] // 10 for batch in batches for row in batch.tokens.tolist()))
    assert len(orders) == 3
    for order in orders:
        neighbours = sum(after == before + 1 for before, after in itertools.pairwise(order))
        assert sorted(order) == list(range(400)) and neighbours < 20


@any_case
@given(lengths=lengths, length=sizes, batch_size=st.integers(1, 4))
def test_validation_scores_every_token_once(lengths: list[int], length: int, batch_size: int) -> None:
    corpus = numbered_corpus(lengths)
    batches = list(validation_batches(corpus, batch_size, length))
    scored = [target for batch in batches for target in batch.targets.flatten().tolist() if target != IGNORED]
    starts = set(corpus.offsets.tolist())
    assert scored == [token for token in range(corpus.num_tokens) if token not in starts]
    assert sum(batch.scored_tokens for batch in batches) == len(scored) == corpus.num_tokens - len(corpus)
    assert all(batch.tokens.shape == (batch_size, length) for batch in batches[:-1])
    for number, (tokens, targets, segments) in enumerate(row for batch in batches for row in rows_of(batch)):
        filled = min(corpus.num_tokens - number * length, length)
        check_row(corpus, tokens[:filled], targets[:filled], segments[:filled])
        assert tokens == [*range(number * length, number * length + filled), *[0] * (length - filled)]
        assert targets[filled:] == [IGNORED] * (length - filled)
        assert segments[filled:] == [segments[filled - 1] + 1] * (length - filled)
    assert {part.dtype for batch in batches for part in vars(batch).values()} == {torch.int64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 11, 0), r"takes sequence_length \+ 1 = 12 tokens.*got 11\. .*sequence_length=10"),
        ((0, 4, 0), "batch_size must be a whole number of at least 1; got 0"),
        ((1, 0, 0), "sequence_length must be a whole number of at least 1; got 0"),
        ((1, 4, -1), "seed must be a whole number of at least 0; got -1"),
    ],
)
def test_argument_out_of_range(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedLoader(numbered_corpus([11]), *arguments)
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        PackedLoader(numbered_corpus([11]), 1, 10, 0).batch(-1)


# ---- Mixtures of sources.


class Counting:
    """Rows that contain their source and their index."""

    def __init__(self, source: int, rows_per_epoch: int = 1000) -> None:
        self.source, self.rows_per_epoch = source, rows_per_epoch

    def row(self, index: int):
        return (np.array([self.source, index]),) * 3


def mixed(weights: list[float], seed: int = 0) -> MixedRows:
    return MixedRows([Counting(source) for source in range(len(weights))], weights, seed)


weights = st.lists(st.floats(0.03, 5), min_size=1, max_size=6)
"""Each is at least 1/BLOCK of all, so that a source cannot be too small for a row."""


@settings(max_examples=15, deadline=None)
@given(weights, st.integers(0, 2**40), st.integers(0, 3))
def test_every_block_has_the_exact_proportions_and_every_source_its_order(
    weights: list[float], seed: int, block: int
) -> None:
    rows = mixed(weights, seed)
    origins = [rows.row(index)[0].tolist() for index in range((block + 1) * BLOCK)]
    assert Counter(source for source, _ in origins[block * BLOCK :]) == dict(enumerate(rows.counts))
    assert sum(rows.counts) == BLOCK
    for source, (count, weight) in enumerate(zip(rows.counts, weights, strict=True)):
        assert abs(count - BLOCK * weight / sum(weights)) < 1
        own = [index for of, index in origins if of == source]
        assert own == list(range(len(own)))
    assert mixed(weights, seed).row(block * BLOCK + 7)[0].tolist() == origins[block * BLOCK + 7]
    batches = [Loader(rows, 8).batch(step).tokens.tolist() for step in range(8)]
    assert [row for batch in batches for row in batch] == origins[:64]


def test_a_small_source_is_rounded_up_before_larger_remainders() -> None:
    assert mixed([1, 5, 5, 5, 0.01171875]).counts[-1] == 1


def test_sources_are_mixed_within_a_block_and_blocks_differ() -> None:
    rows = MixedRows([Counting(0, 100), Counting(1, 10_000)], [0.5, 0.5], 0)
    assert rows.rows_per_epoch == 200  # the first source begins again
    sources = [rows.row(index)[0][0] for index in range(2 * BLOCK)]
    assert sources[:BLOCK] != sources[BLOCK:]
    assert 0.4 < np.mean(sources[:100]) < 0.6


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([5, 5, 5, 0.001], "at least 1/1024 of all weights, or it may never be read"),
        *(([1.0, wrong], "must be a number above 0") for wrong in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_weights_that_are_none(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixed(weights)


@pytest.fixture
def sources_of(tmp_path):
    """Return a function that writes a source of shards for each list of texts."""

    def write(*texts: list[str]) -> list[str]:
        folders = [tmp_path / str(number) for number in range(len(texts))]
        for folder in folders:
            folder.mkdir()
        return [as_shards(part, folder) for part, folder in zip(texts, folders, strict=True)]

    return write


REQUEST = DataRequest(sequence_length=8, validation_fraction=0.5, seed=0)


@pytest.mark.parametrize("wanted", [2, 101, 1000])
def test_held_out_tokens_are_in_the_proportions_of_the_mixture(wanted: int, sources_of) -> None:
    """For any lengths of documents in either source."""
    sources = [f"{source}=0.5" for source in sources_of(["x" * 3000] * 4, ["x" * 30] * 400)]
    held_out = open_training_data("", sources, ByteTokenizer(), REQUEST).held_out(wanted)
    first = int(held_out.lengths[0])
    assert first == max(2, -(-wanted // 2)) and held_out.num_tokens - first <= first
    assert held_out.num_tokens - first >= first - 1  # a single border token at the cut is dropped


def test_a_source_that_holds_out_little_limits_the_others(sources_of) -> None:
    """Otherwise most of the held-out loss would be that of texts with a small share in training."""
    large, small = sources_of(["large" * 20] * 100, ["small" * 20] * 4)
    data = open_training_data("", [f"{large}=0.1", f"{small}=0.9"], ByteTokenizer(), REQUEST)
    held_out = data.held_out(1_000_000)
    few = sum(bytes(held_out.document(index)[1:6].tolist()) == b"small" for index in range(len(held_out)))
    tokens = int(held_out.lengths[-few:].sum())
    assert few == 2 and 0.85 < tokens / held_out.num_tokens < 0.95


@pytest.mark.parametrize("kind", [as_files, as_shards])
def test_sources_that_share_texts_hold_nothing_out(kind, tmp_path) -> None:
    """One source would train on documents that the other holds out; a separate held-out source prevents this."""
    source = kind([f"document {number}" for number in range(30)], tmp_path)
    mixture = [f"{source}=0.5", f"{source.replace('*', '1*')}=0.5"]
    with pytest.raises(ValueError, match=f"none in common; .* is in '{re.escape(source)}' and in"):
        open_training_data("", mixture, ByteTokenizer(), REQUEST)
    (tmp_path / "rest.txt").write_text("held out")
    kept = open_training_data("", mixture, ByteTokenizer(), REQUEST, validation=str(tmp_path / "rest.txt"))
    assert kept.held_out_documents == 1


def test_shards_and_text_mix(shard_folder, tmp_path) -> None:
    text = tmp_path / "lines.jsonl"
    text.write_text('{"text": "0123456789"}\n' * 40)
    request = DataRequest(sequence_length=8, validation_fraction=0.2, seed=0)
    data = open_training_data("ignored", (f"{shard_folder}=3", f"{text}=1"), ByteTokenizer(), request)
    assert data.name == f"{shard_folder} (768/1024), {text} (256/1024)"
    assert sum(any(48 <= token < 58 for token in data.rows.row(index)[0]) for index in range(BLOCK)) == 256
    assert data.documents + data.held_out_documents == 40 + 30
    held_out = data.held_out(80)
    assert held_out.num_tokens >= 80 and {256} < set(held_out.tokens.tolist())


@pytest.mark.parametrize("item", ["books", "=1", "books=", "books=many"])
def test_a_source_without_a_weight(item: str) -> None:
    assert parse_source("data/split=train=0.5") == ("data/split=train", 0.5)
    with pytest.raises(ValueError, match=r"data\.sources must read SOURCE=WEIGHT"):
        parse_source(item)
