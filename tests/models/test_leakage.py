"""Documents are independent: gradients between them are exactly zero, and none is trained on the start of the next."""

from __future__ import annotations

import pytest
import torch
from support import cases
from support.cases import CHUNK, tokens
from support.model_calls import variants
from torch import Tensor

import gecko

pytestmark = pytest.mark.usefixtures("poisoned")

LAYOUTS = {
    "mid-chunk": [13, 21, 46],
    "chunk-edges": [2 * CHUNK, 3 * CHUNK, 6 * CHUNK],
    "around-edges": [CHUNK - 1, CHUNK + 1, 4 * CHUNK - 1, 7 * CHUNK + 1],
    "single-tokens": [9, 10, 11, 12, 13, 40, 41],
}
LENGTH = 60


def document_ids(layout: str) -> Tensor:
    return torch.tensor([[sum(t >= start for start in LAYOUTS[layout]) for t in range(LENGTH)]])


def embeddings(model: gecko.Gecko) -> list[Tensor]:
    """Return a list that is filled with the embedded inputs of every call, as leaves."""
    found: list[Tensor] = []

    def cut(module, inputs, output):
        found.append(output.detach().requires_grad_())
        return found[-1]

    model.embedding.register_forward_hook(cut)
    return found


def random_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)


@variants
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_do_not_depend_on_other_documents(variant, layout):
    model = cases.model(variant)
    found, ids = embeddings(model), document_ids(layout)
    logits, _ = model(tokens(1, LENGTH), ids)
    weighted = logits * random_like(logits)
    for document in ids.unique():
        own = ids[0] == document
        (grad,) = torch.autograd.grad(weighted[:, own].sum(), found[0], retain_graph=True)
        assert not grad[:, ~own].any()
        assert grad[:, own].abs().amax(-1).gt(0).all()


@variants
@pytest.mark.parametrize("cut", [1, CHUNK, 30])
def test_outputs_do_not_depend_on_documents_of_earlier_calls(variant, cut):
    """Documents of a later call depend on tokens of an earlier call if and only if they started there."""
    model = cases.model(variant)
    found, ids = embeddings(model), document_ids("mid-chunk")
    text = tokens(1, LENGTH)
    _, state = model(text[:, :cut], ids[:, :cut])
    logits, _ = model(text[:, cut:], ids[:, cut:], state)
    weighted = logits * random_like(logits)
    for document in ids[:, cut:].unique():
        own, own_before = ids[0, cut:] == document, ids[0, :cut] == document
        (grad,) = torch.autograd.grad(
            weighted[:, own].sum(), found[0], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        assert not grad[:, ~own_before].any()
        # Even with attention within one chunk, CEMA and the norm carry a state from one call to the next.
        assert grad[:, own_before].abs().amax(-1).gt(0).all()


@variants
def test_outputs_do_not_depend_on_later_tokens(variant):
    model = cases.model(variant)
    found = embeddings(model)
    logits, _ = model(tokens(1, 40))
    weighted = logits * random_like(logits)
    for t in (0, 7, 8, 20, 38):
        (grad,) = torch.autograd.grad(weighted[:, : t + 1].sum(), found[0], retain_graph=True)
        assert not grad[:, t + 1 :].any()


@variants
def test_rows_do_not_depend_on_one_another(variant):
    model = cases.model(variant)
    found = embeddings(model)
    logits, _ = model(tokens(3, 30), document_ids("mid-chunk")[:, :30].expand(3, -1))
    (grad,) = torch.autograd.grad((logits * random_like(logits))[1].sum(), found[0])
    assert not grad[[0, 2]].any() and grad[1].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_never_trains_a_document_on_the_next_one(layout):
    """Changing the targets at the ends of documents changes neither the loss nor any gradient."""
    model, text, ids = cases.model("gecko"), tokens(1, LENGTH), document_ids(layout)
    targets = text.roll(-1, 1)
    targets[:, -1] = -100
    changed = targets.clone()
    ends = [start - 1 for start in LAYOUTS[layout]]
    changed[0, ends] = (changed[0, ends] + 1) % cases.SMALL.vocab_size
    losses = [model.loss(text, wanted, ids) for wanted in (targets, changed)]
    assert torch.equal(*losses)
    for got, wanted in zip(*(torch.autograd.grad(x, list(model.parameters())) for x in losses), strict=True):
        assert torch.equal(got, wanted)
    inside = targets.clone()
    inside[0, 5] = (inside[0, 5] + 1) % cases.SMALL.vocab_size
    assert model.loss(text, inside, ids) != losses[0]


def test_a_row_of_one_token_may_belong_to_a_document():
    model, text = cases.model("gecko"), tokens(2, 1)
    assert torch.equal(model.loss(text, text, torch.zeros_like(text)), model.loss(text, text))
