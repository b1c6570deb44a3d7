"""Comparison of a C kernel with the same operator in float64, which uses the eager form."""

import shutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from gecko.ops.backends.cpu_library import COMPILERS

TOLERANCE = 1e-5
"""Largest difference, relative to the largest number of the tensor."""

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")
"""Skips only if no compiler is installed; a compiler that fails makes the tests fail."""

Numbers = TypeVar("Numbers")
Form = Callable[..., Tensor | tuple[Tensor, ...]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


def agree(
    operator: Form, leaves: Sequence[Tensor | None], laid: Callable[[Tensor], Tensor] = Tensor.contiguous
) -> None:
    """Assert that outputs and gradients equal those in float64; also without gradients, and on two threads."""
    found, again = evaluate(operator, leaves, laid), on_two_threads(lambda: evaluate(operator, leaves, laid))
    exact = evaluate(operator, [None if x is None else x.double() for x in leaves], laid)
    with torch.no_grad():
        plain = _several(operator(*leaves))
    assert all(map(torch.equal, plain, found))
    for i, (got, repeated, wanted) in enumerate(zip(found, again, exact, strict=True)):
        assert got.dtype == torch.float32 and got.shape == wanted.shape and got.is_contiguous()
        assert torch.equal(got, repeated), f"number {i} on two threads"
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE, atol=TOLERANCE * scale)


def evaluate(operator: Form, leaves: Sequence[Tensor | None], laid: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the outputs, then the gradient of each leaf for random output gradients in the memory layout ``laid``."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
    outputs = _several(operator(*leaves))
    weights = [laid(normal(*x.shape, seed=i).to(x.dtype)) for i, x in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, [x for x in leaves if x is not None], weights)
    return [*(x.detach() for x in outputs), *gradients]


def _several(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def on_two_threads(call: Callable[[], Numbers]) -> Numbers:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def turned(x: Tensor) -> Tensor:
    """Return an equal tensor whose first axis is the innermost in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def calls(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """Return a list to which the names of the kernels that ``modules`` call are appended from now on."""
    names: list[str] = []
    for module in modules:

        def recorded(name: str, *arguments: object, call: Callable[..., None] = module.call) -> None:
            names.append(name)
            call(name, *arguments)

        monkeypatch.setattr(module, "call", recorded)
    return names
