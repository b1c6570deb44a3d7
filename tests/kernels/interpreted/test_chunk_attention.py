"""Chunk attention's kernels satisfy the laws, for values that fit a tile and for wide ones."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import distance, in_float32, is_well_registered, normal
from support import cases, laws
from support.cases import CHUNK, Case

from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention_reference, triton_narrow, triton_wide
from gecko.ops.chunk_attention import triton as kernels
from gecko.ops.chunk_attention.triton_layout import lay, rotary_table
from gecko.segments import Segments

pytestmark = pytest.mark.usefixtures("on_kernels")

SINGLE = in_float32(
    Case(2, "packed"), Case(50, "edges"), Case(30, "one", (5, 22)), Case(12, "first", (17, 17)),
    Case(50, "packed", (0, 3, 19, 16), batch=4),
)  # fmt: skip
ONE = in_float32(Case(20, "packed", (21,)))
PATTERNS = [operator for operator in cases.ATTENTIONS if operator.name.endswith("rope2")]


@pytest.fixture(params=["narrow", "wide"])
def form(request, monkeypatch):
    """Set small limits, so that wide values are computed in bands of rows and pieces of few blocks."""
    monkeypatch.setattr(kernels, "_is_narrow", lambda v: request.param == "narrow")
    monkeypatch.setattr(triton_wide, "_LEAST_BAND", 3)
    monkeypatch.setattr(triton_wide, "_SCRATCH", 3 * 2 * CHUNK**2 * 4)


@pytest.mark.parametrize("case", SINGLE, ids=str)
@pytest.mark.parametrize("operator", PATTERNS, ids=str)
def test_chunk_attention(operator, case, form):
    laws.fast_is_reference(operator, case)


@pytest.mark.parametrize("operator", cases.ATTENTIONS, ids=str)
def test_chunk_attention_with_fewer_rotated_heads(operator, form):
    laws.fast_is_reference(operator, ONE[0])


@pytest.mark.parametrize(("law", "case"), laws.over(ONE)[1:])
@pytest.mark.parametrize("operator", PATTERNS, ids=str)
def test_chunk_attention_in_parts(operator, law, case, form):
    law(operator, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sliding_chunk", "chunk", "sliding_window"])
def test_chunks_of_many_tiles(attention, dtype, form, monkeypatch):
    """Tiles of 16: several tiles of queries and keys per chunk, the last of them partial."""
    for module in (triton_narrow, triton_wide):
        small = dict.fromkeys(("block_q", "block_k"), 16)
        monkeypatch.setattr(module, "_tiles", lambda *x, tiles=module._tiles, small=small, **y: tiles(*x, **y) | small)
    monkeypatch.setattr(triton_wide, "_LEAST_BAND", 16)
    pattern, length = Pattern(40, attention, 100.0, 1), 130
    inputs = [normal(1, 2, length, width, seed=i, dtype=dtype) for i, width in enumerate((18, 18, 35))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    segments = Segments.build(1, length, segment_ids=(torch.arange(length) >= 57).long().unsqueeze(0))
    empty = [AttentionState.empty(1, 2, 40, 18, 35, x.dtype) for x in (inputs[0], exact[0])]
    out, _, state = kernels.chunk_attention_triton(pattern, tuple(inputs), empty[0], segments)
    wanted, after = chunk_attention_reference(tuple(exact), pattern, empty[1], segments)
    weights = normal(*wanted.shape, seed=9).detach()
    found = torch.autograd.grad(out, inputs, weights.to(dtype))
    gradients = torch.autograd.grad(wanted, exact, weights.double())
    exact_results = wanted, after.keys, after.values, *gradients
    for got, true in zip((out, state.keys, state.values, *found), exact_results, strict=True):
        assert distance(got, true) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert out.dtype == state.values.dtype == dtype
    assert state.keys.dtype == torch.float32


def test_huge_scores_give_finite_gradients(form):
    q, k, v = (normal(1, 2, 20, 4, seed=i) for i in range(3))
    state = AttentionState.empty(1, 2, CHUNK, 4, 4)
    out, _, _ = kernels.chunk_attention_triton(PATTERN, (1e3 * q, 1e3 * k, v), state, Segments.build(1, 20))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


PATTERN = Pattern(CHUNK, "sliding_chunk", 100.0, 1)


@pytest.mark.parametrize("queries", ["far", "near", "none"])
def test_laying_is_well_registered(queries):
    offset, shift = torch.tensor([11, 8]), torch.tensor([8, 0])
    table = rotary_table(CHUNK, PATTERN.frequencies(4), torch.device("cpu"))
    x, ring, q = normal(2, 2, 9, 4), normal(2, 2, 2 * CHUNK, 4, seed=1), normal(2, 2, 9, 4, seed=2)
    given = x, None if queries == "none" else q, None if queries == "near" else ring, table, offset, shift
    is_well_registered(lay, *given, 24, False, CHUNK, 1, CHUNK, queries == "far", torch.float16)


def test_attention_is_well_registered(form):
    q, far, k, v = (normal(4, 2 * CHUNK, 4, seed=i) for i in range(4))
    first = torch.arange(2 * CHUNK, dtype=torch.int32).sub(5).clamp(min=0).expand(2, -1).contiguous()
    is_well_registered(kernels.attend_grid, q, far, k, v, first, 2, CHUNK)
