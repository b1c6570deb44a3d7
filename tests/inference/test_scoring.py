"""Scoring a text reads it, and gives every token the loss of one call of the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gecko
from gecko.inference import read, score


def text(length: int) -> torch.Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(length))


@settings(max_examples=20)
@given(length=st.integers(1, 90), cuts=st.lists(st.integers(0, 90), max_size=4), piece=st.integers(1, 100))
def test_losses_and_state_of_any_pieces(model: gecko.Gecko, length: int, cuts: list[int], piece: int) -> None:
    tokens = text(length)
    scored = list(score(model, torch.tensor_split(tokens, sorted(cuts)), piece=piece))
    losses = torch.cat([losses for losses, _ in scored])
    assert losses.shape == (length - 1,)
    if length > 1:
        expected, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:])
        torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-4)
    whole = read(model, [tokens]).state
    for name, tensor in scored[-1].state.tensors().items():
        torch.testing.assert_close(tensor, whole.tensors()[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_state_goes_on_and_its_next_token_is_not_scored(model: gecko.Gecko) -> None:
    tokens = text(60)
    before = read(model, [tokens[:20]]).state
    scored = list(score(model, [tokens[20:]], before, piece=16))
    expected, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:])
    losses = torch.cat([losses for losses, _ in scored])
    torch.testing.assert_close(losses, expected[0, 20:], rtol=1e-4, atol=1e-4)
    assert scored[-1].state.position == [60]


def test_between_two_pieces_gradients_are_as_the_caller_has_them(model: gecko.Gecko) -> None:
    for _ in score(model, [text(50)], piece=16):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_bad_tokens_and_states(model: gecko.Gecko) -> None:
    assert list(score(model, [])) == []
    with pytest.raises(ValueError, match=r"ids in 0\.\.263; got 264"):
        list(score(model, [torch.tensor([264])]))
    with pytest.raises(ValueError, match="one row; got 2"):
        list(score(model, [text(3)], model.empty_state(2)))
