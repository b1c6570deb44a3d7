"""Linear layers that use oneDNN equal those of PyTorch."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.native_agreement import evaluate, normal
from torch import Tensor
from torch.nn import functional

from gecko.ops.backends import cpu as file
from gecko.ops.backends.cpu import linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")

SHAPES = [(), (1,), (3,), (2, 5), (4, 1, 7)]
"""Shapes before the axis of features."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "sliced": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[x.numel() :].view(x.shape),
}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the shapes passed to oneDNN, with oneDNN enabled for any size and processor."""
    found: list[Any] = []
    right = file._onednn

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(tuple(x.shape))
        return right(x, weight, bias)

    monkeypatch.setattr(file, "_FEWEST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(file, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(file, "_onednn", watched)
    return found


@pytest.mark.parametrize(
    ("shape", "layout", "biased"),
    [*((shape, "contiguous", True) for shape in SHAPES), *(((2, 5), layout, False) for layout in LAYOUTS)],
)
def test_numbers_and_gradients(seen, shape, layout, biased):
    leaves = [normal(*shape, 24), normal(40, 24), *([normal(40)] if biased else [])]

    def laid(*leaves: Tensor) -> Tensor:
        operator = linear if leaves[0].dtype == torch.float32 else functional.linear
        return operator(*map(LAYOUTS[layout], leaves))

    found, exact = (evaluate(laid, given, LAYOUTS[layout]) for given in (leaves, [x.double() for x in leaves]))
    with torch.no_grad():
        assert torch.equal(laid(*leaves), found[0])
    assert len(seen) == 4  # once without gradients; once forward, and backward for x and the weight
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bias", [normal(40, 3)[:, 1], normal(1).expand(40)], ids=["strided", "expanded"])
def test_bias_of_any_stride(bias):
    x, weight = normal(6, 24), normal(40, 24)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.t() + bias)


@pytest.mark.parametrize("operator", [linear, functional.linear])
def test_gradients_that_are_one_number_for_all(operator):
    """The gradient of a sum is an expanded tensor without its own memory."""
    x, weight = normal(6, 24).requires_grad_(), normal(40, 24).requires_grad_()
    found = torch.autograd.grad(operator(x, weight).sum(), (x, weight))
    torch.testing.assert_close(found[0], weight.sum(0).expand(6, 24))
    torch.testing.assert_close(found[1], x.sum(0).expand(40, 24))


def test_second_derivatives():
    x, weight = normal(6, 24).requires_grad_(), normal(40, 24).requires_grad_()

    def second(operator: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(operator(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    for got, wanted in zip(second(linear), second(functional.linear), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_frozen_weights_keep_nothing():
    x, weight = normal(6, 24).requires_grad_(), normal(40, 24)
    read = x * 1
    y = linear(read, weight)
    read.zero_()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand(6, 24))


def test_what_is_left_to_pytorch(monkeypatch, seen):
    x, weight = normal(6, 24), normal(40, 24)
    linear(x.double(), weight.double())
    linear(x.bfloat16(), weight.bfloat16())
    linear(x[:0], weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    torch.func.vmap(lambda row: linear(row, weight))(x)
    torch.testing.assert_close(torch.compile(linear, fullgraph=True, backend="eager")(x, weight), x @ weight.t())
    monkeypatch.setattr(file, "_FEWEST_MULTIPLICATIONS", 6 * 24 * 40 + 1)
    linear(x, weight)
    monkeypatch.setattr(file, "_FEWEST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(file, "onednn_is_faster", lambda: False)
    linear(x, weight)
    assert seen == []


def test_processors(monkeypatch):
    monkeypatch.undo()
    for vendor, capability in (
        ("AuthenticAMD", "AVX512"),
        ("AuthenticAMD", "AVX2"),
        ("GenuineIntel", "AVX512"),
        ("", ""),
    ):
        monkeypatch.setattr(file, "processor_field", {"vendor_id": vendor}.get)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert file.onednn_is_faster.__wrapped__() is ((vendor, capability) == ("AuthenticAMD", "AVX512"))


GROWTH = """
import ctypes
import torch
from gecko.ops.backends import cpu

class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used f g".split()]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Memory
cpu.onednn_is_faster = lambda: True
weights = [torch.randn(256, 256, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
with torch.inference_mode():
    for rows in range(100, 500):
        for weight in weights:
            cpu.linear(torch.randn(rows, 256).to(weight.dtype), weight)
        if rows == 100:
            before = library.mallinfo2()
    after = library.mallinfo2()
print(after.used + after.mapped - before.used - before.mapped)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="counts the memory of glibc's allocator")
def test_lengths_that_were_never_seen_do_not_fill_the_memory():
    found = subprocess.run([sys.executable, "-c", GROWTH], check=True, capture_output=True, text=True, timeout=300)
    assert int(found.stdout) < 120e6  # oneDNN's own limit is 1,024 programs of 0.6 MB: 400 MB here
