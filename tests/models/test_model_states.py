"""Reading states are immutable, have constant size, and a text continues from any of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import cases
from support.cases import CHUNK, tokens
from support.model_calls import assert_same, assert_same_state, documents, read, variants

import gecko
from gecko.segments import Clock

pytestmark = pytest.mark.usefixtures("poisoned")


@variants
@pytest.mark.parametrize("position", [10_000_000 + 5, 2**31 + 5, 2**40 + 5])
@torch.no_grad()
def test_streams_the_same_at_any_position(variant, position):
    model = cases.model(variant)
    _, state = model(tokens(2, 3 * 2 * CHUNK + 5))
    far = at_position(state, position)
    assert far.position == [position] * 2
    text, ids = tokens(2, 40, seed=1), documents(2, 40, seed=6) + 3
    for cuts, segments in (((), None), ((1, 2, 20), None), ((1, 2, 20), ids)):
        here, after = read(model, text, cuts, segments, state)
        there, far_after = read(model, text, cuts, segments, far)
        assert torch.equal(here, there)
        assert_same_state(at_position(far_after, after.position[0]), after)


def at_position(state, position):
    """Return the same state with its positions moved by whole windows, so that chunk offsets do not change."""
    moves = position - state.clock.position
    assert not (moves % (2 * CHUNK)).any()
    clock = Clock(state.clock.position + moves, state.clock.document_start + moves, state.clock.segment_id)
    return dataclasses.replace(state, clock=clock)


@variants
@torch.no_grad()
def test_state_has_constant_size(variant):
    model = cases.model(variant)
    sizes, state = {model.empty_state(2).num_bytes}, None
    for length in (1, 7, 1, 30, 90):
        _, state = model(tokens(2, length), None, state)
        sizes.add(state.num_bytes)
    assert len(sizes) == 1


@variants
@pytest.mark.parametrize("length", [1, 5, 30])
@torch.no_grad()
def test_states_are_values(variant, length):
    """A call changes neither the given state nor states that it returned before."""
    model = cases.model(variant)
    _, state = model(tokens(2, 23))
    before = state.map(torch.clone)
    first, after = model(tokens(2, length), None, state)
    kept = after.map(torch.clone)
    second, again = model(tokens(2, length), None, state)
    model(tokens(2, length), None, after)
    assert torch.equal(first, second)
    for got, wanted in ((state, before), (after, kept), (again, kept)):
        for name, tensor in got.tensors().items():
            assert torch.equal(tensor, wanted.tensors()[name]), name


@variants
@pytest.mark.parametrize("length", [0, 1, 9, 29])
def test_steps_go_on_from_any_state_and_leave_it(variant, length):
    """Also from a state that shares tensors, from the initial state, and from one made in inference mode."""
    model, text = cases.model(variant), tokens(2, 70)
    with torch.inference_mode():
        state = model(text[:, :length])[1] if length else model.empty_state(2)
        expected, after = model(text[:, length:], state=state)
    before, own = state.map(torch.clone), state
    for place in range(length, 70):
        logits, own = model.step(text[:, place], own)
        assert_same(logits, expected[:, place - length])
    assert_same_state(own, after)
    assert_same_state(state, before)


COPIES = {
    "rows": lambda state: state.rows([1, 0]),
    "stack": lambda state: gecko.GeckoState.stack([state, state]),
    "map": lambda state: state.map(torch.clone),
    "to": lambda state: state.to("cpu"),
}


@pytest.mark.parametrize("copy", COPIES)
@torch.no_grad()
def test_copies_of_a_state_that_a_step_returned_stay_what_they_are(copy):
    """Copies belong to the caller."""
    model = cases.model("gecko")
    _, state = model.step(tokens(2, 1)[:, 0], model(tokens(2, 30))[1])
    kept = COPIES[copy](state)
    before = kept.map(torch.clone)
    for _ in range(20):
        model.step(tokens(kept.batch_size, 1, seed=2)[:, 0], kept)
    assert_same_state(kept, before)


@variants
@pytest.mark.parametrize("length", [1, 2, 5, 30])
@torch.no_grad()
def test_what_is_read_on_from_a_state_that_a_step_returned_stays_what_it_is(variant, length):
    model = cases.model(variant)
    _, state = model.step(tokens(2, 1)[:, 0], model(tokens(2, 29))[1])
    _, branch = model(tokens(2, length), state=state)
    before = branch.map(torch.clone)
    for token in tokens(2, 20, seed=2).unbind(1):
        _, state = model.step(token, state)
    assert_same_state(branch, before)


@torch.no_grad()
def test_steps_begin_with_the_weights_that_are_there():
    """Also weights that were changed through ``.data``, as averaged weights often are."""
    model, text = gecko.Gecko(cases.SMALL), tokens(1, 20)
    model.step(text[:, 0], model.empty_state())
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    expected, _ = model(text)
    state = dataclasses.replace(model.empty_state(), model="")
    for place in range(20):
        logits, state = model.step(text[:, place], state)
        assert_same(logits, expected[:, place])


@variants
@torch.no_grad()
def test_empty_state_is_no_state(variant):
    model, text = cases.model(variant), tokens(2, 30)
    assert_same(model(text, None, model.empty_state(2))[0], model(text)[0])


@variants
@pytest.mark.parametrize("length", [1, 30])
@torch.no_grad()
def test_empty_state_is_no_state_to_16_bit_weights(variant, length):
    model, text = cases.model(variant, torch.bfloat16), tokens(2, length)
    torch.testing.assert_close(model(text, None, model.empty_state(2))[0], model(text)[0], rtol=0.05, atol=0.05)
