"""Laws of the model: its calls, inputs and states."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases
from support.cases import CHUNK, SMALL, tokens
from support.model_calls import assert_same, assert_same_state, documents, read, variants

import gecko
from gecko.models import Llama, build_model, find_preset
from gecko.segments import Clock

# ---- Invariants of the model: calls of any size, rows at any position, packing, precision.

pytestmark = pytest.mark.usefixtures("poisoned")

texts = st.fixed_dictionaries({
    "batch": st.integers(1, 3),
    "length": st.integers(2, 60),
    "seed": st.integers(0, 9),
})  # fmt: skip


@variants
@settings(max_examples=4)
@given(data=st.data())
def test_any_split_gives_the_same_logits(variant, data):
    text = data.draw(texts)
    cuts = data.draw(st.sets(st.integers(1, text["length"] - 1), max_size=8).map(sorted))
    ids = data.draw(st.sampled_from([None, documents(**text)]))
    with torch.no_grad():
        model = cases.model(variant)
        whole, state = read(model, tokens(**text), ids=ids)
        parts, parts_state = read(model, tokens(**text), cuts, ids)
    assert_same(parts, whole)
    assert_same_state(parts_state, state)


@variants
def test_split_gives_the_same_gradients(variant):
    """Gradients flow through the states as well; a caller may truncate them by detaching."""
    text, ids, gradients = tokens(2, 41), documents(2, 41, seed=4), []
    for cuts in ((), (1, 9, 10, 30)):
        model = cases.model(variant)
        logits, _ = read(model, text, cuts, ids)
        F.cross_entropy(logits.flatten(0, 1), text.flatten()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)


@variants
@settings(max_examples=3)
@given(positions=st.lists(st.integers(0, 40), min_size=2, max_size=4), length=st.integers(1, 20), ids=st.booleans())
def test_rows_at_different_positions(variant, positions, length, ids):
    """Each row of a batch gets what it gets alone, whatever the positions of the rows."""
    with torch.no_grad():
        model = cases.model(variant)
        states = [
            read(model, tokens(1, position, row))[1] if position else model.empty_state()
            for row, position in enumerate(positions)
        ]
        text = tokens(len(positions), length, seed=99)
        segments = documents(len(positions), length, seed=length) if ids else None
        batch, after = read(model, text, ids=segments, state=gecko.GeckoState.stack(states))
        for row, state in enumerate(states):
            one = slice(row, row + 1)
            single, single_after = read(model, text[one], ids=None if segments is None else segments[one], state=state)
            assert_same(batch[one], single)
            assert_same_state(after.rows([row]), single_after)
    assert after.position == [position + length for position in positions]


@variants
@torch.no_grad()
def test_packed_documents_are_alone(variant):
    """A document that starts at a multiple of c gives exactly what it gives alone, others at the same chunk offset."""
    model, text = cases.model(variant), tokens(1, 90)
    borders = [0, 3, 2 * CHUNK, 5 * CHUNK, 5 * CHUNK + 1, 8 * CHUNK, 90]
    ids = torch.tensor([[sum(t >= border for border in borders) for t in range(90)]])
    packed, _ = model(text, ids)
    for begin, end in pairwise(borders):
        # The tokens that fill the chunk before the document only set its chunk offset.
        phase = begin % CHUNK
        filled = torch.cat([tokens(1, phase, seed=7), text[:, begin:end]], dim=1)
        alone, _ = model(filled, (torch.arange(filled.shape[1]) >= phase).long().unsqueeze(0))
        assert_same(packed[:, begin:end], alone[:, phase:])
        if phase == 0:
            assert_same(packed[:, begin:end], model(text[:, begin:end])[0])


@pytest.mark.parametrize("variant", [name for name in cases.VARIANTS if not name.startswith("llama")])
@torch.no_grad()
def test_memory_reaches_past_the_window(variant):
    """An early token changes all later logits, so the tests above depend on every part of the variant."""
    model, text = cases.model(variant, torch.float64), tokens(1, 60)
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % SMALL.vocab_size
    difference = (model(text)[0] - model(other)[0]).abs().amax(-1)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 1e-9).all()


@variants
def test_16_bit_weights_compute_what_32_bit_weights_do(variant):
    rounded = cases.model(variant, torch.bfloat16)
    exact, text = cases.model(variant, torch.float32), tokens(2, 40)
    exact.load_state_dict(rounded.state_dict())
    expected, _ = exact(text)
    logits, state = read(rounded, text, cuts=(1, 2, 17))
    assert logits.dtype is torch.bfloat16
    difference = (logits.float() - expected).norm() / expected.norm()
    assert difference < 0.03, f"relative difference {difference:.3f}"
    statistics = {x.dtype for name, x in state.tensors().items() if "norm" in name and x.is_floating_point()}
    assert statistics <= {torch.float32}
    rounded.loss(text[:, :-1], text[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rounded.parameters())


@variants
@pytest.mark.parametrize("cuts", [(), (1, 2, 20)], ids=["whole", "split"])
def test_bfloat16_autocast(variant, cuts):
    """Products in 16 bits are close to those in float32; accumulated parts of the state stay float32."""
    model, text = cases.model(variant, torch.float32), tokens(2, 40)
    exact, _ = read(model, text)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = read(model, text, cuts)
        loss = model.loss(text, text.roll(-1, 1))
    loss.backward()
    assert logits.isfinite().all() and loss.dtype == torch.float32
    assert ((logits - exact).norm() / exact.norm()) < 0.2
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for name, tensor in state.tensors().items():
        if tensor.is_floating_point() and ".attention." not in name:
            assert tensor.dtype == torch.float32, name


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_float64_as_it_is(variant, dtype):
    model, text = cases.model(variant), tokens(2, 21)
    expected = model(text)[0], model.loss(text, text)
    with torch.autocast("cpu", dtype):
        found = model(text)[0], model.loss(text, text)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float64
        assert_same(one, other)


@pytest.mark.parametrize("length", [1, 20])
@torch.no_grad()
def test_precision_may_change_between_calls(length):
    """A prompt read under autocast is continued in float32, and the reverse."""
    model, text = cases.model("gecko", torch.float32), tokens(2, length)
    _, plain = model(tokens(2, 21))
    with torch.autocast("cpu", torch.bfloat16):
        _, mixed = model(tokens(2, 21))
        assert model(text, None, plain)[0].isfinite().all()
        assert model(text, None, model.empty_state(2))[0].isfinite().all()
    assert model(text, None, mixed)[0].isfinite().all()


# ---- Tokens, targets, documents and states that a model accepts or refuses.


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (torch.zeros(1, 4), TypeError, r"tokens must be integers; got torch.float32. Use tokens.long\(\)"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"shape \(batch, length\).*got \(4,\)"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, r"both at least 1; got \(1, 0\)"),
        (torch.zeros(0, 3, dtype=torch.int64), ValueError, r"both at least 1; got \(0, 3\)"),
        (torch.tensor([[1, 37]]), ValueError, r"tokens must be ids in 0..36; got 37. Check that the tokenizer"),
        (torch.tensor([[-1, 3]]), ValueError, r"tokens must be ids in 0..36; got -1"),
    ],
)
def test_wrong_tokens(text, error, message):
    with pytest.raises(error, match=message):
        cases.model("gecko")(text)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_narrow_token_types(dtype):
    model, text = cases.model("gecko"), tokens(2, 9)
    assert torch.equal(model(text.to(dtype))[0], model(text)[0])
    if dtype.is_signed:  # as −100 is
        assert torch.equal(model.loss(text.to(dtype), text.to(dtype)), model.loss(text, text))


@cache
def small(kind, vocabulary):
    config = SMALL if kind is gecko.Gecko else dataclasses.replace(find_preset("llama-tiny"), num_layers=1)
    return build_model(dataclasses.replace(config, vocab_size=vocabulary))


@pytest.mark.parametrize("vocabulary", [37, 256, 264, 40_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("kind", [gecko.Gecko, Llama])
def test_ids_are_accepted_whatever_their_dtype(kind, dtype, vocabulary):
    """Also in a dtype that cannot hold the vocabulary's size or −100."""
    model, limits = small(kind, vocabulary), torch.iinfo(dtype)
    for one in (-vocabulary, -101, -100, -1, 0, 36, 37, 65, 155, 156, 255, 256, 263, 264, 32_767, 39_999, 40_000):
        if limits.min <= one <= limits.max:
            ids = torch.tensor([[1, one, 0]], dtype=dtype)
            zeros = torch.zeros_like(ids)
            refused, known = pytest.raises(ValueError, match=f"got {one}\\."), 0 <= one < vocabulary
            with nullcontext() if known else refused:
                assert torch.equal(model.loss(ids, zeros), model.loss(ids.long(), zeros))
            with nullcontext() if known or one == -100 else refused:
                assert torch.equal(model.loss(zeros, ids), model.loss(zeros, ids.long()))


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.int64), ValueError, r"the tokens' shape \(2, 9\); got \(2, 8\)"),
        (torch.zeros(2, 9), TypeError, "targets must be integers; got torch.float32"),
        (torch.full((2, 9), 37), ValueError, r"targets must be ids in 0..36; got 37"),
        (torch.full((2, 9), -1), ValueError, r"targets must be ids in 0..36; got -1"),
    ],
)
def test_wrong_targets(targets, error, message):
    with pytest.raises(error, match=message):
        cases.model("gecko").loss(tokens(2, 9), targets)


