"""States belong to the weights that made them; the weights in a folder are copied into a model once."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import cases
from support.cases import tokens

import gecko
from gecko.inference import read
from gecko.inference.decoder import Decoder
from gecko.inference.prefill import score
from gecko.io.model_folder import WEIGHTS
from gecko.io.quantization import plain_tensors, quantize
from gecko.models import Llama, LlamaConfig, load_any
from gecko.models.gecko import sharing_parameters

pytestmark = pytest.mark.usefixtures("poisoned")


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: weight.clone() for name, weight in gecko.Gecko(cases.SMALL).state_dict().items()}


CHANGES = {
    "written to": lambda model: model.embedding.weight.mul_(1.5),
    "replaced": lambda model: model.load_state_dict(weights(1), assign=True),
    "converted": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("change", [*CHANGES, "another model"])
@torch.no_grad()
def test_a_model_that_changed_goes_on_from_none_of_its_states(change):
    """Nor does another model of the same config."""
    model, config = gecko.Gecko(cases.SMALL), dataclasses.replace(cases.SMALL)
    model.load_state_dict(weights(0), assign=True)
    state = model(tokens(2, 9))[1]
    stepped = model.step(tokens(2, 1)[:, 0], state)[1]
    if change == "another model":
        model = gecko.Gecko(config)
        model.fingerprint()
    else:
        CHANGES[change](model)
    for old in (stepped, state, stepped.map(torch.clone)):  # the first would pass without a comparison of weights
        with pytest.raises(ValueError, match="made by other weights"):
            model.step(tokens(2, 1)[:, 0], old)
        with pytest.raises(ValueError, match="made by other weights"):
            model(tokens(2, 9), state=old)


def write_in_inference_mode(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(1.5)


def replace_and_return(weight: torch.Tensor) -> None:
    """The memory is the same as before."""
    before = weight.data
    weight.data = before.clone()
    before.mul_(1.5)
    weight.data = before


SILENT_WRITES = {
    "data": lambda weight: weight.data.mul_(1.5),
    "data of another tensor": lambda weight: setattr(weight, "data", weight.data * 1.5),
    "the same memory": replace_and_return,
    "inference mode": write_in_inference_mode,
    "numpy": lambda weight: weight.detach().numpy().__imul__(1.5),
    "one number": lambda weight: weight.data.view(-1)[-1:].add_(0.5),
    "swapped": lambda weight: torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() * 1.5)),
    "many at once": lambda weight: torch._foreach_mul_([weight.data], 1.5),
}
"""Writes that do not change the version of a tensor, as PEFT's ``merge_and_unload`` does them."""


@pytest.mark.parametrize("write", SILENT_WRITES)
@pytest.mark.parametrize(
    ("name", "dtype"),  # decode in C, and in PyTorch
    [("embedding.weight", torch.float32), ("blocks.1.mixer.cema.alpha", torch.float32),
     ("blocks.0.mixer.to_value.weight", torch.float64)],
)  # fmt: skip
def test_writes_that_leave_no_trace_change_the_name_and_what_is_decoded(write, name, dtype, tmp_path):
    model = cases.model("gecko", dtype)
    text = tokens(1, 20)[0]
    decoder = Decoder(model, 1)

    def decoded(model: gecko.Gecko, decoder: Decoder) -> tuple[torch.Tensor, gecko.GeckoState]:
        decoder.resize(0)
        found = read(model, [text])
        with torch.inference_mode():
            decoder.add(found.state, found.seen)
            logits = torch.cat([decoder.step([token]).clone() for token in (3, 1, 4)])
        return logits, decoder.state(0)

    _, state = decoded(model, decoder)
    SILENT_WRITES[write](model.get_parameter(name))
    with torch.no_grad(), pytest.raises(ValueError, match="made by other weights"):
        model(tokens(1, 9), state=state)
    model.save(tmp_path)
    saved = gecko.load(tmp_path)
    assert model.fingerprint() == saved.fingerprint() != state.model
    (found, after), (expected, _) = decoded(model, decoder), decoded(saved, Decoder(saved, 1))
    assert torch.equal(found, expected)
    with torch.no_grad():
        saved(tokens(1, 9), state=after)


@pytest.mark.parametrize("bits", [8, 4])
def test_writes_to_quantised_numbers_are_decoded(bits):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1, chunk_size=16)).eval()
    quantize(model, bits)
    before = gecko.generate(model, [1, 2, 3], max_new_tokens=20, temperature=0)
    integers, scale = plain_tensors(model.blocks[0].feed_forward.fc1.weight)
    integers.data.neg_().clamp_(min=-7)
    scale.data.mul_(2)
    expected = gecko.generate(copy.deepcopy(model), [1, 2, 3], max_new_tokens=20, temperature=0)
    found = gecko.generate(model, [1, 2, 3], max_new_tokens=20, temperature=0)
    assert all(map(torch.equal, found.state.tensors().values(), expected.state.tensors().values()))
    assert found.tokens == expected.tokens and found.state.model != before.state.model


