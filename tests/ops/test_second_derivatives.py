"""Second derivatives are right or refused; a path around an operator does not hide its share."""

import importlib
import pkgutil

import pytest
import torch
from support.cases import SMALL

import gecko
from gecko.ops.backends.cpu import CFunction
from gecko.ops.backends.first_order import FirstOrder

TWICE = {"_OneDNNLinear", "_Transposed"}
"""Functions whose backward pass is made of differentiable operations."""


def of(base: type) -> set[type]:
    return {base}.union(*(of(each) for each in base.__subclasses__()))


def test_every_function_says_whether_it_has_second_derivatives() -> None:
    for name in ("gecko.ops", "gecko.parallel", "gecko.models", "gecko.layers"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if "triton" not in module.name:
                importlib.import_module(module.name)
    ours = {each for each in of(torch.autograd.Function) if each.__module__.startswith("gecko.")}
    assert {each.__name__ for each in ours - of(FirstOrder)} == TWICE
    assert len(of(CFunction)) > 10
    for each in of(FirstOrder) - {FirstOrder, CFunction}:
        with torch.enable_grad(), pytest.raises(RuntimeError, match=f"{each.__name__} has first derivatives only"):
            each.backward(None, torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_gradients_of_a_models_gradients_are_refused(dtype: torch.dtype, length: int) -> None:
    model = gecko.Gecko(SMALL).to(dtype)
    tokens = torch.arange(length).remainder(SMALL.vocab_size).expand(2, -1)
    for of_model in (model.loss(tokens, tokens), model.hidden(tokens)[0].square().sum()):
        with pytest.raises(RuntimeError, match="has first derivatives only; got create_graph=True"):
            torch.autograd.grad(of_model, list(model.parameters()), create_graph=True, allow_unused=True)
