"""The C kernels of the timestep norm equal the eager form at sizes around their blocks, with any number of threads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.laws import assert_same
from support.native_agreement import needs_compiler, on_two_threads, turned
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


def _inputs(size: Size) -> tuple[dict[str, Tensor], Tensor, Segments]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    features, series = size.groups * size.width, (size.batch, size.groups)
    leaves = {"x": draw(size.batch, size.length, features) + 3 * draw(size.batch, 1, features)}
    if size.affine:
        leaves |= {"weight": draw(features), "bias": draw(features)}
    begun = 1.0 if size.betas is None else 1 - torch.tensor(size.betas[1]).double().pow(size.count).item()
    leaves |= {"mean": begun * draw(*series), "variance": begun * (0.5 + draw(*series).square())}
    count = torch.full((size.batch,), size.count) - torch.arange(size.batch) % (1 + min(size.count, 3))
    starts = torch.rand(size.batch, size.length, generator=generator) < size.documents
    segments = Segments.build(
        size.batch, size.length, segment_ids=starts.long().cumsum(1), clock=Clock.start(size.batch)
    )
    return leaves, count, segments


def _read(size: Size, dtype: torch.dtype, laid: bool = False) -> dict[str, Tensor]:
    floats, count, segments = _inputs(size)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in floats.items()}
    state = TimestepNormState(count, leaves["mean"], leaves["variance"])
    y, after = timestep_norm(
        leaves["x"], leaves.get("weight"), leaves.get("bias"), Statistics(size.groups, size.betas, 1e-3), state,
        segments=segments,
    )  # fmt: skip
    outputs = {"y": y, "mean after": after.mean, "variance after": after.variance}
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(t.shape, generator=generator).to(dtype) for t in outputs.values()]
    if laid:
        weights = [turned(w) for w in weights]
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
    gradients = {f"gradient of {name}": t for name, t in zip(leaves, found, strict=True)}
    return {**{name: t.detach() for name, t in outputs.items()}, **gradients, "count": after.count}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_agree_with_the_eager_form(size):
    expected, found = _read(size, torch.float64), _read(size, torch.float32)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for name, t in found.items() if name != "count")
    assert_same(found, expected, 1e-5)


@pytest.mark.parametrize("size", SIZES[4:12], ids=str)
def test_threads_and_layout_change_no_bit(size):
    single = _read(size, torch.float32, laid=True)
    double = on_two_threads(lambda: _read(size, torch.float32))
    assert all(torch.equal(single[name], double[name]) for name in single)


@pytest.mark.parametrize("betas", [SLOW, None])
def test_float32_is_read_by_the_kernels(betas, monkeypatch):
    called = []
    monkeypatch.setattr(native, "call", lambda name, *arguments: called.append(name))
    _read(Size(2, 3, 2, 4, betas), torch.float64)
    assert called == []
    _read(Size(2, 3, 2, 4, betas), torch.float32)
    assert called == ["timestep_norm_forward", "timestep_norm_backward"]


def test_the_state_before_is_left_alone():
    state = TimestepNormState(torch.tensor([3]), torch.ones(1, 2), torch.ones(1, 2))
    kept = state.map(torch.clone)
    _, after = timestep_norm(torch.randn(1, 5, 8), None, None, Statistics(2, SLOW, 1e-3), state)
    for name, t in state.tensors().items():
        assert torch.equal(t, kept.tensors()[name])
        assert t.data_ptr() != after.tensors()[name].data_ptr()
