"""Tokens are drawn after bias, penalties, temperature, top-k, top-p and min-p, in this order."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gecko.inference.sampling import Sampler, Sampling, broken_rows, not_finite, random_numbers

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.01, 0.99),
    min_p=st.none() | st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.5]),
    logit_bias=st.dictionaries(st.just(0), st.sampled_from([-100.0, 0.5, 4.0]), max_size=1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.2]),
)


def by_hand(
    logits: list[float], sampling: Sampling, seen: set[int] | None = None, counts: Sequence[int] = ()
) -> list[float]:
    """Compute the probabilities from the definition, one number at a time."""
    biases = [sampling.logit_bias.get(i, 0) for i in range(len(logits))]
    scores = [-math.inf if bias <= -100 else x + bias for x, bias in zip(logits, biases, strict=True)]
    penalty = sampling.repetition_penalty
    for i in seen or ():
        scores[i] = scores[i] / penalty if scores[i] > 0 else scores[i] * penalty
    for i, count in enumerate(counts):
        scores[i] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
    scaled = [x / sampling.temperature for x in scores]
    kept = set(range(len(logits)))
    if sampling.top_k is not None and sampling.top_k < len(logits):
        least = sorted(scaled, reverse=True)[sampling.top_k - 1]
        kept = {i for i in kept if scaled[i] >= least}
    most = max(scaled)
    weight = {i: math.exp(scaled[i] - most) for i in kept}
    total = math.fsum(weight.values())
    chance = {i: w / total for i, w in weight.items()}
    if sampling.top_p is not None:
        nucleus: list[int] = []
        share = Fraction(0)
        for i in sorted(chance, key=lambda i: (-chance[i], i)):
            # A sum that equals top_p except for rounding may count as either.
            if float(share) >= sampling.top_p:
                break
            nucleus.append(i)
            share += Fraction(chance[i])
        chance = {i: chance[i] for i in nucleus}
    if sampling.min_p is not None:
        least = sampling.min_p * max(chance.values())
        chance = {i: p for i, p in chance.items() if p >= least}
    total = math.fsum(chance.values())
    return [chance.get(i, 0.0) / total for i in range(len(logits))]


def draw(logits: Tensor, sampling: Sampling, randoms: list[Iterator[float]], *more: Any) -> list[int]:
    return Sampler([sampling] * len(logits)).draw(logits, randoms, *more)


def probabilities(
    samplings: list[Sampling], logits: Tensor, seen: Tensor | None = None, counts: Sequence[Tensor] = ()
) -> Tensor:
    """Return the distributions that the rows' tokens are drawn from."""
    sampler = Sampler(samplings)
    return sampler._probabilities(sampler._adjusted(logits, seen, counts))


def counts_of(samplings: list[Sampling], size: int, seed: int = 0) -> list[Tensor]:
    """Return counts of generated tokens for the rows that need them, different ones for each row."""
    counts = torch.randint(0, 4, (len(samplings), size), generator=torch.Generator().manual_seed(seed))
    return [row for row, sampling in zip(counts, samplings, strict=True) if sampling.counts_tokens]


def seen_by(rows: list[set[int]], size: int) -> Tensor:
    return torch.tensor([[i in row for i in range(size)] for row in rows])


@given(logits=LOGITS, samplings=st.lists(SAMPLINGS, min_size=1, max_size=4), data=st.data())
def test_probabilities_are_the_definition_for_every_row(
    logits: list[float], samplings: list[Sampling], data: st.DataObject
) -> None:
    rows = [data.draw(st.permutations(logits)) for _ in samplings]
    seen = [data.draw(st.sets(st.integers(0, len(logits) - 1))) for _ in samplings]
    counts = counts_of(samplings, len(logits))
    found = probabilities(samplings, torch.tensor(rows), seen_by(seen, len(logits)), counts)
    counted = iter(counts)
    for row, values, sampling, held in zip(found, rows, samplings, seen, strict=True):
        made = next(counted).tolist() if sampling.counts_tokens else ()
        expected = torch.tensor(by_hand(values, sampling, held, made), dtype=torch.float64)
        torch.testing.assert_close(row, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e3, 1e300])
