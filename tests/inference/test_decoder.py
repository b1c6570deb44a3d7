"""The decoder's logits and states are those of a model call over the whole text, for any weights, sizes and slots."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases
from support.model_calls import assert_same_states
from torch import Tensor

import gecko
from gecko.inference import Prefill, read
from gecko.inference.decoder import FIRST_SLOTS, Decoder
from gecko.inference.packed_weights import PackedWeights, matrix
from gecko.layers import CEMA
from gecko.ops.decoding import REGISTER, Weights
from gecko.segments import Segments
from gecko.state import GeckoState

LENGTHS = (1, 5, 2 * cases.CHUNK, 3 * cases.CHUNK - 1)
STEPS = 4 * cases.CHUNK + 3
"""More than the attention window: every chunk completes several times, at different steps of different rows."""


def decode_from(model: gecko.Gecko, prefills: Sequence[Prefill], window: torch.dtype | None = None) -> Decoder:
    """Return a decoder with the states of ``prefills`` and an empty slot."""
    decoder = Decoder(model, len(prefills) + 1, window)
    with torch.inference_mode():
        for prefill in prefills:
            decoder.add(prefill.state, prefill.seen)
    return decoder


def prefill_of(model: gecko.Gecko, length: int, seed: int = 0) -> Prefill:
    return read(model, [cases.tokens(1, length, seed)[0]])


def start(model: gecko.Gecko, texts: Sequence[Tensor]) -> Decoder:
    """Return a decoder that has read ``texts``."""
    return decode_from(model, [read(model, [text]) for text in texts])


def run(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the logits of every step (rows, steps, V) over ``tokens`` (rows, steps)."""
    with torch.inference_mode():
        return torch.stack([decoder.step(column.tolist()).clone() for column in tokens.unbind(1)], 1)


def assert_decoded_as_read(model: gecko.Gecko, backend: str | None, tolerance: float) -> None:
    """Compare steps of ``backend`` with a call of the model itself over the whole text."""
    vocabulary, generator = model.config.vocab_size, torch.Generator().manual_seed(2)
    text = torch.randint(vocabulary, (1, 2 * model.config.chunk_size + 4 + STEPS), generator=generator)
    decoder = start(model, [text[0, :-STEPS]])
    assert decoder.backend == backend
    with torch.inference_mode():
        expected, _ = model(text)
    torch.testing.assert_close(run(decoder, text[:, -STEPS:]), expected[:, -STEPS:], rtol=tolerance, atol=tolerance)


UNEVEN = {"model_dim": 20, "key_dim": 12, "value_dim": 10, "ffn_dim": 19, "cema_modes": 3, "chunk_size": 7}
"""Sizes that do not fill registers."""


@pytest.mark.parametrize(
    ("variant", "changes"),
    [*((name, {}) for name in cases.IN_C), ("gecko", UNEVEN), ("gecko", {**UNEVEN, "memory": "linear"})],
    ids=[*cases.IN_C, "uneven", "uneven-linear"],
)
def test_steps_in_c_are_calls_in_float64(variant: str, changes: dict[str, Any]) -> None:
    model = cases.model(variant, torch.float32, **changes)
    exact = copy.deepcopy(model).double()
    tokens = [cases.tokens(1, length + STEPS, seed)[0] for seed, length in enumerate(LENGTHS)]
    decoder = start(model, [text[:length] for text, length in zip(tokens, LENGTHS, strict=True)])
    assert decoder.backend == "cpu"
    logits = run(decoder, torch.stack([text[length:] for text, length in zip(tokens, LENGTHS, strict=True)]))
    for slot, (text, length) in enumerate(zip(tokens, LENGTHS, strict=True)):
        with torch.no_grad():
            expected, state = exact(text.unsqueeze(0))
        torch.testing.assert_close(logits[slot].double(), expected[0, length:], rtol=1e-3, atol=1e-3)
        assert_same_states(decoder.state(slot), state, 1e-3)
        assert decoder.state(slot).position == [len(text)]


