from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import IGNORED, Batch, ByteTokenizer, PackedLoader, TokenizedCorpus, validation_batches
from gecko.data.tokenizers import TokenIds

any_case = settings(max_examples=80, deadline=None)
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)
sizes = st.integers(1, 20)
seeds = st.integers(0, 2**70)


class Numbered:
    """Tokenizer that gives every token of a corpus a different id, so that rows show where they come from."""

    name, vocab_size, document_start, document_end, special_ids = "numbered", 1 << 20, 0, 0, frozenset({0})

    def __init__(self) -> None:
        self.used = 0

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> TokenIds:
        self.used += len(text)
        return np.arange(self.used - len(text), self.used, dtype=np.int64) + 1

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError


def numbered_corpus(lengths: list[int]) -> TokenizedCorpus:
    """Return documents with the given numbers of text tokens; all stored tokens, also borders, are different."""
    built = TokenizedCorpus.build(["x" * length for length in lengths], Numbered())
    return TokenizedCorpus.of_whole(np.arange(len(built.tokens), dtype=np.uint32), built.lengths)


def document_of(corpus: TokenizedCorpus, token: int) -> int:
    return int(np.searchsorted(corpus.offsets, token, side="right")) - 1


def check_row(corpus: TokenizedCorpus, tokens: list[int], targets: list[int], segments: list[int]) -> None:
    """Check that targets and segment ids of one row match the documents of its tokens."""
    documents = [document_of(corpus, token) for token in tokens]
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
    seen: Counter[int] = Counter()
    scored: Counter[int] = Counter()
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
    for step in data.draw(st.permutations(range(24 // batch_size))):
        assert rows_of(loader.batch(step)) == expected[step * batch_size : (step + 1) * batch_size]
        assert rows_of(PackedLoader(corpus, batch_size, length, seed).batch(step)) == rows_of(loader.batch(step))


def test_rows_from_many_threads() -> None:
    corpus = numbered_corpus([5, 9, 2, 14, 7])
    steps = list(np.random.default_rng(0).integers(0, 200, 400))
    expected = [rows_of(PackedLoader(corpus, 3, 4, 1).batch(int(step))) for step in steps]
    loader = PackedLoader(corpus, 3, 4, 1)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda step: rows_of(loader.batch(int(step))), steps)) == expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    corpus = numbered_corpus([3] * 30)
    length = corpus.num_tokens - 1
    orders = {
        tuple(PackedLoader(corpus, 1, length, seed).batch(epoch).tokens[0].tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_rows_of_a_long_document_do_not_follow_each_other() -> None:
    corpus, orders = numbered_corpus([4000]), set()
    for seed in range(3):
        loader = PackedLoader(corpus, 4, 10, seed)
        rows = loader.rows_per_epoch
        for epoch in range(3):
            batches = [loader.batch(epoch * (rows // 4) + step) for step in range(rows // 4)]
            orders.add(tuple(row[0] // 10 for batch in batches for row in batch.tokens.tolist()))
    assert len(orders) == 9
    for order in orders:
        neighbours = sum(after == before + 1 for before, after in itertools.pairwise(order))
        assert sorted(order) == list(range(rows)) and neighbours < rows / 20


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
    rows = [row for batch in batches for row in rows_of(batch)]
    for tokens, targets, segments in rows[:-1]:
        check_row(corpus, tokens, targets, segments)
    tokens, targets, segments = rows[-1]
    filled = corpus.num_tokens - (len(rows) - 1) * length
    assert segments[filled:] == [segments[min(filled, length) - 1] + 1] * (length - filled)
    assert set(targets[filled - 1 :]) <= {IGNORED}
    assert tokens[:filled] == list(range(corpus.num_tokens))[-filled:][:length]


def test_batch_is_what_the_model_takes() -> None:
    corpus = TokenizedCorpus.build(["hé", "x"], ByteTokenizer())
    batch = next(validation_batches(corpus, 2, 9))
    assert batch.tokens.tolist() == [[256, 104, 0xC3, 0xA9, 256, 256, 120, 256, 0]]
    assert batch.targets.tolist() == [[104, 0xC3, 0xA9, 256, IGNORED, 120, 256, IGNORED, IGNORED]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 2]]
    assert all(part.dtype == torch.int64 for part in (batch.tokens, batch.targets, batch.segment_ids))
    assert batch.scored_tokens == len("héx".encode()) + len(corpus)


def test_corpus_shorter_than_a_row() -> None:
    corpus = numbered_corpus([3, 4])
    PackedLoader(corpus, 1, 10, 0)
    with pytest.raises(ValueError, match=r"takes sequence_length \+ 1 = 12 tokens.*got 11\. .*sequence_length=10"):
        PackedLoader(corpus, 1, 11, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 0), "batch_size must be a whole number of at least 1; got 0"),
        ((1, 0, 0), "sequence_length must be a whole number of at least 1; got 0"),
        ((1, 4, -1), "seed must be a whole number of at least 0; got -1"),
    ],
)
def test_argument_out_of_range(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedLoader(numbered_corpus([9]), *arguments)


def test_negative_step() -> None:
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        PackedLoader(numbered_corpus([9]), 1, 4, 0).batch(-1)
