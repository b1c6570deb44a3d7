"""The measured resources of kernels are those of the compiler, and exceeding any limit fails."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from kernels import compiling
from kernels.compiling import CAPABILITIES, Resources, check, resources
from kernels.recording import Configuration, recorded
from triton.compiler.errors import CompilationError

from gecko.ops.backends.dispatch import Launch


@triton.jit(do_not_specialize=["length"])
def _product(p_x, p_y, length, rows: tl.constexpr, inner: tl.constexpr):
    i_row = tl.arange(0, rows)[:, None]
    i_inner = tl.arange(0, inner)
    b_x = tl.load(p_x + i_row * length + i_inner[None, :])
    tl.store(p_y + i_row * rows + tl.arange(0, rows)[None, :], tl.dot(b_x, tl.trans(b_x), input_precision="ieee"))


def _launch(rows: int, inner: int, warps: int, dtype: torch.dtype = torch.float32) -> Launch:
    x, y = torch.empty(rows, inner, dtype=dtype), torch.empty(rows, rows)
    return Launch(_product, (1,), {"p_x": x, "p_y": y, "length": inner, "rows": rows, "inner": inner}, warps)


def _configuration(*shape: int, dtype: torch.dtype = torch.float32) -> Configuration:
    launch = _launch(*shape, dtype)
    (found,) = recorded(lambda: launch.run())
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_resources(capability):
    found = check(_configuration(32, 32, 4), capability, registers=128)
    assert 16 <= found.registers <= 128
    assert found.spilled_bytes == 0
    assert found.shared_bytes >= 32 * 32 * 4


def test_a_configuration_has_the_types_and_alignment_of_its_launch():
    found = _configuration(64, 64, 4, dtype=torch.bfloat16)
    names = {"p_x": "*bf16", "p_y": "*fp32", "length": "i32", "rows": "constexpr", "inner": "constexpr"}
    assert dict(found.signature) == names
    assert dict(found.constants) == {(3,): 64, (4,): 64}
    aligned = {place for place, facts in found.attributes if ("tt.divisibility", 16) in facts}
    assert aligned == {(0,), (1,)}


def test_launches_are_recorded_and_not_run():
    launch = _launch(32, 32, 4)
    before = launch.arguments["p_y"].fill_(3.0).clone()
    assert recorded(lambda: [launch.run(), launch.run()]) == [Configuration.of(launch)]
    assert launch.arguments["p_y"].equal(before)


def test_a_launch_that_does_not_compile_fails():
    """Pass None for a pointer that the kernel reads: the launch itself is compiled, not a description of it."""
    launch = _launch(32, 32, 4)
    missing = Launch(launch.kernel, launch.grid, {**launch.arguments, "p_x": None}, launch.warps)
    (found,) = recorded(lambda: missing.run())
    with pytest.raises(CompilationError):
        resources(found, 90)


def test_spills_fail():
    with pytest.raises(pytest.fail.Exception, match=r"_product with 1 warps.* for sm_80: .* [1-9]\d* bytes spilled"):
        check(_configuration(128, 32, 1, dtype=torch.bfloat16), 80, registers=255)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_limit_is_one_that_fails(capability, monkeypatch):
    limit = compiling.SHARED_LIMIT[capability]
    for within, warps, found in (
        (True, 4, Resources(100, 0, limit)),
        (True, 16, Resources(128, 0, limit)),
        (False, 4, Resources(129, 0, limit)),
        (False, 4, Resources(100, 4, limit)),
        (False, 4, Resources(100, 0, limit + 1)),
        (False, 32, Resources(100, 0, limit)),
    ):
        monkeypatch.setattr(compiling, "resources", lambda *_, found=found: found)
        with nullcontext() if within else pytest.raises(pytest.fail.Exception, match=str(found.registers)):
            check(_configuration(32, 32, warps), capability, registers=128)