@pytest.mark.parametrize("length", [cases.CHUNK + 4, 2 * cases.CHUNK + 3])
@pytest.mark.parametrize("variant", ["gecko", "linear-memory"])
def test_a_document_in_the_prompt_is_kept_apart(variant: str, length: int) -> None:
    """It begins in the chunk of the last token, or in the one before."""
    model = cases.model(variant, torch.float32)
    tokens = cases.tokens(1, 6 * cases.CHUNK, 1)
    ids = torch.arange(length).unsqueeze(0) // (cases.CHUNK + 2)
    with torch.inference_mode():
        _, state = model(tokens[:, :length], segment_ids=ids)
        decoder = Decoder(model, 1)
        decoder.add(state, torch.zeros(cases.SMALL.vocab_size, dtype=torch.bool))
        ids = torch.cat([ids, ids[:, -1:].expand(1, tokens.shape[1] - length)], 1)
        for end in range(length + 1, tokens.shape[1] + 1):
            found = run(decoder, tokens[:, end - 1 : end])
            expected, after = model(tokens[:, :end], segment_ids=ids[:, :end])
            torch.testing.assert_close(found[:, -1], expected[:, -1], rtol=1e-3, atol=1e-3)
            assert_same_states(decoder.state(0), after, 1e-3)


@pytest.mark.parametrize("name", [*cases.IN_C, "bfloat16", "8 bit", "4 bit"])
def test_logits_depend_on_no_other_row_and_no_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the same bits as alone."""
    monkeypatch.setattr("gecko.ops.decoding.cpu.WEIGHTS_PER_THREAD", 1)
    model = cases.model(name, torch.float32) if name in cases.IN_C else in_format(name)
    prefills = [prefill_of(model, length, length) for length in (1, 5, 16, 31, 40)]
    tokens = cases.tokens(len(prefills), STEPS, 9)
    assert decode_from(model, prefills).backend == "cpu"
    expected = run(decode_from(model, prefills), tokens)
    for slot, prefill in enumerate(prefills):
        found = run(decode_from(model, [prefill]), tokens[slot : slot + 1])
        assert torch.equal(found, expected[slot : slot + 1])
    before = torch.get_num_threads()
    try:
        for threads in (2, 13):
            torch.set_num_threads(threads)
            assert torch.equal(run(decode_from(model, prefills), tokens), expected), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", cases.IN_C)
def test_states_in_pages_in_any_order(variant: str) -> None:
    """The input of the head, from states in pages, gives the logits of a decoder with states side by side."""
    model = cases.model(variant, torch.float32)
    prefills = [prefill_of(model, length, seed) for seed, length in enumerate(LENGTHS)]
    tokens = cases.tokens(len(prefills), STEPS, 9)
    decoder, order = decode_from(model, prefills), [2, 0, 3]
    pages = cases.in_pages(GeckoState.stack([prefill.state for prefill in prefills]))
    network = PackedWeights(model, "cpu").with_states(pages, rows=len(order))
    with torch.inference_mode():
        for step, column in enumerate(tokens.unbind(1)):
            expected = decoder.step(column.tolist())[order]
            positions = torch.tensor([LENGTHS[slot] + step for slot in order])
            hidden = network.hidden(column[order], torch.tensor(order), positions)
            torch.testing.assert_close(model.head(hidden), expected, rtol=1e-5, atol=1e-5)
    for slot in order:
        found = pages.map(lambda x, slot=slot: x[slot : slot + 1])
        assert_same_states(replace(found, clock=decoder.state(slot).clock), decoder.state(slot), 0)
    assert torch.equal(pages.mixers[0].attention.keys[1], prefills[1].state.mixers[0].attention.keys[0])


FORGED: dict[str, Callable[[Tensor], Tensor]] = {
    "another rank": lambda x: x.unsqueeze(0),
    "a longer axis": lambda x: torch.cat([x, x[..., :1]], -1),
    "a shorter axis": lambda x: x[..., :-1].contiguous(),
    "one number": lambda x: torch.ones([1] * x.dim(), dtype=x.dtype),
    "no numbers": lambda x: x[:0],
    "wider numbers": lambda x: x.double(),
    "narrower numbers": lambda x: x.to(torch.int8),
    "no memory": lambda x: x.to("meta"),
    "repeated memory": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("change", FORGED)
@pytest.mark.parametrize("variant", ["gecko", "linear-memory"])
def test_a_tensor_of_a_state_that_c_would_misread_is_refused(variant: str, change: str) -> None:
    model = cases.model(variant, torch.float32)
    state = GeckoState.stack([prefill_of(model, 20, seed).state for seed in range(2)])
    for forged in state.tensors():
        if forged != "clock.segment_id":
            names = iter(state.tensors())
            other = state.map(lambda x, names=names, forged=forged: FORGED[change](x) if next(names) == forged else x)
            with torch.inference_mode(), pytest.raises(ValueError, match="C kernels need"):
                PackedWeights(model, "cpu").with_states(other, rows=2)


@pytest.mark.parametrize("clock", [(-1, -1), (-(2**63), 0), (4, 5), (2**63 - 1, 0), (3, -1)])
def test_a_clock_that_leads_out_of_the_window_is_refused(clock: tuple[int, int]) -> None:
    model = cases.model("gecko", torch.float32)
    good = prefill_of(model, 20)
    position, start = (torch.tensor([x]) for x in clock)
    wrong = replace(good.state, clock=replace(good.state.clock, position=position, document_start=start))
    decoder = decode_from(model, [good, replace(good, state=wrong)])
    with torch.inference_mode(), pytest.raises(ValueError, match="not before the start"):
        decoder.step([1, 2])


def test_a_later_state_of_other_sizes_is_not_spread_over_a_slot() -> None:
    model = cases.model("gecko", torch.float32)
    prefill = prefill_of(model, 20)
    decoder = decode_from(model, [prefill])
    one = prefill.state.map(lambda x: torch.ones([1] * x.dim(), dtype=x.dtype))
    with torch.inference_mode(), pytest.raises(ValueError, match="of a state must have shape"):
        decoder.add(one, prefill.seen)


@pytest.mark.parametrize("name", ["head", "to_value", "fc2"])
def test_weights_that_c_would_misread_are_refused(name: str) -> None:
    """Whatever packs them: integers without scales, and floats with scales, have no meaning in C."""
    model = cases.model("gecko", torch.float32)
    state = prefill_of(model, 20).state.map(torch.clone)
    packed = PackedWeights(model, "cpu")
    record = packed._ends if name == "head" else packed._layers[0]
    good = record[name]
    outputs = len(good.weight)
    for wrong in (
        good._replace(weight=good.weight.double()), good._replace(weight=good.weight[:-1]),
        good._replace(weight=good.weight.to(torch.int8)), good._replace(scale=torch.ones(outputs)),
        Weights(good.weight.to(torch.int8), torch.ones(1)), good._replace(bias=torch.ones(outputs - 1)),
    ):  # fmt: skip
        record[name] = wrong
        with pytest.raises(ValueError, match=rf"{name}.*(must be|C kernels need)"):
            packed.with_states(state)


def test_weights_of_whole_registers_are_held_once() -> None:
    whole, odd = torch.randn(3, 2 * REGISTER), torch.randn(3, 5)
    assert matrix(whole).weight.data_ptr() == whole.data_ptr()
    assert torch.equal(matrix(odd).weight, F.pad(odd, (0, REGISTER - 5)))


def test_stored_values_are_rounded_as_torch_rounds() -> None:
    """The first layer's values do not depend on those stored before, so one rounding is all that differs."""
    model = cases.model("gecko", torch.float32)
    stored = {}
    for dtype in (torch.bfloat16, torch.float32):
        state = gecko.GeckoState.empty(model.config, 2, value_dtype=dtype).map(torch.clone)  # layers share them
        network = PackedWeights(model, "cpu").with_states(state)
        for column in cases.tokens(2, STEPS, 2).unbind(1):
            network.step(column.tolist())
            state.clock.position.add_(1)
        stored[dtype] = state.mixers[0].attention.values
    assert stored[torch.bfloat16].dtype == torch.bfloat16
    assert torch.equal(stored[torch.bfloat16], stored[torch.float32].bfloat16())


