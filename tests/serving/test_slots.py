"""Rows in state slots do not change when others join and leave, and states outside the slots are never overwritten."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.inference import read
from gecko.inference.decoder import StateSlots
from gecko.state import GeckoState

NONE_SEEN = torch.zeros(264, dtype=torch.bool)


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def same(found: GeckoState, expected: GeckoState) -> None:
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


@settings(max_examples=12)
@given(moves=st.lists(st.integers(-3, 60).filter(bool), min_size=1, max_size=14))
def test_rows_stay_what_they_are_while_others_come_and_go(model: gecko.Gecko, moves: list[int]) -> None:
    """A positive move adds a text of that length, a negative one removes a row; after each, all rows take a step."""
    with torch.inference_mode():
        slots, texts = StateSlots(model, 4), []
        for count, move in enumerate(moves):
            if move > 0 and slots.count < slots.capacity:
                texts.append(text(move, count))
                slots.add(read(model, [texts[-1]]).state, NONE_SEEN)
            elif move < 0 and texts:
                place = -move % len(texts)
                slots.remove(place)
                texts[place] = texts[-1]
                texts.pop()
            if texts:
                tokens = text(len(texts), count)
                logits, state = model.step(tokens, slots.state)
                slots.update(state)
                texts = [torch.cat([known, token[None]]) for known, token in zip(texts, tokens, strict=True)]
            for row, known in enumerate(texts):
                expected = read(model, [known])
                same(slots.state.rows([row]), expected.state)
                torch.testing.assert_close(logits[row], expected.logits, rtol=1e-4, atol=1e-4)
    assert slots.count == len(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_writes_large_tensors_in_place_and_allocates_no_new_ones(model: gecko.Gecko, dtype: torch.dtype) -> None:
    model = copy.deepcopy(model).to(dtype)
    with torch.inference_mode():
        slots = StateSlots(model, 3)
        for length in (7, 15, 40):
            slots.add(read(model, [text(length)]).state, NONE_SEEN)
        places = {name: tensor.data_ptr() for name, tensor in slots.state.tensors().items()}
        for step in range(20):
            _, state = model.step(text(3, step), slots.state)
            slots.update(state)
            own = {name for name, tensor in state.tensors().items() if tensor.data_ptr() == places[name]}
            for name, tensor in slots.state.tensors().items():
                assert tensor.data_ptr() == places[name]
                assert name in own or tensor[0].numel() <= 16, f"{name} was copied"


def test_what_joins_is_copied(model: gecko.Gecko) -> None:
    reading = read(model, [text(20)])
    before = reading.state.map(torch.clone)
    with torch.inference_mode():
        slots = StateSlots(model, 2)
        for _ in range(2):
            slots.add(reading.state, reading.seen)
        for step in range(20):
            slots.update(model.step(text(2, step), slots.state)[1])
    for name, tensor in reading.state.tensors().items():
        assert torch.equal(tensor, before.tensors()[name]), name


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
    """Coefficients that a layer keeps between tokens are computed again."""
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
