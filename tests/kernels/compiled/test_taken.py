"""Operators use their kernels for tensors on a GPU in 16 and 32 bits, and their eager forms for others.

The tensors are fake: they have shapes and dtypes, and their device need not exist.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.norms import group_layer_norm, group_rms_norm, norm_of_sum
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import Statistics, timestep_norm

Empty = Callable[..., Tensor]

CALLS: dict[str, Callable[[Empty], Tensor]] = {
    "timestep_norm": lambda e: timestep_norm(e(2, 70, 12), e(12), e(12), Statistics(3, (0.9, 0.99), 1e-5))[0],
    "group_norm": lambda e: group_rms_norm(e(2, 5, 12), e(12), 3, 1e-5),
    "group_norm centered": lambda e: group_layer_norm(e(2, 5, 12), e(12), e(12), 3, 1e-5),
    "group_norm of a sum": lambda e: norm_of_sum((e(2, 5, 12),) * 3, e(12), None, 3, 1e-5, False, e(1).dtype)[0],
    "qk_scale_shift": lambda e: qk_scale_shift(e(2, 5, 12), e(4, 12), e(4, 12), 3, 1e-5)[0],
    "silu_by_head": lambda e: silu_by_head(e(2, 5, 12), 3),
    "gated": lambda e: gated(e(2, 3, 5, 4), e(2, 5, 12), e(2, 3, 5, 4)),
    "swiglu": lambda e: swiglu(e(3, 4), e(3, 4)),
}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gecko":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def _called(call: Callable[[Empty], Tensor], device: str, dtype: torch.dtype) -> tuple[list[str], Tensor]:
    with FakeTensorMode(), torch.no_grad(), Recorder() as recorder:
        y = call(lambda *shape: torch.empty(shape, dtype=dtype, device=device))
    return recorder.names, y


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_take_kernels_on_a_gpu(name, dtype):
    names, y = _called(CALLS[name], "cuda:0", dtype)
    expected_names, expected = _called(CALLS[name], "cpu", dtype)
    assert names == [name.split()[0]]
    assert expected_names == []
    assert (y.shape, y.dtype, y.device.type) == (expected.shape, expected.dtype, "cuda")


def test_wide_numbers_take_the_eager_form_there():
    assert _called(CALLS["swiglu"], "cuda:0", torch.float64)[0] == []