def test_weights_in_bfloat16_are_read_as_they_are() -> None:
    """Activations stay float32, so the logits are those of the same weights in float32 to float32's rounding. The
    window of the model's own states stays bfloat16."""
    model = cases.model("gecko", torch.float32).bfloat16()
    wide = copy.deepcopy(model).float()
    prefill, tokens = prefill_of(wide, 3 * cases.CHUNK), cases.tokens(1, STEPS, 2)
    ways = (model, [prefill], torch.float32), (wide, [prefill]), (model, [prefill_of(model, 20)])
    decoders = [decode_from(*way) for way in ways]
    assert {decoder.backend for decoder in decoders} == {"cpu"}
    found, expected, own = (run(decoder, tokens) for decoder in decoders)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert own.dtype == torch.float32 and decoders[2].state(0).mixers[0].attention.values.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", cases.IN_C)
def test_a_window_in_bfloat16_is_a_state_whose_window_is_rounded_at_every_step(variant: str) -> None:
    """The first layer's keys and values do not depend on the window, so there one rounding is all that differs. Such a
    state goes in and out unchanged."""
    model, tokens = cases.model(variant, torch.float32), cases.tokens(1, STEPS, 2)
    prefill = prefill_of(model, 2 * cases.CHUNK + 3)
    narrow, first, wide = (decode_from(model, [prefill], x) for x in (torch.bfloat16, torch.bfloat16, None))
    assert narrow.backend == "cpu"
    tolerance = 0.3 if variant.startswith("llama") else 0.05  # whose scores have no bound
    logits = run(narrow, tokens)
    torch.testing.assert_close(logits, run(wide, tokens), rtol=tolerance, atol=tolerance)
    found, expected = narrow.state(0), wide.state(0)
    for name, tensor in expected.mixers[0].attention.tensors().items():
        assert torch.equal(found.mixers[0].attention.tensors()[name], tensor.bfloat16().float()), name
    assert {x.dtype for x in found.tensors().values()} == {x.dtype for x in expected.tensors().values()}
    before = run(first, tokens[:, :9])
    second = decode_from(model, [replace(prefill, state=first.state(0))], torch.bfloat16)
    assert torch.equal(torch.cat([before, run(second, tokens[:, 9:])], 1), logits)


