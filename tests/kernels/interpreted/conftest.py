"""Changes to Triton's interpreter: uninitialised memory is NaN, products round as on the GPU, and scans and calls are
fast."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="module")
def _poisoned(poisoned: None) -> None:
    pass


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators choose their kernels, as for tensors on a GPU; float64 takes the eager forms."""
    from kernels.recording import take_kernels

    take_kernels(monkeypatch)


def _scan(self: Any, inputs: Any) -> list[Any]:
    """Combine whole slices along the axis. The interpreter's own scan combines single numbers, in the same order."""
    steps = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    types = [x.dtype for x in inputs]
    found = [[step[0]] for step in steps]
    for i in range(1, len(steps[0])):
        before = [self.to_tensor(x[-1], dtype) for x, dtype in zip(found, types, strict=True)]
        added = [self.to_tensor(x[i], dtype) for x, dtype in zip(steps, types, strict=True)]
        combined = self.combine_fn.fn(*before, *added)
        for x, value in zip(found, combined if isinstance(combined, tuple) else (combined,), strict=True):
            x.append(value.handle.data.reshape(x[0].shape))
    joined = [np.moveaxis(np.stack(x), 0, self.axis) for x in found]
    return [self.to_tensor(x, dtype) for x, dtype in zip(joined, types, strict=True)]


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, _: int) -> Any:
    """Multiply with ``input_precision``, which the interpreter ignores. Tensor cores truncate float32 factors; "tf32x3"
    is three products of parts that Triton rounds."""
    from triton.runtime.interpreter import TensorHandle

    total = d.data.dtype
    left, right = _wide(a), _wide(b)
    product = np.matmul(left, right, dtype=total)
    is_float32 = a.data.dtype == np.float32
    if is_float32 and "TF32x3" in str(input_precision):
        high, low = _rounded(left), _rounded(left - _rounded(left))
        product = np.matmul(high, _rounded(right)) + np.matmul(low, _rounded(right))
        product += np.matmul(high, _rounded(right - _rounded(right)))
    elif is_float32 and "TF32" in str(input_precision):
        product = np.matmul(_truncated(left), _truncated(right))
    return TensorHandle(product + d.data, d.dtype.scalar)


def _wide(x: Any) -> np.ndarray:
    """Return the numbers of a factor. The interpreter keeps bfloat16 as the high halves of float32."""
    from triton.language import bfloat16

    if x.dtype.scalar == bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return float32 rounded to 10 bits of mantissa, as by cvt.rna.tf32."""
    return _truncated((x.view(np.uint32) + np.uint32(1 << 12)).view(np.float32))


def _truncated(x: np.ndarray) -> np.ndarray:
    """Return float32 truncated to the 10 bits of mantissa that a tensor core reads."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _narrowed(self: Any, x: Any, to: Any) -> Any:
    """Convert floating-point numbers, from float32 to the nearest bfloat16; the interpreter truncates."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    if (x.dtype.scalar, to.scalar) != (float32, bfloat16):
        return self.cast_impl(x, to)
    bits = np.ascontiguousarray(x.data).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return TensorHandle(np.where(np.isnan(x.data), bits >> 16, nearest).astype(np.uint16), bfloat16)


def _inline_assembly(self: Any, assembly: str, _constraints: str, values: list[Any], *_: Any) -> Any:
    """Execute the one assembly instruction that kernels use; the interpreter supports none."""
    from triton.runtime.interpreter import TensorHandle

    assert assembly == "cvt.rna.tf32.f32 $0, $1;"
    return _Results([TensorHandle(_rounded(np.ascontiguousarray(values[0].data)), values[0].dtype)])


@cache
def _builtins(package: Any) -> list[str]:
    """Return the names of the builtins of a package or class, which must not be patched yet."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """Patch the builtins that are not yet patched. The interpreter's own function looks at all members in each call of
    a device function, which takes a third of the time."""
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    for name in _builtins(package):
        member = getattr(package, name)
        if is_builtin(member):
            _patch_attr(package, name, member, builder, scope)


class _Results(list):
    def get_result(self, i: int) -> Any:
        return self[i]


@pytest.fixture(autouse=True, scope="session")
def _as_the_card_does() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_as_the_card_does(patch)
        yield


def interpret_as_the_card_does(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder, ScanOps

    patch.setattr("triton.runtime.interpreter._patch_builtin", _patch_builtins)
    patch.setattr(ScanOps, "generic_scan", _scan)
    patch.setattr(InterpreterBuilder, "create_dot", _dot)
    patch.setattr(InterpreterBuilder, "create_fp_trunc", _narrowed)
    patch.setattr(InterpreterBuilder, "create_inline_asm", _inline_assembly)


def read_interpreted(variant: str, text: Any, checkpointing: str, layers: int) -> dict[str, Any]:
    """Read a text in a process of a context group, with interpreted kernels; see ``test_context.py``."""
    from support.context_cases import read_on_kernels

    with pytest.MonkeyPatch.context() as patch:
        interpret_as_the_card_does(patch)
        return read_on_kernels(variant, text, checkpointing, "triton", layers)
