"""The C kernels of projections and feed-forward equal their eager forms in float64, at any size."""

from __future__ import annotations

import pytest
import torch
from support.native_agreement import agree, calls, needs_compiler, normal, turned
from torch import Tensor

from gecko.ops import feed_forward as feed_forward_file
from gecko.ops import projections as projections_file
from gecko.ops.backends import cpu as panels
from gecko.ops.feed_forward import feed_forward
from gecko.ops.projections import projections

pytestmark = needs_compiler

TOKENS = [1, 5, 96, 97, 191, 1000]
"""Numbers of tokens around a block, and numbers of blocks that do not divide evenly among groups."""

WIDTHS = [(16, 16), (48, 80), (64, 256), (144, 32), (272, 112)]
"""(inputs, outputs): packed weights of every width, and depths beyond one panel."""


@pytest.fixture(autouse=True)
def _kernels_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 1)


def _weights(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return normal(outputs, inputs, seed=seed) / inputs**0.5


def _one_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    return projections(x, (weight,), (bias,), onto)[0]


def _three_layers(x: Tensor, onto: Tensor | None, *layers: Tensor | None) -> tuple[Tensor, ...]:
    weights = [t for t in layers[:3] if t is not None]
    return projections(x, weights, layers[3:], onto)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_one_layer(tokens, widths):
    inputs, outputs = widths
    agree(_one_layer, [normal(tokens, inputs), _weights(outputs, inputs)])


@pytest.mark.parametrize("biased", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_several_layers(tokens, adds, biased):
    outputs = 32, 80, 48
    onto = normal(2, tokens, outputs[-1], seed=3) if adds else None
    weights = [_weights(size, 64, seed=i) for i, size in enumerate(outputs)]
    biases = [normal(size, seed=9) if has else None for size, has in zip(outputs, biased, strict=True)]
    agree(_three_layers, [normal(2, tokens, 64), onto, *weights, *biases])


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_feed_forward(tokens, widths):
    features, hidden = widths
    weights = _weights(hidden, features), _weights(hidden, features, seed=1), _weights(features, hidden, seed=2)
    agree(feed_forward, [normal(2, tokens, features), *weights, normal(2, tokens, features, seed=1)])


def test_any_strides():
    x, weight = normal(3, 100, 32), _weights(32, 32)
    agree(_one_layer, [turned(x), turned(weight), normal(64)[::2], turned(normal(3, 100, 32, seed=1))], turned)
    others = _weights(32, 32, seed=1), _weights(32, 32, seed=2)
    agree(feed_forward, [turned(x), *map(turned, (weight, *others)), turned(normal(3, 100, 32, seed=1))], turned)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_only_what_is_asked_for(wanted):
    """Gradients of subsets of input, weight, bias and addend."""
    leaves = [normal(200, 32), _weights(48, 32), normal(48), normal(200, 48, seed=1)]
    found, exact = (_gradients([x.to(dtype) for x in leaves], wanted) for dtype in (torch.float32, torch.float64))
    for got, right in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


def _gradients(leaves: list[Tensor], wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
    for i in wanted:
        leaves[i].requires_grad_()
    y = _one_layer(*leaves)
    return torch.autograd.grad(y, [leaves[i] for i in wanted], normal(*y.shape, seed=5).to(y.dtype))


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_outputs_that_nobody_uses(used):
    def operator(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = _three_layers(leaves[0], leaves[1], *leaves[2:])
        return tuple(outputs[i] for i in used)

    weights = [_weights(32, 16, seed=i) for i in range(3)]
    leaves = [normal(100, 16), normal(100, 32, seed=1), *weights, *(normal(32, seed=i) for i in range(3))]
    found, exact = (_all_gradients(operator, [x.to(dtype) for x in leaves]) for dtype in (torch.float32, torch.float64))
    for got, right in zip(found, exact, strict=True):
        assert (got is None) == (right is None) or not bool(got.any() if right is None else right.any())
        if got is not None and right is not None:
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-4)


def _all_gradients(operator, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    leaves = [x.requires_grad_() for x in leaves]
    return torch.autograd.grad(sum(y.square().sum() for y in operator(*leaves)), leaves, allow_unused=True)


def test_float32_takes_the_kernels(monkeypatch):
    names = calls(monkeypatch, projections_file), calls(monkeypatch, feed_forward_file)
    x, weight = normal(20, 32).requires_grad_(), _weights(32, 32)
    _one_layer(x, weight).sum().backward()
    feed_forward(x, weight, weight, weight, x).sum().backward()
    assert names == (
        ["projections_forward", "projections_backward"],
        ["feed_forward_forward", "feed_forward_backward"],
    )


def test_what_the_kernels_leave_out(monkeypatch):
    """Widths that do not fill a register, layers with many weights, and few tokens."""
    names = calls(monkeypatch, projections_file)
    for inputs, outputs in ((24, 32), (32, 40), (1024, 1024)):
        x, weight = normal(20, inputs), _weights(outputs, inputs)
        torch.testing.assert_close(_one_layer(x, weight), x @ weight.t())
    monkeypatch.setattr(panels, "_FEWEST_TOKENS", 21)
    _one_layer(normal(20, 32), normal(32, 32))
    assert names == []


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


def test_no_gradient_comes_of_none():
    x = normal(300, 32).requires_grad_()
    _Stop.apply(_one_layer(x, _weights(48, 32))).sum().backward()
    assert x.grad is None


def test_what_frozen_layers_read_is_not_kept():
    x, weight = normal(300, 32).requires_grad_(), _weights(48, 32)
    read = x * 1
    y = _one_layer(read, weight)
    read.zero_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, weight.sum(0).expand(300, 32))


def test_frozen_feed_forward():
    x = normal(300, 32).double().requires_grad_()
    weights = [_weights(48, 32), _weights(48, 32, seed=1), _weights(32, 48, seed=2)]
    single = x.detach().float().requires_grad_()
    y, exact = feed_forward(single, *weights, single), feed_forward(x, *(w.double() for w in weights), x)
    found, right = torch.autograd.grad(y.sum(), single), torch.autograd.grad(exact.sum(), x)
    torch.testing.assert_close(found[0].double(), right[0], rtol=1e-5, atol=1e-4)


def test_second_derivatives_are_refused():
    x, weight = normal(300, 32).requires_grad_(), _weights(32, 32).requires_grad_()
    for y in (_one_layer(x, weight), feed_forward(x, weight, weight, weight, x)):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "change", [Tensor.bfloat16, Tensor.double, lambda t: t.to("meta"), lambda t: t[:1], lambda t: t.expand(2, *t.shape)]
)
def test_saved_tensors_that_come_back_as_others_are_refused(change):
    x = normal(300, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(change, lambda t: t):
        y = _one_layer(x, _weights(48, 32).requires_grad_())
    with pytest.raises(ValueError, match=r"C kernels need|a hook on saved tensors must"):
        y.sum().backward()


def test_saved_tensors_may_come_back_in_another_order_of_memory():
    x, weight = normal(300, 32).requires_grad_(), _weights(48, 32).requires_grad_()
    expected = torch.autograd.grad(_one_layer(x, weight).sum(), (x, weight))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT, lambda t: t):
        y = _one_layer(x, weight)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), expected))
