"""The C kernels satisfy the laws and equal their eager forms."""

from __future__ import annotations

import pytest
import torch
from support import cases, laws
from support.native_agreement import agree, calls, evaluate, needs_compiler, normal, on_two_threads, turned

from gecko.ops import feed_forward as swiglu_file
from gecko.ops import gates as gates
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated, silu_by_head

# ---- The C kernels satisfy the laws, at sizes that cross the borders of their blocks.

pytestmark = needs_compiler


@pytest.mark.parametrize(("law", "case"), laws.over(cases.SINGLE))
@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_native(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_the_number_of_threads_changes_no_bit(operator):
    case = cases.Case(300, "packed", (40,), batch=3, dtype=torch.float32)
    given = cases.problem(operator, case)
    one, two = laws.read(operator.fast, given), on_two_threads(lambda: laws.read(operator.fast, given))
    for found, expected in ((two.values, one.values), (two.gradients, one.gradients)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- The C kernels of the gates and of SwiGLU equal their eager forms in float64, at any size.

SIZES = [(1, 1, 1, 1), (2, 3, 5, 4), (3, 2, 7, 16), (1, 4, 9, 33), (2, 1, 3, 130), (3, 2, 70, 128), (2, 2, 300, 47)]
"""(B, H, T, d) around 16 lanes; the last two are divided among threads."""


@pytest.mark.parametrize("size", SIZES)
def test_silu_by_head(size):
    batch, heads, length, features = size
    agree(lambda x: silu_by_head(x, heads), [normal(batch, length, heads * features)])


@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_gated(size, recalls):
    batch, heads, length, features = size
    recalled = normal(*size, seed=1) if recalls else None
    agree(gated, [normal(*size), normal(batch, length, heads * features), recalled])


@pytest.mark.parametrize("shape", [(1,), (2, 3), (16,), (3, 5, 17), (2, 130, 127)])
def test_swiglu(shape):
    agree(_swiglu, [normal(*shape), normal(*shape, seed=1)])


def _swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Call the kernel, also for few numbers."""
    return swiglu_file.SwiGLUCPU.run(a, b) if a.dtype == torch.float32 else swiglu(a, b)


def test_any_strides():
    x, attended, recalled = normal(2, 5, 12), normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1)
    agree(lambda x: silu_by_head(x, 3), [turned(x)], turned)
    agree(gated, [turned(attended), turned(x), turned(recalled)], turned)
    agree(_swiglu, [turned(x), turned(normal(2, 5, 12, seed=1))], turned)


def test_only_what_is_asked_for():
    """Gradients of subsets of the inputs."""
    attended, gate, recalled = normal(2, 3, 5, 4), normal(2, 5, 12).requires_grad_(), normal(2, 3, 5, 4, seed=1)
    weight = normal(2, 5, 12, seed=2)
    (grad,) = torch.autograd.grad(gated(attended, gate, recalled), gate, weight)
    wide = gate.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(gated(attended.double(), wide, recalled.double()), wide, weight.double())
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_large_numbers_and_none():
    """Gates that are closed, fully open, and NaN."""
    x = torch.tensor([[[-3e38, -1e4, -90.0, -88.5, -87.0, -20.0, 0.0, 20.0, 87.0, 88.5, 90.0, 3e38]]])
    for operator in (lambda x: silu_by_head(x, 2), lambda x: _swiglu(x, torch.ones_like(x))):
        found, exact = (evaluate(operator, [given], torch.ones_like) for given in (x, x.double()))
        for got, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-34)
    assert silu_by_head(torch.full((1, 1, 20), float("nan")), 2).isnan().all()


def test_no_tokens():
    x = torch.zeros(2, 0, 12, requires_grad=True)
    y = gated(silu_by_head(x, 3), x, None)
    assert y.shape == (2, 0, 12)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


def test_float32_takes_the_kernels(monkeypatch):
    names = calls(monkeypatch, gates)
    x = normal(2, 5, 12).requires_grad_()
    gated(silu_by_head(x, 3), x, None).sum().backward()
    assert names == ["gates_silu_forward", "gates_gated_forward", "gates_gated_backward", "gates_silu_backward"]
    names = calls(monkeypatch, swiglu_file)
    a = normal(2**17 + 1).requires_grad_()
    swiglu(a, a).sum().backward()
    swiglu(a[1:], a[1:]).sum().backward()  # too few for the kernel
    assert names == ["swiglu_forward", "swiglu_backward"]