@torch.no_grad()
def test_every_number_has_its_part_in_the_name_of_weights():
    model = gecko.Gecko(cases.SMALL)
    model.load_state_dict(weights(0), assign=True)
    seen = {model.fingerprint()}
    for parameter in model.parameters():
        numbers = parameter.view(-1)
        for at in {0, len(numbers) // 3, len(numbers) - 1}:
            before = numbers[at].item()
            numbers[at] = before + 1
            assert model.fingerprint() not in seen
            numbers[at] = before
            assert model.fingerprint() in seen


@torch.no_grad()
def test_weights_are_named_alike_on_any_threads_and_in_any_float_dtype():
    model = gecko.Gecko(cases.SMALL).bfloat16()
    name = model.fingerprint()
    assert model.float().fingerprint() == name
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert copy.deepcopy(model).fingerprint() == name
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_weights_lent_for_a_call_name_its_state():
    model = gecko.Gecko(cases.SMALL)
    lent = [weights(0), weights(1)]
    first, second = (torch.func.functional_call(model, each, (tokens(1, 5),))[1] for each in lent)
    assert first.model != second.model
    with pytest.raises(ValueError, match="made by other weights"):
        torch.func.functional_call(model, lent[1], (tokens(1, 5), None, first))


def test_a_model_made_in_inference_mode_reads_and_steps():
    with torch.inference_mode():
        model = cases.model("gecko")
        state = model(tokens(2, 9))[1]
        for token in tokens(2, 3).unbind(1):
            _, state = model.step(token, state)
    with torch.no_grad():
        assert model.step(tokens(2, 1)[:, 0], state)[0].isfinite().all()
    with torch.inference_mode(), pytest.raises(ValueError, match="made by other weights"):
        model.embedding.weight = torch.nn.Parameter(model.embedding.weight * 2)
        model(tokens(2, 9), state=state)


LLAMA = LlamaConfig(vocab_size=37, num_layers=2, model_dim=32, num_heads=2, ffn_dim=40)
MODELS = {
    "gecko": lambda: gecko.Gecko(cases.SMALL),
    "gecko, tied": lambda: gecko.Gecko(dataclasses.replace(cases.SMALL, tie_embedding=True)),
    "llama": lambda: Llama(LLAMA),
    "llama, tied": lambda: Llama(dataclasses.replace(LLAMA, tie_embedding=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_its_own_and_draws_no_random_numbers(name, dtype, tmp_path: Path):
    """Later writes to the file do not change the model."""
    model = MODELS[name]().to(dtype)
    model.save(tmp_path)
    drawn = torch.get_rng_state()
    loaded = load_any(tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn)
    size = (tmp_path / WEIGHTS).stat().st_size
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * size)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(got, weight) for got, weight in zip(loaded.parameters(), model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(module.training for module in loaded.modules()), "evaluation mode, as after from_pretrained"


def decoded(model: gecko.Gecko, text: torch.Tensor) -> torch.Tensor:
    """Return the logits after the last token, which a decoder reads."""
    decoder = Decoder(model, 1)
    decoder.add(model(text[:, :-1])[1], torch.zeros(model.config.vocab_size, dtype=torch.bool))
    return decoder.step([int(text[0, -1])])[0]


@torch.no_grad()
def test_a_head_of_its_own_is_read_and_named_and_never_dropped_though_the_config_ties_it(tmp_path):
    """As after PEFT has trained a copy of it."""
    model, text = cases.model("gecko", torch.float32, tie_embedding=True), tokens(1, 20)
    model.head = torch.nn.Linear(model.config.model_dim, model.config.vocab_size, bias=False)
    logits, name = model(text)[0][0, -1], model.fingerprint()
    torch.testing.assert_close(decoded(model, text), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sharing_parameters(model)(text)[0][0, -1], logits)
    with pytest.raises(ValueError, match=r"head and embedding must be equal if tie_embedding"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    model.head.weight[3] += 1
    assert model.fingerprint() != name
    model.head.weight.copy_(model.embedding.weight)
    model.save(tmp_path / "model")
    assert gecko.load(tmp_path / "model").fingerprint() == model.fingerprint()


@pytest.mark.parametrize("layer", ["head", "blocks.0.feed_forward.fc1", "blocks.1.feed_forward.fc2"])
@torch.no_grad()
def test_what_is_added_to_a_layer_is_in_logits_losses_and_what_is_decoded(layer):
    """A bias where the model has none computes what a hook does that adds it."""
    models, text = [], tokens(1, 20)
    for hooked in (False, True):
        model = cases.model("gecko", torch.float32)
        module = model.get_submodule(layer)
        added = torch.linspace(-1, 1, len(module.weight))
        if hooked:
            module.register_forward_hook(lambda module, inputs, output, added=added: output + added)
        else:
            module.bias = torch.nn.Parameter(added)
        models.append(model)
    biased, expected = models
    logits = expected(text)[0][0]
    torch.testing.assert_close(decoded(biased, text), logits[-1], rtol=1e-4, atol=1e-4)
    for model in models:
        torch.testing.assert_close(model(text)[0][0], logits)
        torch.testing.assert_close(model.loss(text[:, :-1], text[:, 1:]), F.cross_entropy(logits[:-1], text[0, 1:]))
        each = F.cross_entropy(logits[:-1], text[0, 1:], reduction="none")
        torch.testing.assert_close(model.token_losses(text[:, :-1], text[:, 1:])[0][0], each)
        torch.testing.assert_close(torch.cat([part.losses for part in score(model, [text[0]])]), each)