def test_a_window_in_bfloat16_needs_the_decoder_in_c() -> None:
    with pytest.raises(ValueError, match="decodes in C"):
        Decoder(cases.model("gecko", torch.float64), 1, torch.bfloat16)


@pytest.mark.parametrize("window", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["gecko", "separate", "shared-rms"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
def test_slots_have_the_dtypes_of_the_models_own_states(
    weights: torch.dtype, variant: str, window: torch.dtype
) -> None:
    """Whatever the first state that enters has. With RMS norms, the keys tell how it was computed."""
    model = cases.model(variant, torch.float32).to(weights)
    prefill = prefill_of(model, 20)
    forged = prefill.state.with_window(window, window)
    if model.config.norm == "rms" and forged.dtype != prefill.state.dtype:
        with pytest.raises(ValueError, match="as this model computes it"):
            read(model, [torch.tensor([1])], forged)
        forged = prefill.state.with_window(prefill.state.mixers[0].attention.keys.dtype, window)
    other = replace(prefill, state=forged)
    decoder, own = decode_from(model, [other]), decode_from(model, [prefill])
    expected = [tensor.dtype for tensor in model.empty_state().tensors().values()]
    for one in (decoder, own):
        assert one._all is not None
        assert [tensor.dtype for tensor in one._all.tensors().values()] == expected
        assert [tensor.dtype for tensor in one.state(0).tensors().values()] == expected
    assert decoder.backend == own.backend


def in_format(name: str, ffn_dim: int = 160, value_dim: int = 192) -> gecko.Gecko:
    """Return a small model in float32, bfloat16, or quantised to 8 or 4 bits; its layers are of many tiles' sizes."""
    config = gecko.GeckoConfig.preset("tiny", num_layers=2, chunk_size=16, ffn_dim=ffn_dim, value_dim=value_dim)
    torch.manual_seed(0)
    model = gecko.Gecko(config).eval()
    if name == "bfloat16":
        return model.bfloat16()
    if name != "float32":
        pytest.importorskip("torchao")
        from gecko.io.quantization import quantize

        quantize(model, int(name[0]))
    return model


@pytest.mark.parametrize("name", ["8 bit", "4 bit"])
def test_quantised_weights_are_those_of_torchao(name: str) -> None:
    assert_decoded_as_read(in_format(name, 256, 256), "cpu", 1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-38, 1e18])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "8 bit", "4 bit"])
def test_logits_are_not_finite_where_an_input_is_not(name: str, value: float) -> None:
    """Also where activations are zero, smaller than any number that has a reciprocal, or large."""
    model = in_format(name)
    with torch.no_grad():
        model.embedding.weight[7] = value
    decoder = start(model, [torch.tensor([1, 2, 3])])
    with torch.inference_mode():
        assert bool(decoder.step([7]).isfinite().all()) == math.isfinite(value)


class Doubled(CEMA):
    def forward(self, x: Tensor, state: Tensor | None, segments: Segments) -> tuple[Tensor, Tensor]:
        y, state = super().forward(x, state, segments)
        return 2 * y, state


@pytest.mark.parametrize("kind", ["float64", "hook", "subclass", "no library", "orthogonal"])
def test_other_models_decode_in_pytorch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: Any = {"memory": "orthogonal"} if kind == "orthogonal" else {}
    model = cases.model("gecko", torch.float64 if kind == "float64" else torch.float32, **changes)
    if kind == "hook":
        model.blocks[0].mixer.to_gate.register_forward_hook(lambda module, inputs, output: 2 * output)
    if kind == "subclass":
        model.blocks[0].mixer.cema.__class__ = Doubled
    if kind == "no library":
        monkeypatch.setattr("gecko.inference.packed_weights.library", lambda _: None)
    assert_decoded_as_read(model, None, 1e-4)


