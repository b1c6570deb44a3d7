"""Kernels are tested on poisoned memory only, with products as rough as the card's, and scans that one can wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="module")
def _poisoned(poisoned: None) -> None:
    pass


def _scan(self: Any, inputs: Any) -> list[Any]:
    """The interpreter's own combines number by number; this one whole slices across the axis, in the same order."""
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
    """The interpreter's own ignores ``input_precision``; this one rounds float32 factors as tensor cores do."""
    from triton.runtime.interpreter import TensorHandle

    total = d.data.dtype
    left, right = a.data, b.data
    product = np.matmul(left, right, dtype=total)
    if left.dtype == np.float32 and "TF32" in str(input_precision):
        high, low = _tf32(left), _tf32(left - _tf32(left))
        product = np.matmul(high, _tf32(right))
        if "TF32x3" in str(input_precision):
            product += np.matmul(low, _tf32(right)) + np.matmul(high, _tf32(right - _tf32(right)))
    return TensorHandle(product + d.data, d.dtype.scalar)


def _tf32(x: np.ndarray) -> np.ndarray:
    """float32 rounded to 10 bits of mantissa."""
    return ((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.fixture(autouse=True, scope="session")
def _as_the_card_does() -> Iterator[None]:
    from triton.runtime.interpreter import InterpreterBuilder, ScanOps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScanOps, "generic_scan", _scan)
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield
