"""Short prompts of models in bfloat16, which the decoder in C reads: as the model in float64, however they are cut."""

import copy

import pytest
import torch
from support import cases
from support.model_calls import assert_same_states
from support.native_agreement import needs_compiler
from torch import Tensor

import gecko
from gecko.inference import Sampling, decoder, read
from gecko.inference.decoder import Decoder
from gecko.inference.request import KeptStates, Request
from gecko.inference.scheduler import Engine

pytestmark = needs_compiler

LENGTHS = (2, cases.CHUNK, 2 * cases.CHUNK + 3)


def narrow(variant: str = "gecko") -> gecko.Gecko:
    return cases.model(variant, torch.float32).bfloat16()


def prompt(length: int, seed: int = 0) -> Tensor:
    return cases.tokens(1, length, seed)[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("variant", cases.IN_C)
def test_a_short_prompt_is_read_as_in_float64(variant: str, length: int, calls: list[tuple[int, int]]) -> None:
    """Only the window is rounded, which the first layer's other states do not depend on, and the logits."""
    model = narrow(variant)
    found = read(model, [prompt(length)])
    assert calls == []
    exact = read(copy.deepcopy(model).double(), [prompt(length)])
    assert found.logits.dtype == torch.bfloat16 and found.state.model == model.fingerprint()
    torch.testing.assert_close(found.logits.double(), exact.logits, rtol=2e-2, atol=2e-2)
    for name, tensor in exact.state.tensors().items():
        tolerance = 1e-4 if name.startswith("mixers.0.") and ".attention." not in name else 5e-2
        torch.testing.assert_close(
            found.state.tensors()[name].double(), tensor.double(), rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_read_as_the_decoder_reads_its_own_tokens(length: int, calls: list[tuple[int, int]]) -> None:
    """And so does the engine."""
    model, kept = narrow(), KeptStates()
    one, engine = Decoder(model, 1), Engine(model, rows=2)
    with torch.inference_mode():
        one.add(model.empty_state(), torch.zeros(cases.SMALL.vocab_size, dtype=torch.bool))
        for token in prompt(length).tolist():
            logits = one.step([token])[0]
    found = read(model, [prompt(length)])
    torch.testing.assert_close(found.logits.float(), logits, rtol=1e-2, atol=1e-2)
    engine.submit(Request(prompt(length), 0, Sampling(0.0), keep=kept))
    while not engine.idle:
        engine.step()
    assert kept.prompt is not None and calls == []
    for state in (found.state, kept.prompt):
        assert_same_states(state, one.state(0), 0)


@pytest.mark.parametrize("cut", [2, cases.CHUNK, 20])
def test_a_prompt_may_be_cut_anywhere(cut: int) -> None:
    model, whole = narrow(), prompt(2 * cases.CHUNK + 9)
    second = read(model, [whole[cut:]], read(model, [whole[:cut]]).state)
    for found in (second, read(model, [whole[:cut], whole[cut:]])):
        expected = read(model, [whole])
        assert torch.equal(found.logits, expected.logits)
        assert_same_states(found.state, expected.state, 0)


def test_a_prompt_may_follow_a_later_document() -> None:
    """The state stands inside a chunk, in a document that began in it."""
    model, tokens = narrow(), prompt(3 * cases.CHUNK)
    documents = (torch.arange(len(tokens)) >= cases.CHUNK + 3).long()
    found = []
    for one in (model, copy.deepcopy(model).double()):
        with torch.inference_mode():
            state = one.hidden(tokens.unsqueeze(0), documents.unsqueeze(0))[1]
        found.append(read(one, [prompt(9, 1)], state))
    torch.testing.assert_close(found[0].logits.double(), found[1].logits, rtol=5e-2, atol=5e-2)
    assert found[0].state.position == found[1].state.position == [3 * cases.CHUNK + 9]


def test_other_prompts_are_calls_of_the_model(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = narrow()
    read(model, [prompt(1)])
    read(cases.model("gecko", torch.float32), [prompt(5)])
    monkeypatch.setattr(decoder, "MOST_PRODUCTS", 8 * sum(weight.numel() for weight in model.parameters()))
    read(model, [prompt(8)])
    read(model, [prompt(9)])
    model.blocks[0].register_forward_hook(lambda *_: None)
    read(model, [prompt(3)])
    assert calls == [(1, length) for length in (1, 5, 9, 3)]


def test_a_state_of_other_weights_is_refused() -> None:
    model = narrow()
    state = read(model, [prompt(5)]).state
    with torch.no_grad():
        model.final_norm.weight.add_(1)
    with pytest.raises(ValueError, match="made by other weights"):
        read(model, [prompt(5)], state)
