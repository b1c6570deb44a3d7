"""Chunk attention satisfies the laws in its three patterns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases, laws

from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.segments import Segments

C = cases.CHUNK
ALL_HEADS = [operator for operator in cases.ATTENTIONS if operator.name.endswith("rope2")]
OTHERS = [operator for operator in cases.ATTENTIONS if operator not in ALL_HEADS]


@pytest.mark.parametrize(("law", "case"), laws.over(cases.COMMON))
@pytest.mark.parametrize("operator", ALL_HEADS, ids=str)
def test_chunk_attention(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize(("law", "case"), laws.over(cases.ONE_CONFIGURATION))
@pytest.mark.parametrize("operator", OTHERS, ids=str)
def test_chunk_attention_with_fewer_rotated_heads(operator, law, case):
    law(operator, case)


@settings(max_examples=30)
@given(operator=st.sampled_from(cases.ATTENTIONS), case=cases.anything)
def test_chunk_attention_anywhere(operator, case):
    laws.check_all(operator, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
@pytest.mark.parametrize("operator", ALL_HEADS, ids=str)
def test_chunk_attention_gradients_are_numerical(operator, case):
    laws.gradients_are_numerical(operator, case)


def _inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, 2, length, d, generator=generator, dtype=torch.float64) for d in (4, 4, 3)]


def _sees(attention: str, query: int, key: int) -> bool:
    if key > query:
        return False
    match attention:
        case "sliding_chunk":
            return query // C - key // C <= 1
        case "chunk":
            return query // C == key // C
        case _:
            return query - key < C


@pytest.mark.parametrize("attention", ["sliding_chunk", "chunk", "sliding_window"])
def test_sinks_are_as_near_at_any_position(attention):
    """Of equal chunks, all from the third on have equal outputs: the sinks do not move away from the window."""
    q, k, v = (x.repeat(1, 1, 30, 1) for x in _inputs(C))
    out, _ = chunk_attention(q, k, v, Pattern(C, attention, 100.0, sinks=2))
    chunks = out.unflatten(2, (30, C))[:, :, 2:]
    torch.testing.assert_close(chunks, chunks[:, :, :1].expand_as(chunks))


@pytest.mark.parametrize("attention", ["sliding_chunk", "chunk", "sliding_window"])
def test_chunk_attention_is_dense_attention_with_absolute_rotation(attention):
    """Rotation by local position gives the scores of rotation by absolute position."""
    q, k, v = _inputs(37)
    position = torch.arange(37)
    turn = torch.exp(1j * position[:, None] * 500_000.0 ** -(torch.arange(0, 4, 2) / 4).double())

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    mask = torch.tensor([[_sees(attention, query, key) for key in range(37)] for query in range(37)])
    scores = (rotated(q) @ rotated(k).mT).masked_fill(~mask, -torch.inf)
    out, _ = chunk_attention(q, k, v, Pattern(C, attention))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("attention", ["sliding_chunk", "chunk", "sliding_window"])
def test_chunks_as_large_as_in_practice(attention):
    """Sizes for which everything that is computed in pieces takes several pieces, forward and backward."""
    chunk, length = 512, 2100
    generator = torch.Generator().manual_seed(10)
    q, k, v = (torch.randn(2, 1, length, 2, generator=generator).double().requires_grad_() for _ in range(3))
    ids = (torch.arange(length) >= torch.tensor([[0], [700]])).long()
    segments = Segments.build(2, length, segment_ids=ids)
    out, _ = chunk_attention(q, k, v, Pattern(chunk, attention, rope_heads=0), segments=segments)

    query, key = torch.arange(length)[:, None], torch.arange(length)
    lag = query // chunk - key // chunk
    near = {"sliding_chunk": lag <= 1, "chunk": lag == 0, "sliding_window": query - key < chunk}[attention]
    mask = (near & (key <= query)) & (ids[:, :, None] == ids[:, None])
    expected = (q @ k.mT).masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v
    weights = torch.randn(out.shape, generator=generator).double()
    found, wanted = (torch.autograd.grad(x, (q, k, v), weights) for x in (out, expected))
    torch.testing.assert_close(out, expected)
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_query_does_not_see_cannot_reach_it(chunk, dtype):
    """Not even as 0 · NaN, from the chunk before."""
    q, k, v = torch.randn(3, 1, 2, 4 * chunk, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)
    v[:, :, :chunk] = torch.nan
    out, _ = chunk_attention(q, k, v, Pattern(chunk, "chunk", rope_heads=0))
    assert out[:, :, chunk:].isfinite().all() and out[:, :, 0].isnan().all()


def test_attention_gives_finite_gradients_for_huge_scores():
    q, k, v = (x.float().requires_grad_() for x in _inputs(20))
    out, _ = chunk_attention(1e3 * q, 1e3 * k, v, Pattern(C))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("length", [1, 5])
def test_sixteen_bit_values_use_float32_scores(length):
    q, k, v = _inputs(length)
    out, state = chunk_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Pattern(C))
    exact, _ = chunk_attention(q.bfloat16().double(), k.bfloat16().double(), v.bfloat16().double(), Pattern(C))
    assert out.dtype == state.values.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() < 0.05
