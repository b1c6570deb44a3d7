"""The working memory satisfies the laws with both rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases, laws

from gecko.ops.working_memory import working_memory
from gecko.segments import Segments

C = cases.CHUNK
ADAPTIVE, *OTHERS = cases.MEMORIES


@pytest.mark.parametrize(
    ("operator", "law", "case"),
    [
        *(pytest.param(ADAPTIVE, *x.values, id=f"{ADAPTIVE}-{x.id}") for x in laws.over(cases.COMMON)),
        *(pytest.param(o, *x.values, id=f"{o}-{x.id}") for o in OTHERS for x in laws.over(cases.ONE_CONFIGURATION)),
    ],
)
def test_working_memory(operator, law, case):
    law(operator, case)


@settings(max_examples=30)
@given(operator=st.sampled_from(cases.MEMORIES), case=cases.anything)
def test_working_memory_anywhere(operator, case):
    laws.check_all(operator, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
@pytest.mark.parametrize("operator", cases.MEMORIES, ids=str)
def test_working_memory_gradients_are_numerical(operator, case):
    laws.gradients_are_numerical(operator, case)


def _inputs(length: int, widths: tuple[int, ...] = (3, 3, 4)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(1, 2, length, d, generator=generator, dtype=torch.float64) for d in widths]


@pytest.mark.parametrize("rule", ["adaptive", "linear", "orthogonal"])
def test_only_the_last_document_of_a_chunk_enters(rule):
    """A document that starts inside a chunk is stored from its start on; earlier tokens of the chunk are not."""
    q, k, v = _inputs(45)
    v.requires_grad_()
    ids = (torch.arange(45) >= 11).long().unsqueeze(0)
    out, _ = working_memory(q, k, v, C, rule=rule, segments=Segments.build(1, 45, segment_ids=ids))
    (grad,) = torch.autograd.grad(out[:, :, 40:].sum(), v)
    assert (grad != 0).any(-1).all(1)[0].tolist() == [11 <= key < 32 for key in range(45)]


@pytest.mark.parametrize("rule", ["adaptive", "orthogonal"])
def test_adaptive_memories_are_the_equations(rule):
    """Compute chunk by chunk as in the paper, with the whole text in one document."""
    q, k, v = _inputs(5 * C)
    chunks = [x.unflatten(2, (-1, C)) for x in (q, k, v)]
    memory, log_z, outputs = torch.zeros(1, 2, 3, 4).double(), None, []
    for u in range(5):
        if u >= 2:
            key, value = chunks[1][:, :, u - 2], chunks[2][:, :, u - 2]
            log_w = key.logsumexp(2)
            log_z = log_w if log_z is None else torch.logaddexp(log_z, log_w)
            rho = (log_w - log_z).exp().unsqueeze(-1)
            known = key.softmax(-1) @ memory
            if rule == "orthogonal":
                unit = known / (known.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                known = (value * unit).mean(-1, keepdim=True) * unit
            written = key.softmax(2).mT @ (value - known)
            memory = (1 - rho) * memory + rho * written
        outputs.append(chunks[0][:, :, u].softmax(-1) @ memory)
    torch.testing.assert_close(working_memory(q, k, v, C, rule=rule)[0], torch.cat(outputs, dim=2))


def test_linear_memory_is_the_delta_rule():
    q, k, v = _inputs(5 * C)
    psi_q, psi_k = F.elu(q) + 1, F.elu(k) + 1
    memory, total, outputs = torch.zeros(1, 2, 3, 4).double(), torch.zeros(1, 2, 3, 1).double(), []
    for u in range(5):
        if u >= 2:
            key, value = (x.unflatten(2, (-1, C))[:, :, u - 2] for x in (psi_k, v))
            found = key @ memory / (key @ total) if u > 2 else 0
            memory, total = memory + key.mT @ (value - found), total + key.sum(2).unsqueeze(-1)
        query = psi_q.unflatten(2, (-1, C))[:, :, u]
        outputs.append(query @ memory / (query @ total) if u >= 2 else torch.zeros_like(query @ memory))
    out, _ = working_memory(q, k, v, C, rule="linear")
    torch.testing.assert_close(out, torch.cat(outputs, dim=2))


@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0])
@pytest.mark.parametrize("widths", [(3, 3, 4), (16, 16, 32)], ids=["eager", "C"])
def test_adaptive_memory_is_bounded_however_large_the_keys(widths, shift, packed):
    """Check gradients as well: values that a mask hides (padding, other documents) must not overflow."""
    q, k, v = (x.float().requires_grad_() for x in _inputs(61, widths))
    ids = (torch.arange(61) >= 13).long().unsqueeze(0) if packed else None
    out, state = working_memory(q, 200 * k + shift, v, C, segments=Segments.build(1, 61, segment_ids=ids))
    (out.sum() + sum(x.sum() for x in state.tensors().values() if x.is_floating_point())).backward()
    assert out.isfinite().all() and state.memory.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("length", [1, 20])
def test_sixteen_bit_activations_keep_a_float32_memory(length):
    q, k, v = (x.bfloat16() for x in _inputs(length))
    out, state = working_memory(q, k, v, C)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in state.tensors().values() if x.is_floating_point()} == {torch.float32}
