"""The C kernels of the working memory satisfy the laws, at sizes that cross all their borders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import laws
from support.cases import CHUNK
from support.native_agreement import needs_compiler, on_two_threads
from torch import Tensor

from gecko.ops.working_memory import WorkingMemoryState, working_memory
from gecko.ops.working_memory import cpu as native
from gecko.segments import Segments

pytestmark = needs_compiler


SHAPES = {
    "tiles": (2, 2, 450, 32, 80, 150),  # chunks of more than two tiles of tokens, columns of more than one block
    "chunks": (3, 1, 310, 16, 144, 10),
    "one-chunk": (1, 2, 90, 48, 16, 100),
    "wide": (1, 1, 300, 112, 208, 70),
    "single-tokens": (2, 1, 7, 16, 32, 1),
    "many-streams": (9, 3, 20, 16, 16, 4),
}
"""Rows, heads, tokens, key dimension, value dimension, chunk size."""
CALLS = [(shape, before, documents) for shape in SHAPES for before, documents in ((0, True), (37, False), (37, True))]


def _read(
    shape: tuple[int, ...], dtype: torch.dtype, documents: bool, before: int, terms: tuple[str, ...] | None
) -> dict[str, Tensor]:
    """Return output and state of a call after ``before`` tokens, and the gradients of ``terms`` (None: of all)."""
    batch, heads, length, keys, values, chunk = shape
    generator = torch.Generator().manual_seed(3)

    def inputs(tokens: int) -> dict[str, Tensor]:
        drawn = {
            n: torch.randn(batch, heads, tokens, d, generator=generator) for n, d in zip("qkv", sizes, strict=True)
        }
        return {name: x.to(dtype).requires_grad_() for name, x in drawn.items()}

    sizes = (keys, keys, values)
    ids = torch.rand(batch, before + length, generator=generator).lt(3 / length if documents else 0).long().cumsum(1)
    clock, state, leaves = None, None, inputs(length)
    earlier = inputs(before)
    if before:
        segments = Segments.build(batch, before, segment_ids=ids[:, :before])
        _, state = working_memory(*earlier.values(), chunk, segments=segments)
        clock = segments.end
    segments = Segments.build(batch, length, segment_ids=ids[:, before:], clock=clock)
    out, state = working_memory(*leaves.values(), chunk, state=state, segments=segments)
    found = {"output": out, **{name: x for name, x in state.tensors().items() if x.is_floating_point()}}
    leaves |= {f"earlier {name}": x for name, x in earlier.items()} if before else {}
    weighed = [(x, laws.random_like(x, generator)) for n, x in found.items() if terms is None or n in terms]
    total = sum((x * w).sum() for x, w in weighed if x.requires_grad)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    named = zip(leaves, gradients, strict=True)
    return {n: x.detach() for n, x in found.items()} | {f"gradient by {n}": x for n, x in named}


@pytest.mark.parametrize(("shape", "before", "documents"), CALLS)
@pytest.mark.parametrize("terms", [("output",), ("memory",), None], ids=["output", "memory", "all"])
def test_native_memory_is_the_eager_one(shape, before, documents, terms):
    """With the same bits on any number of threads."""

    def read(dtype: torch.dtype) -> dict[str, Tensor]:
        return _read(SHAPES[shape], dtype, documents, before, terms)

    found = read(torch.float32)
    laws.assert_same(found, read(torch.float64), 1e-5)
    if terms is None:
        again = on_two_threads(lambda: read(torch.float32))
        assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize(
    ("taken", "keys", "values", "rule", "dtype"),
    [
        (True, 16, 48, "adaptive", torch.float32),
        (True, 32, 16, "adaptive", torch.bfloat16),
        (False, 16, 48, "linear", torch.float32),
        (False, 16, 48, "adaptive", torch.float64),
        (False, 16, 40, "adaptive", torch.float32),
        (False, 24, 48, "adaptive", torch.float32),
    ],
)
def test_native_memory_is_taken(monkeypatch, taken, keys, values, rule, dtype):
    called = []
    monkeypatch.setattr(native, "call", lambda name, *_: called.append(name))
    q, k, v = (torch.zeros(1, 1, 20, d, dtype=dtype) for d in (keys, keys, values))
    working_memory(q, k, v, CHUNK, rule=rule)
    assert called == ["working_memory_" + name for name in ("summarise", "chain", "read") if taken]


def test_native_memory_leaves_the_state_it_was_given():
    q, k, v = (torch.randn(2, 1, 20, d, generator=torch.Generator().manual_seed(1)) for d in (16, 16, 32))
    segments = Segments.build(2, 20)
    _, state = working_memory(q, k, v, CHUNK, segments=segments)
    copies = state.map(torch.clone)
    _, after = working_memory(
        q[:, :, :3], k[:, :, :3], v[:, :, :3], CHUNK, state=state, segments=Segments.build(2, 3, clock=segments.end)
    )
    assert all(torch.equal(x, y) for x, y in zip(state.tensors().values(), copies.tensors().values(), strict=True))
    places = [x.data_ptr() for one in (state, after) for x in one.tensors().values()]
    assert len(set(places)) == len(places)


def test_native_memory_is_the_eager_one_where_nothing_has_been_read():
    """For two empty sums, rho is 1 and each sum gets half of the gradient."""
    read = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(4)
        inputs = [torch.randn(2, 1, CHUNK, d, generator=generator).to(dtype) for d in (16, 16, 32)]
        state = WorkingMemoryState.empty("adaptive", 2, 1, 16, 32, dtype)
        state = replace(state, memory=torch.randn(2, 1, 16, 32, generator=generator).to(dtype))
        leaves = {n: x.requires_grad_() for n, x in state.tensors().items() if x.is_floating_point()}
        _, after = working_memory(*inputs, CHUNK, state=state)
        terms = [laws.random_like(x, generator).mul(x).sum() for x in (after.memory, after.normaliser)]
        gradients = torch.autograd.grad(sum(terms), list(leaves.values()), allow_unused=True, materialize_grads=True)
        named = zip(leaves, gradients, strict=True)
        read[dtype] = {"memory": after.memory.detach(), **{f"gradient by {name}": x for name, x in named}}
    laws.assert_same(read[torch.float32], read[torch.float64], 1e-5)
