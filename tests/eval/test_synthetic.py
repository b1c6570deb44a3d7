"""Synthetic tasks: each answer can be looked up in the row, and the reported distance is that to its source."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.config import GeckoConfig
from gecko.eval.diagnose import SMALL, Diagnosis, diagnose
from gecko.eval.results import Results
from gecko.eval.synthetic import TASKS, SyntheticBatch, TaskSize, guessing, hits_by_distance, mqar
from gecko.ops.loss import IGNORED

SIZES = st.builds(
    TaskSize, length=st.integers(33, 96), vocab_size=st.integers(24, 64), items=st.integers(1, 8),
    power_a=st.sampled_from([0.01, 1.0]), noise=st.booleans(),
)  # fmt: skip
STATES = ("parity", "counting", "permutations")
COPIES = sorted(set(TASKS) - {"memorization", *STATES})
"""Tasks whose answers stand in the row."""


def made(task: str, size: TaskSize, rows: int = 4, seed: int = 0) -> SyntheticBatch:
    return TASKS[task](size, rows, torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(task=st.sampled_from(COPIES), size=SIZES, seed=st.integers(0, 99))
def test_every_answer_stands_at_its_source(task: str, size: TaskSize, seed: int) -> None:
    batch = made(task, size, seed=seed)
    assert batch.tokens.shape == batch.targets.shape == batch.sources.shape == (4, size.length)
    assert int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < size.vocab_size
    asked = batch.targets != IGNORED
    assert torch.equal(asked, batch.sources >= 0)
    rows, places = asked.nonzero(as_tuple=True)
    sources = batch.sources[rows, places]
    assert bool((sources < places).all())
    assert torch.equal(batch.tokens[rows, sources], batch.targets[rows, places])
    counts = {"induction_heads": 1, "mqar": size.items, "selective_copying": size.items}
    assert asked.sum(1).tolist() == [counts[task]] * 4 if task in counts else bool((asked.sum(1) >= 1).all())


@settings(max_examples=30, deadline=None)
@given(task=st.sampled_from(["recall", "noisy_recall", "fuzzy_recall"]), size=SIZES, seed=st.integers(0, 99))
def test_recall_asks_for_every_key_that_was_there(task: str, size: TaskSize, seed: int) -> None:
    """A reader who splits the row at its kinds of tokens finds the same questions and answers; the last pair is one."""
    batch, fuzzy = made(task, size, seed=seed), task == "fuzzy_recall"
    half = (size.vocab_size - 1) // 2 if fuzzy else size.vocab_size // (2 if task == "recall" else 4)
    kind = {fuzzy + place: "k" if place < half else "v" for place in range(2 * half)}
    for row in range(4):
        tokens = batch.tokens[row].tolist()
        kinds = "".join(kind.get(token, "-") for token in tokens)
        pairs = list(re.compile("k+v+").finditer(kinds, 0 if fuzzy else size.length % 2))
        known: dict[tuple[int, ...], list[int]] = {}
        asked: dict[int, int] = {}
        for pair in pairs:
            split = pair.start() + pair[0].count("k")
            key, value = tuple(tokens[pair.start() : split]), tokens[split : pair.end()]
            if key in known:
                assert known[key] == value
                asked |= {split - 1 + place: token for place, token in enumerate(value)}
            known[key] = value
        wanted = [asked.get(place, IGNORED) for place in range(size.length)]
        assert batch.targets[row].tolist() == wanted
        assert wanted[-2] != IGNORED, "the last token asked for is that of the last pair"


def test_memorized_values_are_the_same_in_all_rows() -> None:
    size, known = TaskSize(64, 21), {}
    for seed in range(20):
        batch = made("memorization", size, seed=seed)
        rows, places = (batch.targets != IGNORED).nonzero(as_tuple=True)
        assert set(batch.tokens[rows, places].tolist()) == {20} and len(places) == 4 * 32
        assert torch.equal(batch.sources[rows, places], places - 1)
        pairs = zip(batch.tokens[rows, places - 1].tolist(), batch.targets[rows, places].tolist(), strict=True)
        assert all(known.setdefault(key, value) == value for key, value in pairs)
    assert sorted(known) == list(range(10)) and sorted(known.values()) == list(range(10, 20))


@settings(max_examples=30)
@given(task=st.sampled_from(STATES), items=st.integers(2, 4), seed=st.integers(0, 99))
def test_states_follow_from_all_tokens_so_far(task: str, items: int, seed: int) -> None:
    batch = made(task, TaskSize(40, 24, items), seed=seed)
    assert not batch.sources.any()
    every = list(itertools.permutations(range(items)))
    for row in range(4):
        tokens, state = batch.tokens[row].tolist(), tuple(range(items))
        for place, token in enumerate(tokens):
            answer = int(batch.targets[row, place])
            if task == "permutations":
                state = tuple(every[token][i] for i in state)
                assert every[answer] == state
            else:
                modulus = 2 if task == "parity" else items
                assert answer == sum(tokens[: place + 1]) % modulus and max(tokens) < modulus


@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_that_are_known_are_right_and_guesses_are_chance(task: str) -> None:
    size = TaskSize(64, 24, 4)
    batch = made(task, size, rows=400)
    asked = batch.targets != IGNORED
    assert all(all(hits) for hits in hits_by_distance(batch, batch.targets, 16).values())
    answers, random = batch.targets[asked].unique(), torch.Generator().manual_seed(1)
    if task == "mqar":  # a guess knows the values of its row
        own = batch.targets.masked_fill(~asked, -1).topk(4, 1).values
        guesses = own.gather(1, torch.randint(4, (*own.shape[:1], 64), generator=random))
    else:
        guesses = answers[torch.randint(len(answers), asked.shape, generator=random)]
    hits = [hit for every in hits_by_distance(batch, guesses, 16).values() for hit in every]
    chance = guessing(task, size)
    assert sum(hits) / len(hits) == pytest.approx(chance, abs=4 * (chance / len(hits)) ** 0.5)


@settings(max_examples=30)
@given(size=SIZES, seed=st.integers(0, 99))
def test_mqar_asks_every_key_once(size: TaskSize, seed: int) -> None:
    batch, pairs = made("mqar", size, seed=seed), size.items
    keys, values = batch.tokens[:, 0 : 2 * pairs : 2], batch.tokens[:, 1 : 2 * pairs : 2]
    half = size.vocab_size // 2
    assert bool(((keys >= 1) & (keys < half)).all()) and bool((values >= half).all())
    for row in range(4):
        assert len(set(keys[row].tolist())) == len(set(values[row].tolist())) == pairs
        places = (batch.targets[row] != IGNORED).nonzero().squeeze(1)
        assert bool((places >= 2 * pairs).all()) and bool((places % 2 == 0).all())
        assert sorted(batch.tokens[row, places].tolist()) == sorted(keys[row].tolist())
        assert torch.equal(batch.tokens[row, batch.sources[row, places] - 1], batch.tokens[row, places])
        between = torch.ones(size.length, dtype=torch.bool)
        between[: 2 * pairs], between[places] = False, False
        assert size.noise == bool(batch.tokens[row, between].any())


def test_what_is_drawn_has_its_share_and_its_place() -> None:
    """Queries of MQAR are spread evenly or near, noise has its own half, and tokens to copy keep their order."""
    for power_a, low, high in ((1.0, 0.47, 0.51), (0.01, 0.0, 0.3)):
        batch = made("mqar", TaskSize(128, 64, 1, power_a), rows=2000)
        assert low < float(((batch.targets != IGNORED).nonzero()[:, 1] - 2).double().mean()) / 126 < high
    batch = made("noisy_recall", TaskSize(512, 64, noise_share=0.4), rows=64)
    assert float((batch.tokens >= 32).double().mean()) == pytest.approx(0.4, abs=0.02)
    batch = made("selective_copying", TaskSize(40, 20, 6))
    for row in range(4):
        context = batch.tokens[row, :34]
        assert batch.targets[row, 34:].tolist() == context[context > 0].tolist()
        assert batch.tokens[row, 34:].tolist() == [1] * 6
    batch = made("induction_heads", TaskSize(40, 20))
    for row in range(4):
        first, last = (batch.tokens[row] == 0).nonzero().squeeze(1).tolist()[:2]
        assert last == 39 and int(batch.targets[row, 39]) == int(batch.tokens[row, first + 1])


def test_hits_are_told_by_distance_in_chunks() -> None:
    batch = made("mqar", TaskSize(64, 64, 8), rows=20)
    predicted = batch.targets.clone()
    far = (torch.arange(64) // 8 - batch.sources // 8) >= 4
    predicted[far] = -1
    found = hits_by_distance(batch, predicted, chunk=8)
    assert sum(map(len, found.values())) == 160
    assert all(all(hits) if distance < 4 else not any(hits) for distance, hits in found.items())
    assert list(found) == sorted(found)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_sizes_that_do_not_fit_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=f"{task} needs"):
        made(task, TaskSize(length=0 if task in STATES else 1, vocab_size=8, items=8))
    with pytest.raises(ValueError, match="a token for each of its 9! permutations"):
        made("permutations", TaskSize(vocab_size=400_000, items=9))


MODEL = GeckoConfig(
    vocab_size=32, num_layers=2, model_dim=32, key_dim=16, value_dim=64, num_heads=1, ffn_dim=32, cema_modes=4,
    chunk_size=16, timestep_groups=4,
)  # fmt: skip


def diagnosed(task: str, size: TaskSize, **settings: Any) -> Results:
    return diagnose(task, Diagnosis(size, **{"model": MODEL, "test_rows": 8, **settings}), torch.device("cpu"))


def test_training_beats_guessing_and_is_the_same_again() -> None:
    """Two pairs within one window: attention can look them up."""
    settings = {"batch_size": 32, "learning_rate": 1e-2}
    results = diagnosed("mqar", TaskSize(16, 16, 2), steps=150, test_rows=100, **settings)
    total = results.scores[0]
    assert (total.n, total.where) == (200, {"chunks before the question": "any"})
    assert total.interval is not None and total.interval.low > 0.7, total
    assert sum(score.n for score in results.scores[1:]) == 200
    assert results.notes == ["guessing gives 0.5000"]
    losses = [diagnosed("mqar", TaskSize(16, 16, 2), steps=3, seed=seed, **settings).details for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    total = diagnosed("parity", TaskSize(40, 16), steps=0, test_rows=33).scores[0]
    assert (total.n, total.unit) == (33 * 40, "answers") and total.interval is not None
    assert total.interval.method == "bootstrap over rows, 95 %"


@pytest.mark.parametrize("architecture", SMALL)
def test_every_architecture_learns_parity(architecture: str) -> None:
    """Parity of two bits."""
    config = SMALL[architecture]
    results = diagnosed("parity", TaskSize(2, 16, 2), model=config, steps=60, learning_rate=1e-2, test_rows=64)
    assert results.scores[0].value > 0.8 and results.settings["config"] == config.to_dict()


def test_a_task_grows_to_its_size() -> None:
    growing = Diagnosis(size=TaskSize(256, 64, 16), steps=100, growth=0.6)
    sizes = [growing.size_at(step) for step in range(100)]
    assert [(size.length, size.items) for size in sizes] == [(64, 4)] * 30 + [(128, 8)] * 30 + [(256, 16)] * 40
    assert {(size.vocab_size, size.noise) for size in sizes} == {(64, True)}
    assert dataclasses.replace(growing, growth=0.0).size_at(0) == growing.size
    assert dataclasses.replace(growing, size=TaskSize(items=1)).size_at(0).items == 1


def test_rows_of_training_grow_and_none_is_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by two steps, nor by training and test, nor by runs of two seeds."""
    batches: list[SyntheticBatch] = []
    monkeypatch.setitem(TASKS, "mqar", lambda *given: (batches.append(mqar(*given)), batches[-1])[1])
    diagnosed("mqar", TaskSize(32, 16, 4), steps=4, growth=1.0, test_rows=4)
    assert [batch.tokens.shape[1] for batch in batches] == [8, 8, 16, 16, 32]
    batches.clear()
    for seed in (0, 1, 2**32):
        diagnosed("mqar", TaskSize(32, 16, 4), steps=4, batch_size=32, test_rows=96, seed=seed)
    rows = torch.cat([batch.tokens for batch in batches])
    assert len(rows) == 3 * (4 * 32 + 96) and len(rows.unique(dim=0)) == len(rows)


def test_a_diverged_diagnosis_is_written_and_says_so(tmp_path: Path) -> None:
    results = diagnosed("mqar", TaskSize(16, 16, 2), steps=6, learning_rate=1e30)
    results.save(tmp_path / "r.json", {}, "gecko eval diagnose", {})
    losses = [point["loss"] for point in json.loads((tmp_path / "r.json").read_text())["details"]["training_losses"]]
    assert losses[0] > 0 and losses[-1] is None
    assert f"training diverged: the loss is not finite at step {losses.index(None) + 1}" in results.notes[1]


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("mqarr", {"steps": 0}, "Did you mean 'mqar'"), ("mqar", {"size": TaskSize(vocab_size=64)}, "know all tokens"),
        ("mqar", {"growth": 2}, "growth is a fraction"),
        ("counting", {"items": 0}, "at least one item"), ("mqar", {"batch_size": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_diagnoses_that_cannot_be_are_refused(task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        diagnosed(task, **{"size": TaskSize(32, 32, settings.pop("items", 2)), **settings})
