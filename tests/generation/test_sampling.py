"""What is drawn is what temperature, top-k and top-p say, in this order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gecko.generation.sampling import Sampling, draw, probabilities

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


def by_hand(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """The definition, one number at a time."""
    scaled = [x / temperature for x in logits]
    kept = set(range(len(logits)))
    if top_k is not None and top_k < len(logits):
        least = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= least}
    weight = {i: math.exp(scaled[i] - max(scaled)) for i in kept}
    total = math.fsum(weight.values())
    chance = {i: w / total for i, w in weight.items()}
    if top_p is not None:
        nucleus: list[int] = []
        for i in sorted(chance, key=lambda i: (-chance[i], i)):
            # A total that differs from top_p by rounding alone may fall on either side.
            if math.fsum(chance[j] for j in nucleus) >= top_p:
                break
            nucleus.append(i)
        total = math.fsum(chance[i] for i in nucleus)
        chance = {i: chance[i] / total for i in nucleus}
    return [chance.get(i, 0.0) for i in range(len(logits))]


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.01, 0.99),
)
def test_probabilities_are_the_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    found = probabilities(torch.tensor([logits, logits[::-1]]), Sampling(temperature, top_k, top_p))
    for row, values in zip(found, (logits, logits[::-1]), strict=True):
        expected = by_hand(values, temperature, top_k, top_p)
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9)


@given(
    logits=LOGITS, top_k=st.none() | st.integers(1, 14), top_p=st.none() | st.floats(0.01, 0.99), seed=st.integers(0)
)
def test_only_what_is_kept_is_drawn(logits: list[float], top_k: int | None, top_p: float | None, seed: int) -> None:
    chance = by_hand(logits, 1.0, top_k, top_p)
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(5):
        (token,) = draw(torch.tensor([logits]), Sampling(1.0, top_k, top_p), [generator])
        assert chance[token] > 0


def test_frequencies_are_the_probabilities() -> None:
    logits, count = torch.tensor([[2.0, 0.0, 1.0, -1.0, 1.5]]), 40_000
    sampling = Sampling(0.9, top_k=4, top_p=0.95)
    # One generator for many equal rows: the same numbers as one row many times, drawn at once.
    tokens = draw(logits.expand(count, -1), sampling, [torch.Generator().manual_seed(1)] * count)
    found = torch.bincount(torch.tensor(tokens), minlength=5) / count
    expected = torch.tensor(by_hand(logits[0].tolist(), 0.9, 4, 0.95))
    assert (found - expected).abs().max() < 0.01


def test_of_equal_tokens_top_p_keeps_lower_ids() -> None:
    found = probabilities(torch.zeros(1, 1000), Sampling(1.0, top_p=0.25))
    assert found[0].nonzero().flatten().tolist() == list(range(250))


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_draw_kept_tokens(
    monkeypatch: pytest.MonkeyPatch, uniform: float, expected: int
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([uniform], dtype=torch.float64))
    # Neither the first nor the last token is among the three most likely ones.
    logits = torch.tensor([[0.0, 1.0, 1.1, 1.3, 0.0]])
    assert draw(logits, Sampling(1.0, top_k=3), [torch.Generator()]) == [expected]


def test_temperature_zero_is_greedy_and_takes_no_random_number() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert draw(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), Sampling(0.0), [generator] * 2) == [1, 0]
    assert torch.equal(generator.get_state(), before)


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    for temperature in (1e-30, 1e30):
        assert probabilities(logits, Sampling(temperature)).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    with pytest.raises(ValueError, match=r"finite.*row 1"):
        draw(logits, Sampling(temperature), [torch.Generator(), torch.Generator()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        Sampling(**{name: value})  # type: ignore[arg-type]
