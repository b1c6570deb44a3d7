"""Rows of different lengths in one call: each row gets the state and the inputs of the head that it would get alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import SMALL, VARIANTS, model, tokens

import gecko
from gecko.state import GeckoState

IN_C = gecko.GeckoConfig(
    vocab_size=SMALL.vocab_size, num_layers=2, model_dim=32, key_dim=32, value_dim=64, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip
"""Architecture whose operators run in C."""


def check(reader: gecko.Gecko, before: Sequence[int], lengths: Sequence[int], tolerance: float) -> None:
    """Compare rows of these lengths, after ``before`` tokens, with calls of one row."""
    close = {"rtol": tolerance, "atol": tolerance}
    with torch.inference_mode():
        states = [reader.hidden(tokens(1, n, 100 + i))[1] if n else None for i, n in enumerate(before)]
        rows = torch.full((len(lengths), max(lengths)), 3)
        for i, length in enumerate(lengths):
            rows[i, :length] = tokens(1, length, i)
        stacked = GeckoState.stack([reader.empty_state() if state is None else state for state in states])
        hidden, after = reader.hidden(rows, state=stacked if any(before) else None, lengths=torch.tensor(lengths))
        for i, (length, earlier) in enumerate(zip(lengths, states, strict=True)):
            expected, state = reader.hidden(tokens(1, length, i), state=earlier)
            torch.testing.assert_close(hidden[i, :length], expected[0], **close)
            for (name, own), same in zip(after.rows([i]).tensors().items(), state.tensors().values(), strict=True):
                torch.testing.assert_close(own, same, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def in_c() -> gecko.Gecko:
    torch.manual_seed(0)
    return gecko.Gecko(IN_C)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=2, max_size=5), same=st.booleans(),
    before=st.lists(st.sampled_from([0, 8, 16, 21, 40]), min_size=5, max_size=5),
)  # fmt: skip
def test_rows_in_c(in_c: gecko.Gecko, lengths: list[int], before: list[int], same: bool) -> None:
    """Rows at one position or at different ones, at the start of a chunk or within one."""
    before = [before[0]] * 5 if same else before
    check(in_c, before[: len(lengths)], lengths, 1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("before", [(16, 16, 16, 16), (5, 0, 30, 16)])
def test_rows_of_every_architecture(name: str, before: tuple[int, ...]) -> None:
    check(model(name), before, (3, 40, 17, 16), 1e-9)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1, 9], r"in 1\.\.8"), ([0, 8], r"in 1\.\.8"), ([8], "2 integers"), ([1.0, 2.0], "integers")],
)
def test_wrong_lengths(in_c: gecko.Gecko, lengths: list[float], message: str) -> None:
    """Padding has no gradients and no documents."""
    rows = torch.ones(2, 8, dtype=torch.int64)
    with torch.inference_mode(), pytest.raises(ValueError, match=message):
        in_c.hidden(rows, lengths=torch.tensor(lengths))
    with pytest.raises(ValueError, match="without gradients"):
        in_c.hidden(rows, lengths=torch.tensor([3, 8]))
    with torch.inference_mode(), pytest.raises(ValueError, match="exclude each other"):
        in_c.hidden(rows, rows, lengths=torch.tensor([3, 8]))
