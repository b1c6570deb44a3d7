"""A model with all of its kernels equals the same model in float64: in training, with and without activation
checkpointing, and in prefill and decoding."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from kernels.agreement import distance, small_model

from gecko import Gecko
from gecko.train.step import autocast

DOCUMENTS = (torch.arange(36) >= torch.tensor([[19], [33]])).long()

pytestmark = pytest.mark.usefixtures("on_kernels")


def _gradients(model: Gecko, precision: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(32, (2, 37), generator=torch.Generator().manual_seed(0))
    with autocast(precision, tokens.device):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], DOCUMENTS)
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


def _worst(model: Gecko, precision: str) -> float:
    exact = _gradients(copy.deepcopy(model).double(), "float32")
    found = _gradients(model, precision)
    return max(float((found[name] - x).norm() / x.norm().clamp(min=1e-9)) for name, x in exact.items())


@pytest.mark.parametrize(
    ("variant", "checkpointing"),
    [("gecko", "selective"), ("gecko", "full"), ("window-linear", "none"), ("llama", "none")],
)
def test_loss_and_gradients(variant, checkpointing):
    model = small_model(variant)
    model.activation_checkpointing = checkpointing
    assert _worst(model, "float32") < 2e-5


def test_gradients_in_bfloat16_are_near():
    assert _worst(small_model("gecko"), "bfloat16") < 0.05


@cache
def _without_hooks() -> dict[str, torch.Tensor]:
    return _gradients(small_model("gecko"), "float32")


@pytest.mark.parametrize("name", ["mixer", "feed_forward", "feed_forward.norm"])
def test_a_hook_sees_what_the_layer_returns(name):
    """A block leaves out no hook where it gives the terms of the residual stream to the next norm."""
    model, wide, seen = small_model("gecko"), small_model("gecko").double(), []
    for one in (model, wide):
        layer = one.blocks[0].get_submodule(name)
        layer.register_forward_hook(lambda _, __, output: seen.append(output[0] if name == "mixer" else output))
        found = _gradients(one, "float32")
    outputs, exact = seen
    torch.testing.assert_close(outputs.double(), exact, rtol=1e-4, atol=1e-5)
    for key, x in _without_hooks().items():
        torch.testing.assert_close(found[key].float(), x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*(("gecko", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)), ("window-linear", torch.float32)],
    ids=str,
)
@torch.no_grad()
def test_reading_in_parts_and_token_by_token(variant, dtype):
    model = small_model(variant)
    tokens = torch.randint(32, (2, 36), generator=torch.Generator().manual_seed(1))
    expected, _ = copy.deepcopy(model).double()(tokens, DOCUMENTS)
    model, logits, state = model.to(dtype), [], None
    for begin, end in ((0, 21), (21, 34)):
        part, state = model(tokens[:, begin:end], DOCUMENTS[:, begin:end], state)
        logits.append(part)
    for i in (34, 35):
        part, state = model.step(tokens[:, i], state)
        logits.append(part.unsqueeze(1))
    most = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert distance(torch.cat(logits, dim=1), expected) < most
