"""Perplexity by context length, loss by position, and the test of chunk borders."""

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
from scipy import stats
from support.corpora import write_tokenizer

from gecko.data import load_tokenizer
from gecko.eval import GeckoModel, Results
from gecko.eval.perplexity import PositionGrid, perplexity, positions
from gecko.eval.scored_model import Cursor, measure, open_texts

TEXT = "Emma Woodhouse, handsome, clever, and rich,\n with a comfortable   home — naïve. ".encode() * 40
GRID = PositionGrid(length=64, chunk=8, bin=2, first=2)
NOISE = np.random.default_rng(0).integers(97, 123, 4000, dtype=np.uint8).tobytes()


def value(results: Results, name: str, context: int | None = None) -> float:
    """Return a score at a context, or without one a score of the positions of ``GRID``."""
    where = {"chunk": GRID.chunk, "first": GRID.first} if context is None else {"context": context}
    (found,) = [score for score in results.scores if score.name == name and score.where == where]
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


def test_a_file_that_several_sources_name_is_read_once(model: GeckoModel, tmp_path: Path) -> None:
    """Twice as many tokens would narrow the interval."""
    (tmp_path / "a.txt").write_bytes(TEXT[:640])
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "b.txt").write_bytes(TEXT[:640])
    names = [str(tmp_path / name) for name in ("a.txt", "link.txt", "../" + tmp_path.name + "/a.txt", "b.txt")]
    assert [Path(text.name).name for text in open_texts(names, joined=False)] == ["a.txt", "b.txt"]


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


def test_numbers_are_those_of_all_losses_at_once(model: GeckoModel, write: Any) -> None:
    results = positions(model, write(NOISE[:1000]), GRID)
    rows = torch.tensor(list(NOISE[:960])).view(-1, 64)
    losses = model.model.token_losses(torch.cat([torch.full((15, 1), 256), rows[:, :-1]], dim=1), rows)[0].numpy()
    chunks = losses[:, 8:].reshape(-1, 8)
    curves = {"by_position": losses.reshape(15, 32, 2).mean(2), "in_chunk": chunks.reshape(-1, 4, 2).mean(2)}
    for name, bins in curves.items():
        curve = results.details[name]
        assert [point["position"] for point in curve] == list(range(0, 2 * len(curve), 2))
        np.testing.assert_allclose([point["mean"] for point in curve], bins.mean(0))
        np.testing.assert_allclose([point["standard_error"] for point in curve], stats.sem(bins))
    difference = chunks[:, :2].mean(1) - chunks[:, 2:].mean(1)
    test = stats.ttest_1samp(difference, 0)
    found = [value(results, name) for name in ("border minus rest", "t", "p, two-sided")]
    np.testing.assert_allclose(found, [difference.mean(), test.statistic, test.pvalue])
    interval = next(score.interval for score in results.scores if score.name == "border minus rest")
    assert interval is not None
    np.testing.assert_allclose([interval.low, interval.high], test.confidence_interval())
    assert {score.n for score in results.scores} == {15 * 7}


@pytest.mark.parametrize("rise", [0.0, 0.2])
def test_a_rise_at_borders_is_found_and_only_where_there_is_one(rule_model: Any, write: Any, rise: float) -> None:
    results = positions(rule_model(lambda position, token: token / 26 + rise * (position % 8 < 2)), write(NOISE), GRID)
    p = value(results, "p, two-sided")
    assert p < 1e-3 if rise else p > 0.05
    assert value(results, "border minus rest") == pytest.approx(rise, abs=0.1)
    phases = [point["mean"] for point in results.details["in_chunk"]]
    assert len(phases) == 4 and (phases[0] - np.mean(phases[1:]) > 0.1) == bool(rise)


def test_the_first_chunk_is_not_a_border(rule_model: Any, write: Any) -> None:
    results = positions(rule_model(lambda position, token: 100.0 if position < 8 else 1.0), write(NOISE), GRID)
    assert value(results, "nats after a border") == pytest.approx(1)
    assert results.details["by_position"][0]["mean"] == pytest.approx(100)
    assert not any(score.name == "t" for score in results.scores), "all alike: nothing to test"


def test_what_is_missing_is_said(model: GeckoModel, write: Any) -> None:
    one = positions(model, write(NOISE[:100], NOISE[:20]), GRID)
    assert any("shorter than a segment" in note for note in one.notes)
    assert any("no standard error" in note for note in one.notes)
    assert all(point["standard_error"] is None for point in one.details["by_position"])
    with pytest.raises(ValueError, match="at least as long as a segment, 64 tokens; none of 1"):
        positions(model, write(NOISE[:63]), GRID)
    assert positions(model, write(NOISE[:150], NOISE), GRID, segments=3).settings["segments"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"length": 8}, "two whole chunks"), ({"length": 60}, "two whole chunks"), ({"bin": 3}, "must divide a chunk"),
     ({"first": 8}, "1 to 7"), ({"chunk": 1}, "at least 2 tokens")],
)  # fmt: skip
def test_grids_that_show_no_border_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositionGrid(**({"length": 64, "chunk": 8, "bin": 2, "first": 2} | changes))
