"""Initialisation of a model, its loss, and the gradients of all its parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import cases
from support.cases import tokens
from support.model_calls import documents, variants

import gecko
from gecko.runtime.tensors import tensors_of

pytestmark = pytest.mark.usefixtures("poisoned")


@variants
def test_checkpointed_blocks_give_the_same_gradients(variant):
    model, text = cases.model(variant), tokens(2, 30)
    ids, gradients = documents(2, 30, seed=8), []
    for model.activation_checkpointing in ("none", "selective", "full"):
        model.zero_grad()
        model.loss(text, text.roll(-1, 1), ids).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, *checkpointed in zip(*gradients, strict=True):
        for gradient in checkpointed:
            torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)


@variants
def test_every_parameter_is_trained(variant):
    model, text = cases.model(variant), tokens(2, 40)
    model.loss(text, text.roll(-1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@variants
@pytest.mark.parametrize("length", [1, 30])
def test_states_of_layers_share_no_memory_and_a_loss_keeps_none(variant, length):
    model, text, seen = cases.model(variant), tokens(2, length), []
    for block in model.blocks:
        block.mixer.register_forward_hook(lambda _, __, output: seen.append(output[1]))
    model(text)
    places = [{x.untyped_storage().data_ptr() for x in tensors_of(state)} for state in seen]
    assert len(set.union(*places)) == sum(map(len, places))
    seen.clear()
    model.loss(text, text)
    assert seen == [None] * len(model.blocks)


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_loss_is_cross_entropy_of_the_logits(packed):
    model, text = cases.model("gecko"), tokens(2, 40)
    ids, targets = (documents(2, 40, seed=3) if packed else None), text.roll(-1, 1)
    targets[0, 3:9] = -100
    counted = targets.clone()
    if ids is not None:
        assert (ids[:, 1:] != ids[:, :-1]).any()
        counted[:, :-1][ids[:, 1:] != ids[:, :-1]] = -100
    expected = F.cross_entropy(model(text, ids)[0].flatten(0, 1), counted.flatten())
    loss = model.loss(text, targets, ids)
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(*(torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)
    each, _ = model.token_losses(text, targets, ids)
    assert ((each == 0) == (counted == -100)).all()
    torch.testing.assert_close(each.sum() / (counted != -100).sum(), expected.detach())


def test_initialisation():
    """Architecture §8, on a model wide enough for its statistics to be visible."""
    torch.manual_seed(0)
    config = gecko.GeckoConfig.preset("tiny", model_dim=256, num_layers=1, ffn_scale=True)
    parameters = dict(gecko.Gecko(config).named_parameters())

    def std(name):
        return parameters[name].std().item()

    embedding = parameters["embedding.weight"]
    assert embedding.abs().max() <= 3 / 16
    assert std("embedding.weight") == pytest.approx(1 / 16, rel=0.03)
    assert std("blocks.0.mixer.to_value.weight") == pytest.approx((3 * 256) ** -0.5, rel=0.03)
    assert std("blocks.0.feed_forward.fc2.weight") == pytest.approx((3 * config.ffn_dim) ** -0.5, rel=0.03)
    assert std("blocks.0.mixer.cema.alpha") == pytest.approx(0.2, rel=0.05)
    assert std("blocks.0.mixer.cema.delta") == pytest.approx(0.2, rel=0.05)
    gamma = parameters["blocks.0.mixer.cema.gamma"]
    assert gamma[..., 0].std().item() == pytest.approx(config.cema_modes**-0.5, rel=0.05)
    assert not gamma[..., 1].any()
    frequencies = parameters["blocks.0.mixer.cema.theta"].double().sigmoid().sort(descending=True).values
    expected = 256.0 ** (-torch.arange(1, 257).double() / 256)
    torch.testing.assert_close(frequencies, expected, rtol=1e-4, atol=1e-6)
    assert (parameters["blocks.0.feed_forward.scale"] == 0.1).all()
    for name, parameter in parameters.items():
        if "norm" in name or name.endswith(("bias", "mixer.scale", "mixer.offset")):
            assert not parameter.any(), name


@pytest.mark.parametrize("memory", ["adaptive", "linear", "none"])
def test_memory_keys_begin_with_their_length(memory):
    """Only the memory's rows of γ change: the option draws no other random numbers."""

    def parameters(**changes):
        torch.manual_seed(0)
        return dict(gecko.Gecko(gecko.GeckoConfig.preset("tiny", memory=memory, **changes)).named_parameters())

    plain, longer = parameters(), parameters(memory_key_length=2.5)
    for name, parameter in longer.items():
        before = plain[name].detach().clone()
        if name.endswith("mixer.scale"):
            before[2:] = 1.5
        assert torch.equal(parameter, before), name