@pytest.mark.parametrize("ids", [torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 9)])
def test_wrong_segment_ids(ids):
    with pytest.raises(ValueError, match=r"segment_ids must be integers of the tokens' shape \(2, 9\); got"):
        cases.model("gecko")(tokens(2, 9), ids)


@torch.no_grad()
def test_wrong_states():
    model = cases.model("gecko")
    _, state = model(tokens(2, 9))
    with pytest.raises(ValueError, match="the tokens' 3 rows; it holds 2"):
        model(tokens(3, 9), None, state)
    with pytest.raises(ValueError, match="the state must come from a model of this config"):
        cases.model("chunk")(tokens(2, 9), None, state)
    other = cases.model("gecko")
    other.embedding.weight.mul_(1.1)
    with pytest.raises(ValueError, match="the state was made by other weights of the same config"):
        other(tokens(2, 9), None, state)
    with pytest.raises(ValueError, match="states of different ones"):
        gecko.GeckoState.stack([state, other(tokens(2, 9))[1]])


# ---- Reading states are immutable, have constant size, and a text continues from any of them.


@variants
@pytest.mark.parametrize("position", [2**31 + 5, 2**40 + 5])
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
@torch.no_grad()
def test_states_are_values(variant):
    """A call changes neither the given state nor states that it returned before."""
    model = cases.model(variant)
    _, state = model(tokens(2, 23))
    before = state.map(torch.clone)
    for length in (1, 30):
        first, after = model(tokens(2, length), None, state)
        kept = after.map(torch.clone)
        second, again = model(tokens(2, length), None, state)
        model(tokens(2, length), None, after)
        assert torch.equal(first, second)
        for got, wanted in ((state, before), (after, kept), (again, kept)):
            for name, tensor in got.tensors().items():
                assert torch.equal(tensor, wanted.tensors()[name]), name


@variants
@pytest.mark.parametrize("length", [0, 9])
def test_steps_go_on_from_any_state_and_leave_it(variant, length):
    """Also from a state that shares tensors, from the initial state, and from one made in inference mode."""
    model, text = cases.model(variant), tokens(2, 45)
    with torch.inference_mode():
        state = model(text[:, :length])[1] if length else model.empty_state(2)
        expected, after = model(text[:, length:], state=state)
    before, own = state.map(torch.clone), state
    for place in range(length, 45):
        logits, own = model.step(text[:, place], own)
        assert_same(logits, expected[:, place - length])
    assert_same_state(own, after)
    assert_same_state(state, before)


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
    """Also to 16-bit weights."""
    model, text = cases.model(variant), tokens(2, 30)
    assert_same(model(text, None, model.empty_state(2))[0], model(text)[0])
    rounded = model.bfloat16()
    for part in (text[:, :1], text):
        found, expected = rounded(part, None, rounded.empty_state(2))[0], rounded(part)[0]
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
