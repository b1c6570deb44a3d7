"""A custom operator gives the same result with and without the dispatcher, which it uses for observed calls only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gecko.ops.backends.dispatch import custom_op


@custom_op("tested_twice_backward")
def _backward(grad: Tensor, x: Tensor, y: Tensor | None, factors: list[Tensor], power: int) -> tuple[Tensor, Tensor]:
    by_y = x**power * factors[0] * grad
    return (grad if y is None else grad * y) * power * x ** (power - 1) * factors[0], by_y


@custom_op("tested_twice", _backward, of=[0, 1], results=1)
def _powers(x: Tensor, y: Tensor | None, factors: list[Tensor], power: int) -> tuple[Tensor, Tensor]:
    """Return x^power times a factor and y, and x², which has no gradient."""
    out = x**power * factors[0]
    return out if y is None else out * y, x * x


class _Seen(TorchDispatchMode):
    """Records the names of operations that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _given(with_y: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y, factor = (torch.randn(5, generator=generator) for _ in range(3))
    return x.requires_grad_(), y.requires_grad_() if with_y else None, [factor], 3


def _gradients(operator: Any, given: tuple[Any, ...]) -> list[Tensor]:
    out, square = operator(*given)
    assert not square.requires_grad
    return [out.detach(), square, *torch.autograd.grad(out.sum(), [x for x in given[:2] if x is not None])]


@pytest.mark.parametrize("with_y", [True, False])
def test_both_ways_give_the_same(with_y):
    given = _given(with_y)
    for found, expected in zip(_gradients(_powers, given), _gradients(_powers.registered, given), strict=True):
        assert torch.equal(found, expected)


@custom_op("tested_as_list")
def _multiples(x: Tensor, count: int) -> list[Tensor]:
    return [x * (place + 1) for place in range(count)]


def _pass_back(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return sum((grad * (place + 1) for place, grad in enumerate(grads)), torch.zeros_like(grads[0])), None


_multiples.register_autograd(_pass_back, setup_context=lambda ctx, inputs, output: None)


@pytest.mark.parametrize("used", [[0, 1, 2], [1], [2, 0]])
def test_a_list_of_results_has_gradients_both_ways(used):
    """Results that are not used count as zeros."""
    x, _, _, count = _given()
    for operator in (_multiples, _multiples.registered):
        found = operator(x, count)
        assert len(found) == count
        (grad,) = torch.autograd.grad(sum(found[place].sum() for place in used), x)
        assert torch.equal(grad, torch.full_like(x, sum(place + 1 for place in used)))


def test_it_is_registered_in_full_and_compiles_in_one_graph():
    torch.library.opcheck(_powers.registered, _given())
    x, y, factors, power = _given()

    def around(x: Tensor) -> Tensor:
        return _powers(2 * x, y, factors, power)[0].sum()

    compiled = torch.compile(around, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(around(x), x))


def test_who_watches_sees_one_operation_and_nobody_else_pays_for_it():
    given = _given()
    with _Seen() as seen:
        out, _ = _powers(*given)
    assert [name for name in seen.names if "gecko" in name] == ["gecko.tested_twice.default"]
    assert "tested_twice" in type(out.grad_fn).__name__
    assert type(_powers(*given)[0].grad_fn).__name__ == "gecko_tested_twiceBackward"


def test_a_subclass_is_not_taken_for_a_plain_tensor(monkeypatch):
    x, y, factors, power = _given()

    class Marked(Tensor):
        pass

    monkeypatch.setattr(_powers, "registered", lambda *given: "registered")
    assert _powers(x.detach().as_subclass(Marked), y, factors, power) == "registered"
    assert _powers(x, y, factors, power) != "registered"


def test_without_gradients_nothing_is_kept():
    x, y, factors, power = _given()
    with torch.no_grad():
        assert _powers(x, y, factors, power)[0].grad_fn is None
    assert _powers(x.detach(), None, factors, power)[0].grad_fn is None


def test_second_derivatives_are_refused_both_ways():
    x, _, factors, power = _given()
    with pytest.raises(RuntimeError, match="gecko_tested_twice has first derivatives only"):
        torch.autograd.grad(_powers(x, None, factors, power)[0].sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(_powers.registered(x, None, factors, power)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
