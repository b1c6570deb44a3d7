"""Tokens, targets, documents and states that a model accepts or refuses."""

from __future__ import annotations

import pytest
import torch
from support import cases
from support.cases import tokens

import gecko

pytestmark = pytest.mark.usefixtures("poisoned")


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
@torch.no_grad()
def test_narrow_token_types(dtype):
    model, text = cases.model("gecko"), tokens(2, 9)
    assert torch.equal(model(text.to(dtype))[0], model(text)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_token_types_train(dtype):
    model, text = cases.model("gecko"), tokens(2, 9)
    assert torch.equal(model.loss(text.to(dtype), text.to(dtype)), model.loss(text, text))


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
