"""Mixtures of sources."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import as_files, as_shards

from gecko.data import ByteTokenizer, DataRequest, Loader, open_training_data
from gecko.data.loader import Row
from gecko.data.training_data import BLOCK, MixedRows, block_counts, parse_source


class Counting:
    """Rows that contain their source and their index."""

    def __init__(self, source: int, rows_per_epoch: int = 1000) -> None:
        self.source, self.rows_per_epoch = source, rows_per_epoch

    def row(self, index: int) -> Row:
        row = np.array([self.source, index])
        return row, row, row


weights = st.lists(st.floats(0.01, 5), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(weights, st.integers(0, 2**40), st.integers(0, 3))
def test_every_block_has_the_exact_proportions_and_every_source_its_order(
    weights: list[float], seed: int, block: int
) -> None:
    rows = MixedRows([Counting(source) for source in range(len(weights))], weights, seed)
    origins = [rows.row(index)[0].tolist() for index in range((block + 1) * BLOCK)]
    assert Counter(source for source, _ in origins[block * BLOCK :]) == dict(enumerate(rows.counts))
    for source in range(len(weights)):
        own = [index for of, index in origins if of == source]
        assert own == list(range(len(own)))
    again = MixedRows([Counting(source) for source in range(len(weights))], weights, seed)
    assert again.row(block * BLOCK + 7)[0].tolist() == origins[block * BLOCK + 7]


@settings(max_examples=60)
@given(weights)
def test_counts_are_as_near_to_the_weights_as_whole_rows_can_be(weights: list[float]) -> None:
    counts = block_counts(weights)
    assert sum(counts) == BLOCK
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) < 1


def test_sources_are_mixed_within_a_block_and_blocks_differ() -> None:
    rows = MixedRows([Counting(0), Counting(1)], [0.5, 0.5], 0)
    sources = [rows.origin(index)[0] for index in range(2 * BLOCK)]
    assert sources[:BLOCK] != sources[BLOCK:]
    assert 0.4 < np.mean(sources[:100]) < 0.6


def test_an_epoch_ends_when_the_first_source_begins_again() -> None:
    rows = MixedRows([Counting(0, 100), Counting(1, 10_000)], [0.25, 0.75], 0)
    assert rows.rows_per_epoch == 400


def test_batches_do_not_depend_on_their_size() -> None:
    rows = MixedRows([Counting(0), Counting(1), Counting(2)], [1, 2, 3], 5)
    single = [Loader(rows, 1).batch(step).tokens[0].tolist() for step in range(24)]
    for size in (2, 4, 8):
        assert [row for step in range(24 // size) for row in Loader(rows, size).batch(step).tokens.tolist()] == single


@pytest.mark.parametrize("wanted", [2, 101, 1000])
def test_held_out_tokens_are_in_the_proportions_of_the_mixture(wanted: int, tmp_path: Path) -> None:
    """For any lengths of documents in either source."""
    sources = []
    for name, length in (("long", 3000), ("short", 30)):
        (tmp_path / name).mkdir()
        sources.append(as_shards(["x" * length] * (12_000 // length), tmp_path / name) + "=0.5")
    request = DataRequest(sequence_length=8, validation_fraction=0.5, seed=0)
    held_out = open_training_data("", sources, ByteTokenizer(), request).held_out(wanted)
    first = int(held_out.lengths[0])
    assert first == max(2, -(-wanted // 2)) and held_out.num_tokens - first <= first
    assert held_out.num_tokens - first >= first - 1  # a single border token at the cut is dropped


def test_a_source_that_holds_out_little_limits_the_others(tmp_path: Path) -> None:
    """Otherwise most of the held-out loss would be that of texts with a small share in training."""
    sources = []
    for name, weight, documents in (("large", 0.1, 100), ("small", 0.9, 4)):
        (tmp_path / name).mkdir()
        sources.append(f"{as_shards([name * 20] * documents, tmp_path / name)}={weight}")
    request = DataRequest(sequence_length=8, validation_fraction=0.5, seed=0)
    data = open_training_data("", sources, ByteTokenizer(), request)
    held_out = data.held_out(1_000_000)
    small = sum(bytes(held_out.document(index)[1:6].tolist()) == b"small" for index in range(len(held_out)))
    tokens = int(held_out.lengths[-small:].sum())
    assert small == 2 and 0.85 < tokens / held_out.num_tokens < 0.95


@pytest.mark.parametrize("kind", [as_files, as_shards])
def test_sources_that_share_texts_hold_nothing_out(kind: Callable[..., str], tmp_path: Path) -> None:
    """One source would train on documents that the other holds out; a separate held-out source prevents this."""
    source = kind([f"document {number}" for number in range(30)], tmp_path)
    part = source.replace("*", "1*")
    request = DataRequest(sequence_length=8, validation_fraction=0.2, seed=0)
    mixture = [f"{source}=0.5", f"{part}=0.5"]
    with pytest.raises(ValueError, match=f"none in common; .* is in '{re.escape(source)}' and in"):
        open_training_data("", mixture, ByteTokenizer(), request)
    (tmp_path / "rest.txt").write_text("held out")
    kept = open_training_data("", mixture, ByteTokenizer(), request, validation=str(tmp_path / "rest.txt"))
    assert kept.held_out_documents == 1


def test_shards_and_text_mix(shard_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "lines.jsonl"
    text.write_text('{"text": "0123456789"}\n' * 40)
    request = DataRequest(sequence_length=8, validation_fraction=0.2, seed=0)
    sources = (f"{shard_folder}=3", f"{text}=1")
    data = open_training_data("ignored", sources, ByteTokenizer(), request)
    assert data.name == f"{shard_folder} (768/1024), {text} (256/1024)"
    digits = sum(any(48 <= token < 58 for token in data.rows.row(index)[0]) for index in range(BLOCK))
    assert digits == 256
    assert data.documents + data.held_out_documents == 40 + 30
    held_out = data.held_out(80)
    assert held_out.num_tokens >= 80
    assert {256} < set(held_out.tokens.tolist())


@pytest.mark.parametrize("item", ["books", "=1", "books=", "books=many"])
def test_a_source_without_a_weight(item: str) -> None:
    with pytest.raises(ValueError, match=r"data\.sources must read SOURCE=WEIGHT"):
        parse_source(item)


def test_a_path_with_an_equals_sign() -> None:
    assert parse_source("data/split=train=0.5") == ("data/split=train", 0.5)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_none(wrong: float) -> None:
    with pytest.raises(ValueError, match="weight of a source must be a number above 0"):
        block_counts([1.0, wrong])


def test_a_weight_that_gives_no_row() -> None:
    with pytest.raises(ValueError, match="would never be read"):
        block_counts([1.0, 1e-6])
