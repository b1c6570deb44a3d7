"""Held-out loss, for each token and for each byte."""

import dataclasses
import itertools
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.chats import spoken, write_chats
from support.corpora import as_files, as_shards, write_tokenizer

from gecko.data import IGNORED, ByteTokenizer, TokenizedCorpus, load_tokenizer
from gecko.data.chat import tuning_format
from gecko.data.chats import load_chats
from gecko.models.gecko import Gecko
from gecko.parallel.mesh import Ranks
from gecko.train import Run
from gecko.train.data import load_data
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.model import use_float8
from gecko.train.run import Precision

# ---- Held-out loss does not depend on how rows are grouped, and equals the loss in training.


@pytest.fixture(scope="module")
def corpus() -> TokenizedCorpus:
    return TokenizedCorpus.build([f"document {i} " * (3 + i) for i in range(8)], ByteTokenizer())


@pytest.fixture
def model(small_run: Run) -> Gecko:
    torch.manual_seed(0)
    return Gecko(small_run.model)


@pytest.mark.parametrize("precision", ["bfloat16", "float8_emulated"])
def test_the_loss_is_computed_in_float32_whatever_the_run_uses(
    model: Gecko, corpus: TokenizedCorpus, precision: Precision
) -> None:
    held_out = HeldOut.of(corpus, 9, 20, 2, ByteTokenizer())
    exact = evaluate(model, held_out, "float32")
    use_float8(model, precision)
    found = evaluate(model, held_out, precision)
    assert found == exact and found.arithmetic == "float32" and found.note == ""


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_losses_by_position_and_row_are_at_their_places(model: Gecko, corpus: TokenizedCorpus, batch_size: int) -> None:
    """Whatever the number of rows at once; each batch is progress."""
    held_out, beat = HeldOut.of(corpus, 9, 20, batch_size, ByteTokenizer()), Mock()
    losses, _ = model.token_losses(held_out.rows.tokens, held_out.rows.targets, held_out.rows.segment_ids)
    targets = held_out.rows.targets != IGNORED
    result = evaluate(model, held_out, "float32", beat=beat)
    assert beat.call_count == -(-9 // batch_size)
    assert result.row_losses == pytest.approx(losses.sum(1).tolist(), rel=1e-5)
    assert result.row_targets == targets.sum(1).tolist()
    assert sum(result.row_losses) / sum(result.row_targets) == pytest.approx(result.loss, rel=1e-12)
    columns = zip(losses.sum(0).tolist(), targets.sum(0).tolist(), strict=True)
    expected = [total / count if count else None for total, count in columns]
    assert result.bin_width == 1 and result.loss_by_position == [
        None if value is None else pytest.approx(value, rel=1e-5) for value in expected
    ]


def test_long_rows_are_binned_and_positions_without_a_target_have_no_loss(
    model: Gecko, corpus: TokenizedCorpus
) -> None:
    result = evaluate(model, HeldOut.of(corpus, 2, 300, 1, ByteTokenizer()), "float32")
    assert (result.bin_width, len(result.loss_by_position)) == (3, 100)
    assert all(value is not None and math.isfinite(value) for value in result.loss_by_position)
    short = TokenizedCorpus.build(["eight to"], ByteTokenizer())
    result = evaluate(model, HeldOut.of(short, 1, 12, 1, ByteTokenizer()), "float32")
    assert result.tokens == 9
    assert [value is None for value in result.loss_by_position] == [False] * 9 + [True] * 3


def test_spread_rows_come_from_all_over(corpus: TokenizedCorpus) -> None:
    held_out = HeldOut.of(corpus, 100, 10, 4, ByteTokenizer())
    available = len(held_out.rows.tokens)
    places = [next(i for i in range(available) if torch.equal(row, held_out.rows.tokens[i])) for row in
              held_out.spread(5).rows.tokens]  # fmt: skip
    assert len(places) == 5 and places[0] == 0 and places[-1] >= available * 0.75
    assert len(held_out.spread(10_000).rows.tokens) == available
    fewer = HeldOut.of(corpus, 7, 10, 4, ByteTokenizer())
    assert all(map(torch.equal, vars(held_out.first(7).rows).values(), vars(fewer.rows).values()))
    assert torch.equal(held_out.first(7).row_bytes, fewer.row_bytes)


def test_few_rows_of_chats_are_a_sample_of_all(tmp_path: Path) -> None:
    """Packing begins with the longest chats."""
    chats = [spoken("q", letter * length) for letter, length in [("x", 225)] * 10 + [("y", 5)] * 1000]
    chat_format = tuning_format(ByteTokenizer(), Path("no folder"))
    corpus = load_chats(str(write_chats(tmp_path / "chats.jsonl", chats)), chat_format)
    rows = HeldOut.of_chats(corpus, 12, 256, 4, ByteTokenizer()).rows
    assert (rows.targets == ord("y")).any(dim=1).sum() > 6


# ---- Held-out nats per byte, times the bytes of exactly the scored tokens, are the nats of these tokens.

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġthe", "Ġthe")]
ENGLISH, CHINESE = " the" * 300, "你好世界🎉é" * 40


def write_source(kind: str, folder: Path) -> str:
    if kind == "chats":
        chats = [spoken("你好" * 3, ENGLISH[:80] + CHINESE), spoken("the", CHINESE[:9] + ENGLISH), spoken("é", "the é")]
        return str(write_chats(folder / "chats.jsonl", chats * 4))
    texts = {"one": [ENGLISH + CHINESE], "two": [ENGLISH, CHINESE], "many": [ENGLISH[:90], CHINESE[:50]] * 20}[kind]
    return as_files(texts, folder)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [*itertools.product(["bytes", "words"], ["one", "two", "many", "chats"]), ("bytes", "shards")],
)
def test_nats_are_divided_by_the_bytes_of_the_scored_tokens(
    small_run: Run, tmp_path: Path, kind: str, tokens: str
) -> None:
    """Tokens of one byte and of eight lie in different parts of a text, and rows cut texts and characters anywhere."""
    spec = "bytes" if tokens == "bytes" else write_tokenizer(tmp_path / "tokenizer", MERGES)
    source = as_shards([ENGLISH, CHINESE] * 8, tmp_path) if kind == "shards" else write_source(kind, tmp_path)
    format = "chat" if kind == "chats" else "text"
    settings = dataclasses.replace(
        small_run.data, source=source, tokenizer=spec, format=format, validation_fraction=0.4
    )
    tokenizer = load_tokenizer(spec)
    model = dataclasses.replace(small_run.model, vocab_size=-(-tokenizer.vocab_size // 8) * 8)
    run = dataclasses.replace(small_run, model=model, data=settings, batch_size=1)
    data = load_data(run, Ranks())
    torch.manual_seed(0)
    network = Gecko(run.model)
    for held_out in (data.final, data.held_out, data.final.spread(3)):
        result = evaluate(network, held_out, "float32")
        targets = held_out.rows.targets
        scored = targets[(targets != IGNORED) & (targets != tokenizer.document_end)].tolist()
        if tokens == "bytes":
            text_bytes = len(scored)
        else:  # byte-level: a piece has one letter for each byte
            from tokenizers import Tokenizer

            library = Tokenizer.from_file(spec)
            text_bytes = sum(len(library.id_to_token(index)) for index in scored)
        assert result.nats_per_byte * text_bytes == pytest.approx(sum(result.row_losses), rel=1e-9)
