"""Held-out loss does not depend on how rows are grouped, and equals the loss in training."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch

from gecko.data import ByteTokenizer, TokenizedCorpus
from gecko.models.gecko import Gecko
from gecko.train import Run
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.model import use_float8
from gecko.train.run import Precision


@pytest.fixture(scope="module")
def corpus() -> TokenizedCorpus:
    return TokenizedCorpus.build([f"document {i} " * (3 + i) for i in range(8)], ByteTokenizer())


@pytest.fixture
def model(small_run: Run) -> Gecko:
    torch.manual_seed(0)
    return Gecko(small_run.model)


def test_is_the_mean_over_all_targets(model: Gecko, corpus: TokenizedCorpus) -> None:
    held_out = HeldOut.of(corpus, 1000, 20, 3, ByteTokenizer())
    result = evaluate(model, held_out, "float32")
    rows = held_out.rows
    expected = model.loss(rows.tokens, rows.targets, rows.segment_ids).item()
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert result.tokens == corpus.num_tokens - len(corpus)
    assert result.nats_per_byte == pytest.approx(
        result.loss * result.tokens / int((corpus.tokens < 256).sum()), rel=1e-12
    )


def test_every_batch_is_progress(model: Gecko, corpus: TokenizedCorpus) -> None:
    beat = Mock()
    evaluate(model, HeldOut.of(corpus, 9, 20, 2, ByteTokenizer()), "float32", beat=beat)
    assert beat.call_count == 5


@pytest.mark.parametrize("precision", ["bfloat16", "float8_emulated"])
def test_the_loss_is_computed_in_float32_whatever_the_run_uses(
    model: Gecko, corpus: TokenizedCorpus, precision: Precision
) -> None:
    held_out = HeldOut.of(corpus, 9, 20, 2, ByteTokenizer())
    exact = evaluate(model, held_out, "float32")
    use_float8(model, precision)
    found = evaluate(model, held_out, precision)
    assert found == exact and found.arithmetic == "float32" and found.note == ""


@pytest.mark.parametrize("batch_size", [2, 5, 100])
def test_grouping_changes_nothing(model: Gecko, corpus: TokenizedCorpus, batch_size: int) -> None:
    one, many = (
        evaluate(model, HeldOut.of(corpus, 9, 20, size, ByteTokenizer()), "float32") for size in (1, batch_size)
    )
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.loss_by_position == pytest.approx(one.loss_by_position, rel=1e-5)


def test_loss_by_position_is_at_its_position(model: Gecko, corpus: TokenizedCorpus) -> None:
    held_out = HeldOut.of(corpus, 6, 20, 2, ByteTokenizer())
    losses, _ = model.token_losses(held_out.rows.tokens, held_out.rows.targets, held_out.rows.segment_ids)
    counts = (held_out.rows.targets != -100).sum(dim=0)
    result = evaluate(model, held_out, "float32")
    assert result.bin_width == 1
    expected = [total / count if count else None for total, count in zip(losses.sum(0).tolist(), counts, strict=True)]
    assert [value is None for value in expected] == [value is None for value in result.loss_by_position]
    assert [v for v in result.loss_by_position if v is not None] == pytest.approx(
        [float(v) for v in expected if v is not None], rel=1e-5
    )


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_row_losses_are_those_of_each_row(model: Gecko, corpus: TokenizedCorpus, batch_size: int) -> None:
    held_out = HeldOut.of(corpus, 9, 20, batch_size, ByteTokenizer())
    result = evaluate(model, held_out, "float32")
    losses, _ = model.token_losses(held_out.rows.tokens, held_out.rows.targets, held_out.rows.segment_ids)
    assert result.row_losses == pytest.approx(losses.sum(1).tolist(), rel=1e-5)
    assert result.row_targets == (held_out.rows.targets != -100).sum(1).tolist()
    assert sum(result.row_losses) / sum(result.row_targets) == pytest.approx(result.loss, rel=1e-12)


def test_long_rows_are_binned(model: Gecko, corpus: TokenizedCorpus) -> None:
    result = evaluate(model, HeldOut.of(corpus, 2, 300, 1, ByteTokenizer()), "float32")
    assert (result.bin_width, len(result.loss_by_position)) == (3, 100)
    assert all(value is not None and math.isfinite(value) for value in result.loss_by_position)


def test_positions_without_a_target_have_no_loss(model: Gecko) -> None:
    short = TokenizedCorpus.build(["eight to"], ByteTokenizer())
    result = evaluate(model, HeldOut.of(short, 1, 12, 1, ByteTokenizer()), "float32")
    assert result.tokens == 9
    assert [value is None for value in result.loss_by_position] == [False] * 9 + [True] * 3


def test_spread_rows_come_from_all_over(corpus: TokenizedCorpus) -> None:
    held_out = HeldOut.of(corpus, 100, 10, 4, ByteTokenizer())
    available = len(held_out.rows.tokens)
    spread = held_out.spread(5)
    positions = [next(i for i in range(available) if torch.equal(row, held_out.rows.tokens[i])) for row in
                 spread.rows.tokens]  # fmt: skip
    assert len(positions) == 5
    assert positions[0] == 0
    assert positions[-1] >= available * 0.75
    assert len(held_out.spread(10_000).rows.tokens) == available
