from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gecko.data import ByteTokenizer, TokenizedCorpus, Tokenizer
from gecko.data.packing import permutation
from gecko.data.tokenizers import TokenIds

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


@any_case
@given(count=st.integers(2, 40), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**40))
def test_split_is_disjoint_complete_and_repeatable(count: int, fraction: float, seed: int) -> None:
    corpus = TokenizedCorpus.build((f"document {index}" for index in range(count)), ByteTokenizer())
    train, validation = corpus.split(fraction, seed)
    offsets = [part.offsets.tolist() for part in (train, validation)]
    assert len(train) >= 1 and len(validation) >= 1
    assert sorted(offsets[0] + offsets[1]) == corpus.offsets.tolist()
    assert abs(len(validation) - fraction * count) <= 1
    assert [part.offsets.tolist() for part in corpus.split(fraction, seed)] == offsets


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


@given(st.integers(2, 300), st.floats(0.001, 0.999), st.integers(0, 5))
def test_of_a_single_document_the_end_is_held_out(length: int, fraction: float, seed: int) -> None:
    text = bytes(32 + place % 90 for place in range(length)).decode()
    corpus = TokenizedCorpus.build([text], ByteTokenizer())
    training, held_out = corpus.split(fraction, seed)
    assert (len(training), len(held_out)) == (1, 1)
    start, end = training.document(0), held_out.document(0)
    assert bytes(start[1:].tolist() + end[1:-1].tolist()).decode() == text
    assert start[0] == end[0] == end[-1] == 256
    assert held_out.lengths[0] == 2 + min(max(round(fraction * length), 1), length - 1)


def test_split_of_one_document() -> None:
    with pytest.raises(ValueError, match=r"a single document must have at least 2 tokens .* got 1"):
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