@pytest.mark.parametrize("bias", [-100.0, -1000.0])
def test_a_bias_excludes_tokens(temperature: float, bias: float) -> None:
    """Whatever else shapes the distribution, and however likely they are."""
    logits, seen = torch.tensor([[300.0, 0.0, 200.0, -5.0]]).expand(100, 4), torch.ones(100, 4, dtype=torch.bool)
    for name, value in (
        ("top_k", None), ("top_k", 3), ("top_p", 0.9), ("min_p", 0.5), ("repetition_penalty", 0.01),
        ("presence_penalty", -2.0),
    ):  # fmt: skip
        sampling = Sampling(temperature, logit_bias={0: bias, 2: bias}, **{name: value})
        counts = counts_of([sampling] * 100, 4)
        assert set(draw(logits, sampling, [random_numbers(seed) for seed in range(100)], seen, counts)) <= {1, 3}
    with pytest.raises(ValueError, match="must leave a token"):
        Sampling(temperature, logit_bias=dict.fromkeys(range(4), bias)).check_ids(4)


@given(
    samplings=st.lists(SAMPLINGS | st.just(Sampling(0.0)) | st.just(Sampling(0.0, repetition_penalty=2.0)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_a_row_draws_what_it_would_draw_alone(samplings: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), 30, generator=generator)
    seen = torch.rand(logits.shape, generator=generator) < 0.3
    counts, randoms = counts_of(samplings, 30, seed), [random_numbers(row) for row in range(len(samplings))]
    together = Sampler(samplings).draw(logits, randoms, seen, counts)
    counted = iter(counts)
    for row, sampling in enumerate(samplings):
        some, own = slice(row, row + 1), [next(counted)] if sampling.counts_tokens else []
        assert together[row : row + 1] == draw(logits[some], sampling, [random_numbers(row)], seen[some], own)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
def test_excluded_tokens_are_never_drawn(temperature: float, top_k: int | None) -> None:
    """Also the first one, for the smallest uniform number, and in C."""
    logits = torch.tensor([[9.0, 3.0, 8.0, 2.9, 9.0]]).index_fill(1, torch.tensor([0, 2, 4]), -math.inf).repeat(50, 1)
    randoms = [random_numbers(row) for row in range(50)]
    assert set(draw(logits, Sampling(temperature, top_k), randoms)) == ({1, 3} if temperature else {1})


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("sampling", [
    Sampling(0.0), Sampling(0.8), Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=3), Sampling(0.8, min_p=0.1),
    Sampling(0.0, repetition_penalty=1.3), Sampling(0.8, presence_penalty=1.0),
    Sampling(0.8, logit_bias=dict.fromkeys(range(1, 6), -100.0)),
])  # fmt: skip
def test_a_row_without_a_token_to_draw_is_told_from_the_others(
    sampling: Sampling, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which draw what they draw alone."""
    if not in_c:
        monkeypatch.setattr("gecko.inference.sampling.samples_in_c", lambda logits: False)
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    logits[1], logits[3, 0], logits[4, 2], logits[6, 1:] = -math.inf, math.nan, math.inf, -math.inf
    if sampling.logit_bias:
        logits[5, 0] = -math.inf  # the only token that the bias leaves
    seen, counts = torch.ones(7, 6, dtype=torch.bool), counts_of([sampling] * 7, 6)
    found = draw(logits, sampling, [random_numbers(row) for row in range(7)], seen, counts)
    lost = {1, 3, 4, 5} if sampling.logit_bias else {1, 3, 4}
    assert {row for row, token in enumerate(found) if token == -1} == lost
    for row in {*range(7)} - lost:
        some, own = slice(row, row + 1), counts[row : row + 1]
        assert found[some] == draw(logits[some], sampling, [random_numbers(row)], seen[some], own)
        assert logits[row, found[row]].isfinite()


def test_frequencies_are_the_probabilities() -> None:
    logits, count = torch.tensor([[2.0, 0.0, 1.0, -1.0, 1.5]]), 40_000
    sampling = Sampling(0.9, top_k=4, top_p=0.95)
    # With one source, many equal rows drawn at once use the numbers of one row drawn many times.
    tokens = draw(logits.expand(count, -1), sampling, [random_numbers(1)] * count)
    found = torch.bincount(torch.tensor(tokens), minlength=5) / count
    expected = torch.tensor(by_hand(logits[0].tolist(), sampling))
    assert (found - expected).abs().max() < 0.01


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
# With equal tokens, shares of whole numbers of tokens would depend on rounding.
@pytest.mark.parametrize("share", [0.0101, 0.5003, 0.9001, 0.9993])
def test_a_nucleus_of_any_size_is_found_in_a_large_vocabulary(spread: float, share: float) -> None:
    logits = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * spread).round(decimals=2)
    rows = torch.stack([logits, logits * 3])
    sampling = Sampling(1.0, top_p=share)
    for row, found in zip(rows, probabilities([sampling] * 2, rows), strict=True):
        expected = torch.tensor(by_hand(row.tolist(), sampling), dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_draw_kept_tokens(
    monkeypatch: pytest.MonkeyPatch, uniform: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([uniform], dtype=torch.float64))
    # The first and the last token are not among the three most likely ones.
    logits = torch.tensor([[0.0, 1.0, 1.1, 1.3, 0.0]])
    assert draw(logits, Sampling(1.0, top_k=3), [random_numbers(0)]) == [expected]


def test_temperature_zero_is_greedy_and_takes_no_random_number() -> None:
    random, fresh = random_numbers(0), random_numbers(0)
    assert draw(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), Sampling(0.0), [random] * 2) == [1, 0]
    assert next(random) == next(fresh)


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 2**63}, {"top_k": 10**400}, {"temperature": 5e-324}, {"temperature": 1e308}, {"top_p": 5e-324},
        {"min_p": 5e-324}, {"repetition_penalty": 0.01, "logit_bias": {1: 100.0}},
        {"repetition_penalty": 100.0, "logit_bias": {1: -100.0}},
    ],
    ids=range(8),
)  # fmt: skip
def test_every_number_that_is_taken_draws_a_token(extreme: dict[str, Any]) -> None:
    logits, seen = torch.tensor([[3e38, 1.0, -3e38]] * 2), torch.tensor([[False, True, False]] * 2)
    samplings, randoms = [Sampling(**extreme), Sampling(1.0)], [random_numbers(0)] * 2
    assert all(0 <= token < 3 for token in Sampler(samplings).draw(logits, randoms, seen))
    assert all(0 <= token < 3 for token in Sampler(samplings).draw(logits * 0, randoms, seen))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_found(value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    assert broken_rows(logits) == [1]
    assert f"{int(math.isnan(value))} NaN and {int(math.isinf(value))} infinite of 4" in not_finite(logits[1])


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": (-0.1, math.nan), "top_k": (0,), "top_p": (0.0, 1.1, math.nan), "min_p": (-0.1, 1.1),
        "repetition_penalty": (0.0, 0.009, 101.0, math.nan), "presence_penalty": (2.1,),
        "frequency_penalty": (-2.1, math.nan), "logit_bias": ({3: math.nan},),
    }.items(),
)  # fmt: skip
def test_numbers_out_of_range_are_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            Sampling(**{name: value})


@pytest.mark.parametrize("temperature", [0.0, 0.3, 40.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 3000])
def test_c_draws_what_pytorch_draws(temperature: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[:, 0] = logits.max(-1).values  # ties: the first of the most likely tokens
    found = draw(logits, Sampling(temperature), [random_numbers(row) for row in range(40)])
    monkeypatch.setattr("gecko.inference.sampling.samples_in_c", lambda logits: False)
    assert found == draw(logits, Sampling(temperature), [random_numbers(row) for row in range(40)])
