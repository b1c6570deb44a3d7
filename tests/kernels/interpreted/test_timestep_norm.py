"""The timestep norm's kernels satisfy the laws with tiles of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.agreement import in_float32, is_well_registered, laws_over, normal
from support import cases, laws
from support.cases import Case

from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm
from gecko.ops.timestep_norm import triton as kernels
from gecko.segments import Segments

BETAS = (0.999, 0.9999)


def _kernel_form(operator: cases.Operator, betas: tuple[float, float] | None) -> cases.Operator:
    def fast(parameters, inputs, state, segments):
        state = operator.empty(segments.batch, torch.float32) if state is None else state
        return kernels.timestep_norm_triton(inputs[0], *parameters, Statistics(2, betas, 1e-3), state, segments)

    return replace(operator, fast=fast)


DECAY, FAST_DECAY, CUMULATIVE = (
    _kernel_form(operator, betas)
    for operator, betas in zip(cases.TIMESTEP_NORMS, (BETAS, (0.7, 0.9), None), strict=True)
)


@pytest.fixture
def small_tiles(monkeypatch):
    """Set small tiles: texts of many tiles, carries of many blocks, groups that do not fill a tile."""
    sizes = kernels._sizes
    monkeypatch.setattr(kernels, "_sizes", lambda *shape: {**sizes(*shape), "span": 2, "spans": 2, "together": 4})
    monkeypatch.setattr(kernels, "_tiles_in_block", lambda together: 4)


CASES = in_float32(
    Case(9, "packed"), Case(50, "edges"), Case(40, "packed", (23, 16)), Case(40, "one", (13,)),
    Case(40, "singles", (13,)), Case(50, "packed", (0, 3, 19, 16), batch=4),
    Case(1, "packed", (15, 16, 23, 24), batch=4),
)  # fmt: skip
PARTED = {"B4-T50-packed-after0+3+19+16-float32", "B2-T50-edges-float32"}
"""Cases that are also cut at every place, which takes the interpreter as long as all other laws. Their rows have
different positions, and documents start at the borders of tiles."""


@pytest.mark.parametrize(("law", "case"), laws_over(CASES, PARTED))
@pytest.mark.parametrize("operator", [FAST_DECAY, CUMULATIVE], ids=str)
def test_timestep_norm_of_many_tiles(operator, law, case, small_tiles):
    law(operator, case)


AS_LAUNCHED = in_float32(Case(1, "one", (0, 7)), Case(3, "packed", (5,)), Case(200, "packed", (21, 0)))


@pytest.mark.parametrize("case", AS_LAUNCHED, ids=str)
@pytest.mark.parametrize("operator", [DECAY, CUMULATIVE], ids=str)
def test_timestep_norm_in_tiles_as_launched(operator, case):
    laws.fast_is_reference(operator, case)


def _normalise(x, weight, statistics, dtype=None):
    """Return the kernels' result for one text from its start."""
    state, segments = TimestepNormState.empty(1, statistics.groups), Segments.build(*x.shape[:2])
    return kernels.timestep_norm_triton(x, weight, weight, statistics, state, segments, dtype)


@pytest.mark.parametrize("betas", [BETAS, None])
def test_statistics_survive_a_large_offset(betas, small_tiles):
    x, statistics = (100 + normal(1, 30, 12)).detach(), Statistics(3, betas, 1e-5)
    y, _ = _normalise(x, None, statistics)
    exact, _ = timestep_norm(x.double(), None, None, statistics)
    assert (y - exact).abs().max() < 2e-3 * exact.abs().max()


@pytest.mark.parametrize("betas", [BETAS, None])
def test_sixteen_bit_activations_keep_float32_statistics(betas):
    x, weight = normal(1, 6, 12, dtype=torch.bfloat16).detach(), normal(12).detach()
    statistics = Statistics(3, betas, 1e-5)
    y, after = _normalise(x, weight, statistics)
    exact, expected = timestep_norm(x.double(), weight.double(), weight.double(), statistics)
    assert y.dtype == torch.bfloat16
    wide, same = _normalise(x.float(), weight, statistics, torch.bfloat16)
    assert y.equal(wide) and after.variance.equal(same.variance)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(after.variance.double(), expected.variance, rtol=1e-5, atol=1e-7)


def test_counts_near_one_keep_their_digits():
    """1 − β₂ⁿ at n = 1 is 1e-4. Computed as 1 − exp in float32 it would have three correct digits."""
    x = normal(1, 1, 64).detach()
    y, _ = _normalise(x, None, Statistics(1, BETAS, 0.0))
    torch.testing.assert_close(y, (x - x.mean()) / x.std(correction=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("betas", [list(BETAS), None])
def test_timestep_norm_is_well_registered(betas, small_tiles):
    count, begins = torch.tensor([3, 0]), torch.tensor([[-1, -1, 2, 2, 2, 5, 5]] * 2, dtype=torch.int32)
    mean, variance = normal(2, 3), normal(2, 3, seed=1).detach().abs().requires_grad_()
    given = normal(2, 7, 6), normal(6), normal(6, seed=1), count, mean, variance, begins
    is_well_registered(kernels._timestep_norm, *given, 3, betas, 1e-5, torch.bfloat16)
