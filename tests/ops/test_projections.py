"""Linear layers that are called together, and inputs that they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gecko.layers import project
from gecko.ops.feed_forward import feed_forward
from gecko.ops.projections import projections


@pytest.fixture
def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, 32), nn.Linear(16, 48, bias=False)]


def test_projections_are_linear_layers(layers):
    x, onto = torch.randn(2, 5, 16), torch.randn(2, 5, 48)
    first, second = project(x, *layers, onto=onto)
    torch.testing.assert_close(first, layers[0](x))
    torch.testing.assert_close(second, onto + layers[1](x))
    torch.testing.assert_close(project(x, layers[1])[0], layers[1](x))


def test_feed_forward_is_its_equation():
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(2, 5, 16), torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 32)
    expected = x + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(feed_forward(x, gate, up, down, x), expected)


class _Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_adapters_and_parametrisations_are_called(layers):
    x = torch.randn(2, 1000, 16)
    layers[0] = _Adapted(16, 32)
    nn.utils.parametrizations.weight_norm(layers[1])
    with torch.no_grad():
        layers[1].parametrizations.weight.original0.mul_(3)
    onto = torch.randn(2, 1000, 48)
    first, second = project(x, *layers, onto=onto)
    torch.testing.assert_close(first, layers[0](x))
    torch.testing.assert_close(second, onto + layers[1](x))


def test_a_forward_put_in_its_place_is_called(layers):
    x = torch.randn(2, 1000, 16)
    layers[0].forward = lambda x: 7 * x
    torch.testing.assert_close(project(x, *layers)[0], 7 * x)


def test_the_call_that_module_compile_sets_is_called(layers):
    x = torch.randn(2, 1000, 16)
    layers[0]._compiled_call_impl = lambda x: 7 * x
    torch.testing.assert_close(project(x, *layers)[0], 7 * x)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_called(layers, kind):
    seen = []
    getattr(layers[1], f"register_{kind}_hook")(lambda *_: seen.append(kind))
    sum(y.sum() for y in project(torch.randn(2, 1000, 16, requires_grad=True), *layers)).backward()
    assert seen == [kind]


def test_hooks_of_all_modules_are_called(layers):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        project(torch.randn(2, 1000, 16), *layers)
    finally:
        handle.remove()
    assert seen == layers


def test_shapes_that_do_not_fit_are_refused():
    x, weight = torch.zeros(2, 5, 16), torch.zeros(32, 16)
    with pytest.raises(ValueError, match=r"weights\[1\] must have shape \(32, 16\); got \(32, 15\)"):
        projections(x, (weight, weight[:, :15]), (None, None))
    with pytest.raises(ValueError, match=r"biases\[0\] must have shape \(32,\); got \(1,\)"):
        projections(x, (weight,), (torch.zeros(1),))
    with pytest.raises(ValueError, match=r"onto must have shape \(2, 5, 32\); got \(5, 32\)"):
        projections(x, (weight,), (None,), torch.zeros(5, 32))
    with pytest.raises(ValueError, match=r"down must have shape \(16, 32\); got \(32, 16\)"):
        feed_forward(x, weight, weight, weight, x)
    with pytest.raises(ValueError, match=r"onto must have shape \(2, 5, 16\); got \(1, 5, 16\)"):
        feed_forward(x, weight, weight, weight.t(), x[:1])
