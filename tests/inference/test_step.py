"""``Gecko.step`` is a call of one token; states are values, which no call changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.inference import read
from gecko.state import GeckoState


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def same(found: GeckoState, expected: GeckoState) -> None:
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_leaves_the_state_that_it_is_given(model: gecko.Gecko, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        state = read(model, [text(15)]).state.map(torch.clone)
        before = state.map(torch.clone)
        for tokens in ([[5]], [[6]], [[7, 8]]):
            model(torch.tensor(tokens), state=state)
            for name, tensor in state.tensors().items():
                assert torch.equal(tensor, before.tensors()[name]), name


@settings(max_examples=10)
@given(length=st.integers(1, 40), steps=st.integers(1, 20))
def test_a_step_is_a_call_of_one_token(model: gecko.Gecko, length: int, steps: int) -> None:
    state = read(model, [text(length)]).state
    own = state
    with torch.inference_mode():
        for count in range(steps):
            tokens = text(1, count)
            expected, state = model(tokens.unsqueeze(1), state=state)
            logits, own = model.step(tokens, own)
            torch.testing.assert_close(logits, expected[:, 0], rtol=1e-5, atol=1e-5)
            same(own, state)


def test_a_step_follows_weights_that_change(model: gecko.Gecko) -> None:
    """What a layer keeps from token to token is made anew."""
    changed = gecko.Gecko(model.config)
    changed.load_state_dict(model.state_dict())
    states = []
    for _ in range(2):
        with torch.inference_mode():
            states.append(changed.step(torch.tensor([1]), changed.empty_state())[1])
        with torch.no_grad():
            changed.blocks[0].mixer.cema.alpha.add_(1)
    with torch.inference_mode():
        _, expected = changed(torch.tensor([[1]]))
        _, found = changed.step(torch.tensor([1]), changed.empty_state())
    same(found, expected)
    assert not torch.equal(states[0].mixers[0].cema, found.mixers[0].cema)


def test_states_of_others_do_not_step(model: gecko.Gecko) -> None:
    with pytest.raises(ValueError, match="hold the tokens' 2 rows; it holds 1"):
        model.step(torch.tensor([1, 2]), model.empty_state(1))
    with pytest.raises(ValueError, match=r"0\.\.263; got 264"):
        model.step(torch.tensor([264]), model.empty_state(1))
