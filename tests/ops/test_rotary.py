"""Rotary embedding: scores depend on differences of positions only."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate

DIM, BASE = 6, 10_000.0
FREQUENCIES = rotary_frequencies(DIM, BASE)


def _turned(x: torch.Tensor, position: int, heads: int = 2) -> torch.Tensor:
    return rotate(x, rotary_phases(torch.tensor([position]), FREQUENCIES, x.dtype, x.device), heads)


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    q, k = torch.randn(2, 1, 2, 1, DIM, generator=generator, dtype=torch.float64)
    return q, k


def test_rotation_turns_interleaved_pairs():
    x, _ = _pair()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    angle = 7 * BASE ** -(torch.arange(0, DIM, 2).double() / DIM)
    torch.testing.assert_close(_turned(x, 7), torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2))


@given(query=st.integers(0, 5000), lag=st.integers(0, 5000), shift=st.integers(-5000, 5000))
def test_scores_depend_on_differences_only(query, lag, shift):
    q, k = _pair()
    here = (_turned(q, query) * _turned(k, query - lag)).sum()
    there = (_turned(q, query + shift) * _turned(k, query - lag + shift)).sum()
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_only_the_first_heads_turn():
    x, _ = _pair()
    assert torch.equal(_turned(x, 5, heads=0), x)
    one = _turned(x, 5, heads=1)
    assert torch.equal(one[:, 0], _turned(x, 5)[:, 0]) and torch.equal(one[:, 1], x[:, 1])


def test_float32_tables_are_rounded_once():
    """Angles are computed in float64: at position 4 M, a float32 angle would be off by a quarter radian."""
    position = torch.tensor([4_000_000])
    exact = rotary_phases(position, FREQUENCIES, torch.float64, torch.device("cpu"))
    single = rotary_phases(position, FREQUENCIES, torch.float32, torch.device("cpu"))
    for got, wanted in zip(single, exact, strict=True):
        assert (got - wanted).abs().max() < 1e-7
