"""Projections with the gradients of a GPU equal linear layers, in dtype and in numbers."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import TOLERANCE, normal

from gecko.ops.projections import ProjectionsGPU, projections
from gecko.train.step import autocast

BIASED = [(True, False), (False, True)]

# Without C kernels, linear layers read what autocast says.
pytestmark = pytest.mark.usefixtures("on_kernels", "eager_forms")


def _layers(dtype, biased):
    weights = [normal(outputs, 12, seed=outputs, dtype=dtype) for outputs in (8, 5)]
    return weights, [normal(len(w), dtype=dtype) if has else None for w, has in zip(weights, biased, strict=True)]


@pytest.mark.parametrize("biased", BIASED)
@pytest.mark.parametrize(
    ("parameters", "precision", "dtype"),
    [
        (torch.float32, "float32", torch.float32), (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.bfloat16),
    ],
)  # fmt: skip
def test_projections_and_their_gradients(parameters, precision, dtype, biased):
    weights, biases = _layers(parameters, biased)
    x = normal(2, 3, 12, dtype=parameters)
    leaves = [t for t in (x, *weights, *biases) if t is not None]
    with autocast(precision, x.device):
        outputs = projections(x, weights, biases)
    assert "ProjectionsGPU" in str(outputs[0].grad_fn)
    assert [y.dtype for y in outputs] == [dtype] * 2
    given = [normal(*y.shape, dtype=dtype, seed=7).detach() for y in outputs]
    found = torch.autograd.grad(outputs, leaves, given)

    wide = [t if t is None else t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    exact = projections(wide[0], wide[1:3], wide[3:])
    expected = torch.autograd.grad(exact, [t for t in wide if t is not None], [g.double() for g in given])
    for got, wanted, leaf in zip((*outputs, *found), (*exact, *expected), (*outputs, *leaves), strict=True):
        assert got.dtype == leaf.dtype
        scale = float(wanted.detach().abs().max())
        torch.testing.assert_close(got.detach().double(), wanted.detach(), rtol=0, atol=2 * TOLERANCE[dtype] * scale)


def test_gradients_of_weights_are_not_rounded_to_16_bits():
    weights, biases = _layers(torch.float32, (True, True))
    x = normal(2, 3, 12)
    with autocast("bfloat16", x.device):
        outputs = projections(x, weights, biases)
    rounded, given = x.detach().bfloat16(), [torch.randn_like(y) for y in outputs]
    for weight, bias, grad in zip(weights, biases, given, strict=True):
        torch.autograd.backward(outputs, given, retain_graph=True, inputs=[weight, bias])
        steps = grad.flatten(0, 1).double()
        torch.testing.assert_close(weight.grad.double(), steps.T @ rounded.flatten(0, 1).double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(bias.grad.double(), steps.sum(0), rtol=1e-6, atol=1e-6)


def test_only_gradients_that_are_needed_are_computed():
    weights, biases = _layers(torch.float32, (True, False))
    weights[0].requires_grad_(False)
    x = normal(2, 3, 12).detach()
    projections(x, weights, biases)[0].sum().backward()  # the second output has no gradient
    assert [t.grad is None for t in (*weights, biases[0])] == [True, True, False]
    projections(x, weights, biases)[1].sum().backward()
    assert weights[1].grad is not None


@pytest.mark.parametrize("frozen", [(True, True), (True, False), (False, False)])
def test_only_tensors_that_backward_needs_are_kept(frozen):
    weights, biases = _layers(torch.float32, (True, True))
    for weight, is_frozen in zip(weights, frozen, strict=True):
        weight.requires_grad_(not is_frozen)
    for x in (normal(2, 3, 12), normal(2, 3, 12).detach()):
        kept = projections(x, weights, biases)[0].grad_fn.saved_tensors
        assert (kept[0] is None) == all(frozen)
        assert [t is None for t in kept[1:]] == [not x.requires_grad] * 2


@pytest.mark.parametrize("shape", [(12,), (0, 12), (2, 0, 12), (3, 12)])
def test_any_rank_and_no_rows(shape):
    weights, biases = _layers(torch.float32, (True, False))
    x = normal(*shape)
    outputs = projections(x, weights, biases)
    leaves = x, *weights, biases[0]
    expected = [torch.nn.functional.linear(x, *layer) for layer in zip(weights, biases, strict=True)]
    found, wanted = (
        [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), leaves)] for ys in (outputs, expected)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)])
def test_dtypes_that_differ_are_treated_as_by_linear_layers(precision, dtypes):
    x, weight = (normal(3, 12, dtype=dtype) for dtype in dtypes)

    def outcome(call):
        with autocast(precision, x.device):
            try:
                return call().dtype
            except RuntimeError as error:
                return str(error)

    assert outcome(lambda: projections(x, [weight], [None])[0]) == outcome(
        lambda: torch.nn.functional.linear(x, weight)
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 3, 12)])
def test_an_output_may_be_written_to(shape, biased):
    weights, biases = _layers(torch.float32, (biased, biased))
    x = normal(*shape)
    before = x.detach().clone()
    outputs = projections(x, weights, biases)
    outputs[0].mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, (2 * weights[0].detach().sum(0)).expand(shape))
    assert x.equal(before)


def test_second_derivatives_are_refused():
    (weight, _), _ = _layers(torch.float32, (False, False))
    x = normal(2, 3, 12)
    (y,) = projections(x, [weight], [None])
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_without_gradients_layers_are_pytorchs_own(monkeypatch):
    monkeypatch.setattr(ProjectionsGPU, "apply", None)
    weights, biases = _layers(torch.float32, (True, True))
    with torch.no_grad():
        projections(normal(2, 3, 12), weights, biases)