@settings(max_examples=12)
@given(moves=st.lists(st.integers(-3, 60).filter(bool), max_size=14))
def test_rows_stay_what_they_are_while_others_come_and_go(moves: list[int]) -> None:
    """A positive move adds a text of that length, a negative one removes a slot; all take a step after each. The slots
    that are there at first are soon all in use."""
    model = cases.model("gecko", torch.float32)
    decoder, texts = Decoder(model, FIRST_SLOTS + 2), []
    with torch.inference_mode():
        for count, move in enumerate([*range(1, FIRST_SLOTS + 2), *moves]):
            if move > 0 and decoder.count < decoder.capacity:
                texts.append(cases.tokens(1, move, count)[0])
                prefill = read(model, [texts[-1]])
                decoder.add(prefill.state, prefill.seen)
            elif move < 0 and texts:
                slot = -move % len(texts)
                decoder.remove(slot)
                texts[slot] = texts[-1]
                texts.pop()
            if texts:
                tokens = cases.tokens(1, len(texts), count)[0]
                logits = decoder.step(tokens.tolist())
                texts = [torch.cat([known, token[None]]) for known, token in zip(texts, tokens, strict=True)]
        for slot, known in enumerate(texts):
            expected = read(model, [known])
            assert_same_states(decoder.state(slot), expected.state, 1e-3)
            torch.testing.assert_close(logits[slot], expected.logits, rtol=1e-3, atol=1e-3)
    assert decoder.count == len(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_changes_the_slots_in_place(dtype: torch.dtype) -> None:
    decoder = start(cases.model("gecko").to(dtype), [cases.tokens(1, length)[0] for length in (7, 15, 40)])
    assert decoder._all is not None
    places = {name: tensor.data_ptr() for name, tensor in decoder._all.tensors().items()}
    run(decoder, cases.tokens(3, 20))
    assert {name: tensor.data_ptr() for name, tensor in decoder._all.tensors().items()} == places


def test_states_go_in_and_out_by_value() -> None:
    model = cases.model("gecko", torch.float32)
    prefill = prefill_of(model, 20)
    decoder = decode_from(model, [prefill] * 2)
    states = prefill.state, decoder.state(1)
    before = [state.map(torch.clone) for state in states]
    run(decoder, cases.tokens(2, 20))
    for state, expected in zip(states, before, strict=True):
        assert_same_states(state, expected, 0)


@pytest.mark.parametrize("token", [-1, cases.SMALL.vocab_size])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    decoder = start(cases.model("gecko", torch.float32), [cases.tokens(1, 5)[0]])
    before = decoder.state(0)
    with pytest.raises(ValueError, match="in 0"):
        decoder.step([token])
    assert_same_states(decoder.state(0), before, 0)


@pytest.mark.parametrize("others", [0, 1])
def test_states_of_other_weights_are_refused(others: int) -> None:
    """The first sequence of a decoder, and one that joins another."""
    model, other = cases.model("gecko", torch.float32), cases.model("gecko", torch.float32)
    with torch.no_grad():
        other.blocks[0].mixer.to_gate.weight.add_(1)
    decoder, prefill = decode_from(model, [prefill_of(model, 5)] * others), prefill_of(other, 5)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"weights|different"):
        decoder.add(prefill.state, prefill.seen)
    assert decoder.count == others


def test_weights_that_change_between_tokens_are_refused() -> None:
    model = cases.model("gecko", torch.float32)
    steps = iter(gecko.inference.stream(model, cases.tokens(1, 5)[0], max_new_tokens=9, temperature=0))
    next(steps), next(steps)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(ValueError, match="other weights"):
        next(steps)


@pytest.mark.parametrize("part", ["embedding", "blocks", "head"])
def test_weights_may_change_before_the_next_sequence(part: str) -> None:
    model = cases.model("gecko", torch.float32)
    prompt, tokens = cases.tokens(1, 9)[0], cases.tokens(1, 20, 3)
    decoder = start(model, [prompt])
    run(decoder, tokens)
    with torch.inference_mode():
        decoder.remove(0)
    with torch.no_grad():
        for parameter in model.get_submodule(part).parameters():
            parameter.mul_(1.1)
    with torch.inference_mode():
        prefill = read(model, [prompt])
        decoder.add(prefill.state, prefill.seen)
    assert torch.equal(run(decoder, tokens), run(start(model, [prompt]), tokens))
