"""The working memory's kernels satisfy the laws with both rules."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import distance, in_float32, is_well_registered, normal
from support import cases, laws
from support.cases import CHUNK, Case

from gecko.ops.working_memory import WorkingMemoryState, triton_chain
from gecko.ops.working_memory import triton as kernels
from gecko.ops.working_memory.chunked import enter_chunked
from gecko.ops.working_memory.rules import RULES
from gecko.segments import Segments

pytestmark = pytest.mark.usefixtures("on_kernels")

SINGLE = in_float32(
    Case(2, "packed"), Case(50, "edges"), Case(30, "one", (5, 22)), Case(12, "first", (17, 17)),
    Case(90, "packed", (21,)),
)  # fmt: skip
ONE = in_float32(Case(35, "packed", (21,)))
MEMORIES = cases.MEMORIES[:2]
"""The orthogonal rule has no kernels."""


def _read(enter, rule, chunk_size, inputs, ids=None):
    """Return outputs and state of a text, which ``enter`` reads from its start."""
    (batch, heads, length, key), value = inputs[0].shape, inputs[2].shape[3]
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    state = WorkingMemoryState.empty(rule, batch, heads, key, value, dtype)
    segments = Segments.build(batch, length, segment_ids=ids)
    return enter(RULES[rule], chunk_size, tuple(inputs), state, segments).read(state.memory)


def _after(tokens, length):
    """Return ids of two documents, the second of which starts after some tokens."""
    return (torch.arange(length) >= tokens).long().unsqueeze(0)


@pytest.mark.parametrize("case", SINGLE, ids=str)
@pytest.mark.parametrize("operator", MEMORIES, ids=str)
def test_working_memory(operator, case):
    laws.fast_is_reference(operator, case)


@pytest.mark.parametrize(("law", "case"), laws.over(ONE)[1:])
@pytest.mark.parametrize("operator", MEMORIES, ids=str)
def test_working_memory_in_parts(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adaptive", "linear"])
def test_memories_of_many_tiles(rule, dtype, monkeypatch):
    """Compare with the eager form in float64, with several tiles per chunk and per memory."""
    for name in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(triton_chain, name, {"block_r": 16, "block_s": 16})
    monkeypatch.setattr(kernels, "_TILE", 128)
    monkeypatch.setattr(triton_chain, "_TILE", 64)
    inputs = [normal(1, 2, 100, width, seed=i, dtype=dtype) for i, width in enumerate((18, 18, 35))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs = []
    for enter, x in ((kernels.enter_triton, inputs), (enter_chunked, exact)):
        out, state = _read(enter, rule, 20, x, _after(13, 100))
        weights = normal(*out.shape, seed=9).detach()
        outputs.append((out, state.memory, *torch.autograd.grad(out, x, weights.to(out.dtype))))
    for got, wanted in zip(*outputs, strict=True):
        assert distance(got, wanted) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert outputs[0][0].dtype == dtype
    assert outputs[0][1].dtype == torch.float32


def test_gradients_in_bfloat16_are_those_of_the_eager_form_up_to_rounding():
    """Differences from float64 are one rounding of a result, or twice those of the eager form of 16-bit inputs."""
    # If queries are large, few rows of a memory differ, and rounding is less of their gradient.
    factors = 32**-0.5, 1.0, 1.0
    inputs = [
        (factor * normal(1, 2, 96, width, seed=i)).bfloat16().detach().requires_grad_()
        for i, (factor, width) in enumerate(zip(factors, (32, 32, 64), strict=True))
    ]
    weights, found = normal(1, 2, 96, 64, seed=9).detach().bfloat16(), []
    forms = (enter_chunked, torch.float64), (enter_chunked, torch.float32), (kernels.enter_triton, torch.bfloat16)
    for enter, dtype in forms:
        leaves = [x.detach().to(dtype if dtype.itemsize == 8 else x.dtype).requires_grad_() for x in inputs]
        out, _ = _read(enter, "adaptive", 16, [x.to(dtype) for x in leaves])
        found.append(torch.autograd.grad(out.to(leaves[0].dtype), leaves, weights.to(leaves[0].dtype)))
    for exact, eager, own in zip(*found, strict=True):
        differences = [((x.double() - exact).norm() / exact.norm()).item() for x in (eager, own)]
        assert differences[1] < max(2**-8, 2 * differences[0])


@pytest.mark.parametrize(("shift", "packed"), [(-300.0, True), (300.0, False)])
def test_adaptive_memory_is_bounded_however_large_the_keys(shift, packed):
    """Check gradients as well: values that a mask hides (padding, other documents) must not overflow."""
    q, k, v = (normal(1, 2, 61, 3, seed=i) for i in range(3))
    ids = _after(13, 61) if packed else None
    out, state = _read(kernels.enter_triton, "adaptive", CHUNK, (q, 200 * k + shift, v), ids)
    (out.sum() + sum(x.sum() for x in state.tensors().values() if x.is_floating_point())).backward()
    assert out.isfinite().all() and state.memory.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("adaptive", [True, False])
def test_kernels_are_well_registered(adaptive):
    q, k, v = (normal(2, 2, 3, CHUNK, width, seed=i) for i, width in enumerate((3, 3, 4)))
    mask = torch.rand(2, 1, 3, CHUNK, 1, generator=torch.Generator().manual_seed(3)) < 0.7
    before = normal(2, 2, 3, 3, seed=6).detach() + 4
    is_well_registered(kernels.weigh, k, mask, adaptive)
    is_well_registered(kernels.summarise, k, v, mask, None if adaptive else before)
    of_chain = normal(4, 2, 3, 3), normal(4, 3, 4), normal(4, 3, 3, 4), normal(4, 2, 3), normal(4, 3, 4, seed=1)
    is_well_registered(kernels.read_memories, q, mask, None if adaptive else before, *of_chain, torch.float32)


@pytest.mark.parametrize(("steps", "reads"), [(0, 1), (2, 3), (3, 3)])
def test_chain_and_factors_are_well_registered(steps, reads):
    a, rho = normal(2, steps, 3, 3), normal(2, steps, 3)
    first, initial, b = normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(2, reads, 3, 4)
    is_well_registered(kernels.chain, a, first, b, rho, initial, torch.float32)
    is_well_registered(kernels.factors, *_of_summaries(reads), steps)


def _of_summaries(reads: int) -> tuple[torch.Tensor, ...]:
    """Return N_0, w_0, K_0, w, K and resets, for two rows of two heads; the first row has read nothing before."""
    shapes = (4, 3), (4, 3), (4, 3, 3), (4, reads, 3), (4, reads, 3, 3)
    given = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    with torch.no_grad():
        for x in given[:2]:
            x[:2] = -1e30
    return *given, torch.rand(2, reads + 1, generator=torch.Generator().manual_seed(1)) < 0.3


@pytest.mark.parametrize(("steps", "reads"), [(0, 1), (1, 1), (2, 3), (5, 5)])
def test_factors_are_those_of_their_equations(steps, reads):
    """Compare factors and all gradients with the eager chain of equations in float64."""
    *given, resets = _of_summaries(reads)
    exact = [x.detach().double().requires_grad_() for x in given]
    found, wanted = kernels.factors(*given, resets, steps)[:3], _factors(*exact, resets, steps)
    weights = [normal(*x.shape, seed=7).detach() for x in found]
    for leaves, outputs in ((given, found), (exact, wanted)):
        total = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
        leaves.extend(torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True))
    for got, expected in zip((*found, *given), (*wanted, *exact), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def _factors(normaliser, first_weight, first_keys, weights, keys, resets, steps):
    weights = torch.cat([first_weight.unsqueeze(1), weights], dim=1)
    keys = torch.cat([first_keys.unsqueeze(1), keys], dim=1)
    resets, a, rho = resets.repeat_interleave(2, 0), [], []
    for s in range(steps):
        reset = resets[:, s, None]
        normaliser = torch.where(reset, weights[:, s], torch.logaddexp(normaliser, weights[:, s]))
        rho.append((weights[:, s] - normaliser).exp())
        affine = torch.diag_embed(1 - rho[s]) - rho[s].unsqueeze(-1) * keys[:, s]
        a.append(affine.masked_fill(reset.unsqueeze(-1), 0))
    shape = len(weights), 0, weights.shape[-1]
    return (torch.stack(a, 1), torch.stack(rho, 1), normaliser) if steps else (
        keys.new_empty(*shape, shape[-1]), keys.new_empty(shape), normaliser
    )  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_chain_takes_gradients_of_any_strides(steps):
    a, rho = normal(2, steps, 3, 3), normal(2, steps, 3)
    leaves = a, normal(2, 3, 4), normal(2, steps, 3, 4), rho, normal(2, 3, 4, seed=1)
    _, last = kernels.chain(*leaves, torch.float32)
    turned = normal(2, 4, 3).detach().mT
    found, expected = (
        torch.autograd.grad(last, leaves, weight, retain_graph=True, materialize_grads=True, allow_unused=True)
        for weight in (turned, turned.contiguous())
    )
    torch.testing.assert_close(found, expected)
