"""Perplexity by context length."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import Tokenizer, load_tokenizer
from gecko.eval import GeckoModel, Results
from gecko.eval.perplexity import perplexity
from gecko.eval.scored_model import Cursor, measure, open_texts

TEXT = "Emma Woodhouse, handsome, clever, and rich,\n with a comfortable   home — naïve. ".encode() * 40


def value(results: Results, name: str, context: int) -> float:
    (found,) = [score for score in results.scores if score.name == name and score.where == {"context": context}]
    return found.value


def test_every_segment_is_read_from_a_fresh_state(model: GeckoModel, write: Any) -> None:
    """Compare with one call of the model for each segment, over two texts."""
    texts = write(TEXT[:700], TEXT[900:1500])
    results = perplexity(model, texts, [64, 256])
    for length in (64, 256):
        total = 0.0
        for content in (TEXT[:512], TEXT[900:1412]):
            rows = torch.tensor(list(content)).view(-1, length)
            start = torch.full((len(rows), 1), 256)
            before = torch.cat([start, rows[:, :-1]], dim=1)
            total += float(model.model.token_losses(before, rows)[0].sum())
        assert value(results, "nats a token", length) == pytest.approx(total / 1024)
        assert value(results, "perplexity, token", length) == pytest.approx(math.exp(total / 1024))
        words = len(TEXT[:512].split()) + len(TEXT[900:1412].split())
        assert value(results, "perplexity, word", length) == pytest.approx(math.exp(total / words))
        assert value(results, "bits a byte", length) == pytest.approx(total / 1024 / math.log(2))
    change = value(results, "nats a token", 256) - value(results, "nats a token", 64)
    assert value(results, "change from 64, nats", 256) == pytest.approx(change)
    assert all(score.n == 1024 for score in results.scores)
    assert len(results.notes) == 2


@settings(max_examples=20)
@given(length=st.sampled_from([(16,), (16, 64), (32, 64, 256)]), count=st.integers(256, 900))
def test_the_same_tokens_are_scored_for_every_length(rule_model: Any, length: tuple[int, ...], count: int) -> None:
    """The loss depends on the token only, so it must be equal at every length, and so must the number of tokens."""
    content = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8).tobytes()
    with TemporaryDirectory() as folder:
        (Path(folder) / "text").write_bytes(content)
        texts = open_texts([f"{folder}/text"], joined=False)
        results = perplexity(rule_model(lambda position, token: token / 256), texts, length)
    scored = content[: count // length[-1] * length[-1]]
    for one in length:
        assert value(results, "nats a token", one) == pytest.approx(np.mean(list(scored)) / 256)
    assert {score.n for score in results.scores} == {len(scored)}


def test_intervals_are_of_blocks_and_hold_the_value(model: GeckoModel, write: Any) -> None:
    results = perplexity(model, write(TEXT[:1300]), [64, 128])
    for score in results.scores:
        assert score.interval is not None
        assert score.interval.low < score.value < score.interval.high
        assert "bootstrap" in score.interval.method
    again = perplexity(model, write(TEXT[:1300]), [64, 128])
    assert [score.interval for score in again.scores] == [score.interval for score in results.scores]


def test_lengths_that_do_not_fit_are_said(model: GeckoModel, write: Any) -> None:
    texts = write(TEXT, TEXT[:100])
    by_default = perplexity(model, write(TEXT[:2000]))
    assert by_default.settings["lengths"] == [1024]
    assert any("context 4,096 skipped: the shortest text has 2,000" in note for note in by_default.notes)
    skipped = perplexity(model, texts, [256])
    assert any("skipped" in note and "1.txt" in note and "100 tokens" in note for note in skipped.notes)
    with pytest.raises(ValueError, match="at least as long as the largest context, 8,192 tokens"):
        perplexity(model, texts, [8192])
    with pytest.raises(ValueError, match="divisor of the next"):
        perplexity(model, texts, [64, 96])
    with pytest.raises(ValueError, match="at least 1,024 tokens; the shortest has 100"):
        perplexity(model, texts)


def test_joined_files_are_one_text(model: GeckoModel, write: Any) -> None:
    joined = perplexity(model, write(TEXT[:300], TEXT[300:640], joined=True), [128])
    whole = perplexity(model, write(TEXT[:640]), [128])
    assert [score.value for score in joined.scores] == pytest.approx([score.value for score in whole.scores])


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Any) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    library.train_from_iterator([TEXT.decode()], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("cut", [1, 3, 50, 10_000])
def test_words_and_bytes_however_the_text_is_cut(tokenizer: Tokenizer, cut: int) -> None:
    ids = torch.from_numpy(tokenizer.encode(TEXT.decode()))
    size = measure(tokenizer, Cursor(iter(ids.split(cut))).take(len(ids)))
    assert size.words == len(TEXT.split())
    assert size.tokens == len(ids)
    if cut > 3:  # a cut inside a character can lose its bytes
        assert size.bytes == len(TEXT)
