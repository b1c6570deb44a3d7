"""A corpus that ranks tokenize together is the one that a single process tokenizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import training_jobs as work
from support.corpora import as_lines, words
from support.jobs import Jobs

from gecko.train import DataSettings, Run

MERGES = [("r", "e"), ("re", "d"), ("o", "v")]


def some_texts(count: int) -> list[str]:
    """Return texts of very unequal lengths; some have no tokens, and one fills several batches."""
    choose = random.Random(count)
    texts = [words(choose.randrange(1, 30), number) for number in range(count)]
    for number in range(0, count, 5):
        texts[number] = "  "
    texts[1] = words(200)
    return texts


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 7, 60])
def test_the_corpus_is_that_of_a_single_process(jobs: Jobs, ranks: int, count: int) -> None:
    """With two texts, some ranks have no share. Every text is tokenized once."""
    texts = some_texts(count)
    ((expected, all_texts),) = jobs.run(1, work.corpus_of_shares, [texts], [MERGES])
    results = jobs.run(ranks, work.corpus_of_shares, [texts] * ranks, [MERGES] * ranks)
    for got, _ in results:
        assert got.digest() == expected.digest() and got.tokens.dtype == expected.tokens.dtype
        for name in ("offsets", "lengths"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert all_texts == count == sum(tokenized for _, tokenized in results)


@pytest.mark.parametrize("other", ["texts", "tokenizer"])
def test_ranks_that_read_other_texts_are_refused(jobs: Jobs, other: str) -> None:
    """The second rank's texts have the same lengths."""
    texts = some_texts(7)
    second_texts = [*texts[:-1], texts[-1].swapcase()] if other == "texts" else texts
    merges = [MERGES, MERGES if other == "texts" else MERGES[:2]]
    first, second = jobs.answers(2, work.corpus_of_shares, [texts, second_texts], merges)
    assert first.error is not None and "ValueError: all ranks must read the same texts" in first.error
    assert second.error == "SystemExit: 2"


def test_texts_without_tokens_are_refused(jobs: Jobs) -> None:
    first, second = jobs.answers(2, work.corpus_of_shares, [["  ", " "]] * 2, [MERGES] * 2)
    assert first.error is not None and "must hold at least one document with text; got none" in first.error
    assert second.error == "SystemExit: 2"


def test_a_mixture_with_held_out_texts_has_the_rows_of_a_single_process(
    jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path
) -> None:
    sources = []
    for number, name in enumerate(("a", "b", "held-out")):
        (tmp_path / name).mkdir()
        sources.append(as_lines([words(60, 100 * number + text) for text in range(30)], tmp_path / name))
    data = DataSettings(sources=(f"{sources[0]}=0.7", f"{sources[1]}=0.3"), validation=sources[2])
    run = run_in("x", data=data)
    (whole,) = jobs.run(1, work.rows_seen, run, 4)
    seen = jobs.run(2, work.rows_seen, run, 4)
    for step, (_, rows) in enumerate(whole):
        parts = [steps[step] for steps in seen]
        assert sorted(rows) == sorted(row for _, part in parts for row in part)
