"""Linear layers that are called together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gecko.layers import project
from gecko.ops.feed_forward import feed_forward


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


@pytest.mark.parametrize("name", ["forward", "_compiled_call_impl"])
def test_a_forward_put_in_its_place_and_the_call_that_module_compile_sets_are_called(layers, name):
    x = torch.randn(2, 1000, 16)
    setattr(layers[0], name, lambda x: 7 * x)
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
