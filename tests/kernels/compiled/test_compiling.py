"""The numbers by which kernels are judged are the compiler's, and each limit is one that fails."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from kernels import compiling
from kernels.compiling import CAPABILITIES, Resources, check, launches, resources, resources_of

from gecko.ops.kernels import Launch


@triton.jit(do_not_specialize=["length"])
def _product(p_x, p_y, length, rows: tl.constexpr, inner: tl.constexpr):
    i_row = tl.arange(0, rows)[:, None]
    i_inner = tl.arange(0, inner)
    b_x = tl.load(p_x + i_row * length + i_inner[None, :])
    tl.store(p_y + i_row * rows + tl.arange(0, rows)[None, :], tl.dot(b_x, tl.trans(b_x), input_precision="ieee"))


def _launch(rows: int, inner: int, warps: int, dtype: torch.dtype = torch.float32) -> Launch:
    x = torch.empty(rows, inner, dtype=dtype, device="meta")
    y = torch.empty(rows, rows, device="meta")
    return Launch(_product, (1,), {"p_x": x, "p_y": y, "length": inner, "rows": rows, "inner": inner}, warps)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_resources(capability):
    found = check(_launch(32, 32, 4), capability, registers=128)
    assert 16 <= found.registers <= 128
    assert found.spilled_bytes == 0
    assert found.shared_bytes >= 32 * 32 * 4


def test_a_launch_is_compiled_with_its_own_types_and_alignment():
    signature = {"p_x": "*bf16", "p_y": "*fp32", "length": "i32", "rows": "constexpr", "inner": "constexpr"}
    aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    constants = {"rows": 64, "inner": 64}
    given = resources(_product, signature, constants, 90, warps=4, stages=1, attributes=aligned)
    assert resources_of(_launch(64, 64, 4, torch.bfloat16), 90) == given


def test_spills_fail():
    with pytest.raises(pytest.fail.Exception, match=r"_product for sm_80 .* [1-9]\d* bytes spilled"):
        check(_launch(128, 32, 1, torch.bfloat16), 80, registers=255)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_limit_is_one_that_fails(capability, monkeypatch):
    limit = compiling.SHARED_LIMIT[capability]
    for within, found in (
        (True, Resources(100, 0, limit)),
        (False, Resources(101, 0, limit)),
        (False, Resources(100, 4, limit)),
        (False, Resources(100, 0, limit + 1)),
    ):
        monkeypatch.setattr(compiling, "resources_of", lambda *_, found=found: found)
        with nullcontext() if within else pytest.raises(pytest.fail.Exception, match=str(found.registers)):
            check(_launch(32, 32, 4), capability, registers=100)


def test_launches_are_recorded_and_not_run(monkeypatch):
    launch = _launch(32, 32, 4)
    assert launches(lambda: launch.run(), monkeypatch) == [launch]
