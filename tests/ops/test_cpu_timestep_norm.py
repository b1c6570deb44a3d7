"""The C kernels of the timestep norm equal the eager form at sizes around their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.native_agreement import Form, agree, calls, evaluate, needs_compiler, turned
from torch import Tensor

from gecko.ops import timestep_norm as native
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm
from gecko.segments import Clock, Segments

pytestmark = needs_compiler

SLOW, FAST, NONE, FORGETFUL = (0.999, 0.9999), (0.7, 0.9), None, (0.0, 0.5)


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    groups: int
    width: int
    betas: tuple[float, float] | None = SLOW
    documents: float = 0.0
    """Share of tokens that start a document."""
    count: int = 0
    affine: bool = True


SIZES = [
    Size(1, 2, 1, 1), Size(2, 3, 1, 15), Size(2, 15, 1, 16), Size(1, 16, 1, 17), Size(3, 17, 4, 32, count=5),
    Size(2, 40, 5, 40, FAST, documents=0.1, count=3), Size(2, 33, 15, 3, NONE, documents=0.1, count=3),
    Size(2, 33, 16, 16, documents=0.1), Size(3, 21, 17, 20, FAST), Size(2, 21, 35, 8, NONE, count=9),
    Size(70, 37, 2, 24, documents=0.05, count=2), Size(1, 1100, 3, 16, NONE), Size(1, 1025, 3, 16, count=4),
    Size(2, 50, 2, 16, FORGETFUL, documents=0.1, count=3), Size(2, 20, 3, 12, affine=False),
    Size(2, 40, 2, 16, documents=1.0, count=3), Size(2, 40, 2, 16, NONE, documents=1.0, count=3),
    Size(1, 60, 2, 12, count=2_000_000), Size(1, 60, 2, 12, NONE, count=2_000_000),
    Size(1, 3000, 1, 64, NONE, documents=0.001, count=9_000), Size(1, 20, 1, 1000),
]  # fmt: skip


def _norm(size: Size) -> tuple[Form, list[Tensor | None]]:
    """Return the norm as a function of x, mean, variance, weight and bias, and these."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    features, series = size.groups * size.width, (size.batch, size.groups)
    x = draw(size.batch, size.length, features) + 3 * draw(size.batch, 1, features)
    affine = [draw(features) if size.affine else None for _ in range(2)]
    begun = 1.0 if size.betas is None else 1 - torch.tensor(size.betas[1]).double().pow(size.count).item()
    mean, variance = begun * draw(*series), begun * (0.5 + draw(*series).square())
    count = torch.full((size.batch,), size.count) - torch.arange(size.batch) % (1 + min(size.count, 3))
    starts = torch.rand(size.batch, size.length, generator=generator) < size.documents
    ids, clock = starts.long().cumsum(1), Clock.start(size.batch)
    segments = Segments.build(size.batch, size.length, segment_ids=ids, clock=clock)
    counted = segments.steps_in_document[:, -1] + torch.where(segments.continues[:, -1], count, 0)

    def norm(x: Tensor, mean: Tensor, variance: Tensor, *affine: Tensor | None) -> tuple[Tensor, ...]:
        state = TimestepNormState(count, mean, variance)
        y, after = timestep_norm(x, *affine, Statistics(size.groups, size.betas, 1e-3), state, segments=segments)
        assert torch.equal(after.count, counted)
        return y, after.mean, after.variance

    return norm, [x, mean, variance, *affine]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_agree_with_the_eager_form(size):
    agree(*_norm(size))


@pytest.mark.parametrize("size", SIZES[4:12], ids=str)
def test_layout_changes_no_bit(size):
    norm, leaves = _norm(size)
    assert all(map(torch.equal, evaluate(norm, leaves, turned), evaluate(norm, leaves, Tensor.contiguous)))


@pytest.mark.parametrize("betas", [SLOW, None])
def test_float32_is_read_by_the_kernels(betas, monkeypatch):
    norm, leaves = _norm(Size(2, 3, 2, 4, betas))
    called = calls(monkeypatch, native)
    evaluate(norm, [x.double() for x in leaves], Tensor.contiguous)
    assert called == []
    evaluate(norm, leaves, Tensor.contiguous)
    assert called == ["timestep_norm_forward", "timestep_norm_backward"]


def test_the_state_before_is_left_alone():
    state = TimestepNormState(torch.tensor([3]), torch.ones(1, 2), torch.ones(1, 2))
    kept = state.map(torch.clone)
    _, after = timestep_norm(torch.randn(1, 5, 8), None, None, Statistics(2, SLOW, 1e-3), state)
    for name, t in state.tensors().items():
        assert torch.equal(t, kept.tensors()[name])
        assert t.data_ptr() != after.tensors()[name].data_ptr()
