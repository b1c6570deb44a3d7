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
from support.corpora import write_tokenizer

from gecko.data import load_tokenizer
from gecko.eval import GeckoModel, Results
from gecko.eval.perplexity import perplexity
from gecko.eval.scored_model import Cursor, measure, open_texts

TEXT = "Emma Woodhouse, handsome, clever, and rich,\n with a comfortable   home — naïve. ".encode() * 40


def value(results: Results, name: str, context: int) -> float:
    (found,) = [score for score in results.scores if score.name == name and score.where == {"context": context}]
    return found.value


def test_every_segment_is_read_from_a_fresh_state(model: GeckoModel, write: Any) -> None:
    """Compare with one call of the model for each segment, over two texts. Intervals are the same again."""
    texts = write(TEXT[:700], TEXT[900:1500])
    results = perplexity(model, texts, [64, 256])
    words = len(TEXT[:512].split()) + len(TEXT[900:1412].split())
    for length in (64, 256):
        total = 0.0
        for content in (TEXT[:512], TEXT[900:1412]):
            rows = torch.tensor(list(content)).view(-1, length)
            before = torch.cat([torch.full((len(rows), 1), 256), rows[:, :-1]], dim=1)
            total += float(model.model.token_losses(before, rows)[0].sum())
        expected = {"nats a token": total / 1024, "perplexity, token": math.exp(total / 1024),
                    "perplexity, word": math.exp(total / words), "bits a byte": total / 1024 / math.log(2)}  # fmt: skip
        assert {name: value(results, name, length) for name in expected} == pytest.approx(expected)
    change = value(results, "nats a token", 256) - value(results, "nats a token", 64)
    assert value(results, "change from 64, nats", 256) == pytest.approx(change)
    assert len(results.notes) == 2
    for score, again in zip(results.scores, perplexity(model, texts, [64, 256]).scores, strict=True):
        assert score == again and score.n == 1024 and score.interval is not None
        assert score.interval.low < score.value < score.interval.high and "bootstrap" in score.interval.method
    joined = perplexity(model, write(TEXT[:300], TEXT[300:640], joined=True), [128])
    whole = perplexity(model, write(TEXT[:640]), [128])
    assert [score.value for score in joined.scores] == pytest.approx([score.value for score in whole.scores])


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


def test_lengths_that_do_not_fit_are_said(model: GeckoModel, rule_model: Any, write: Any) -> None:
    by_default = perplexity(rule_model(lambda position, token: 1.0), write(TEXT[:2000]))
    assert by_default.settings["lengths"] == [1024]
    assert any("context 4,096 skipped: the shortest text has 2,000" in note for note in by_default.notes)
    texts = write(TEXT[:300], TEXT[:100])
    skipped = perplexity(model, texts, [256])
    assert any("skipped" in note and "1.txt" in note and "100 tokens" in note for note in skipped.notes)
    for lengths, message in (([8192], "at least as long as the largest context, 8,192 tokens"),
                             ([64, 96], "divisor of the next"),
                             (None, "at least 1,024 tokens; the shortest has 100")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            perplexity(model, texts, lengths)


@pytest.mark.parametrize("cut", [1, 3, 50, 10_000])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_words_and_bytes_however_the_text_is_cut(kind: str, cut: int, tmp_path: Path) -> None:
    merges = [("o", "m"), ("Ġ", "h"), ("om", "e"), ("Ġh", "ome"), ("Ġ", "a"), ("Ġa", "n"), ("Ġan", "d"), ("Ã", "¯")]
    tokenizer = load_tokenizer(kind if kind == "bytes" else write_tokenizer(tmp_path / "bpe", merges))
    ids = torch.from_numpy(tokenizer.encode(TEXT.decode()))
    size = measure(tokenizer, Cursor(iter(ids.split(cut))).take(len(ids)))
    assert (size.words, size.tokens) == (len(TEXT.split()), len(ids))
    if cut > 3:  # a cut inside a character can lose its bytes
        assert size.bytes == len(TEXT)
