"""The CEMA kernels satisfy the laws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernels.agreement import TOLERANCE, in_float32, is_well_registered, laws_over, normal
from support import cases, laws
from support.cases import Case

from gecko.ops.cema import CEMACoefficients, cema, cema_reference, triton, triton_coefficients, varlen_tiles
from gecko.ops.cema.varlen_tiles import VarlenTilePlan
from gecko.segments import Segments

CEMA = cases.CEMA


pytestmark = pytest.mark.usefixtures("on_kernels")

SINGLE = in_float32(
    Case(63), Case(127, "packed"), Case(63, "singles"), Case(50, "edges"), Case(30, "first", (17, 17)),
    Case(40, "packed", (23, 16)), Case(40, "last", (13,)), Case(50, "packed", (0, 3, 19, 16), batch=4),
)  # fmt: skip
SHORT = in_float32(
    Case(9, "packed"), Case(2, "one", (5, 22)), Case(12, "first", (17, 17)),
    Case(1, "packed", (15, 16, 23, 24), batch=4),
)  # fmt: skip
LONG = in_float32(Case(700, "one", (5,), batch=1), Case(600, "packed", (21,)), Case(320, "edges", (3,), batch=1))
"""Cases with several varlen tiles, and units of more than one chunk."""

PARTED = {"B2-T40-packed-after23+16-float32", str(LONG[-1])}
"""Cases that are also read in parts. Short parts are computed without the kernels, which is slow here."""


@pytest.mark.parametrize(("law", "case"), laws_over([*SINGLE, *LONG], PARTED))
def test_cema(law, case):
    law(CEMA, case)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_tokens_without_gradients(case):
    """Decode token by token, with the kernel for one token."""
    given = cases.problem(CEMA, case)
    exact = given.double()
    if exact.state is None:
        exact = dataclasses.replace(exact, state=CEMA.empty(case.batch, torch.float64))
    reference = laws.read(CEMA.reference, exact)
    with torch.no_grad():
        output, state = laws._call(CEMA.fast, given, list(range(case.length + 1)))
    found = laws.Prefill(output, {"state": state}, {})
    laws.assert_same(found.values, reference.values, laws.TOLERANCE[torch.float32])


def _call(channels: int, modes: int, length: int, dtype: torch.dtype, batch: int = 2, documents: bool = True):
    """Return arguments of ``cema`` with long and short memories."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    parameters = normal(channels, modes), 3 * normal(channels, modes), 2 * normal(channels), normal(channels, modes, 2)
    ids = (torch.rand(batch, length, generator=generator) < 3 / length).long().cumsum(1) if documents else None
    x = normal(batch, length, channels).to(dtype)
    state = 0.3 * normal(batch, channels, modes, 2)
    return x, CEMACoefficients.from_parameters(*parameters), state, Segments.build(batch, length, segment_ids=ids)


@pytest.mark.parametrize(
    ("channels", "modes", "dtype"),
    [*((17, 16, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)), (16, 1, torch.float32),
     (9, 11, torch.bfloat16)],
)  # fmt: skip
def test_cema_of_other_shapes_and_dtypes(channels, modes, dtype):
    """Check more channels than a block and fewer, all modes and one. Before the result is rounded to 16
    bits, its error must be below that rounding of the tensor's largest number."""
    x, coefficients, state, segments = _call(channels, modes, 70, dtype)
    found = _read(cema, x, coefficients, state, segments)
    expected = _read(_reference, x.double(), _double(coefficients), state.double(), segments)
    assert found[0].dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    for got, wanted in zip(found, expected, strict=True):
        off = (got.double() - wanted).abs()
        assert (off <= rounding * (wanted.abs() + wanted.abs().max()) + 1e-5 * wanted.abs().max()).all()


def _parts(coefficients: CEMACoefficients) -> list[torch.Tensor]:
    return [getattr(coefficients, field.name) for field in dataclasses.fields(coefficients)]


def _double(coefficients: CEMACoefficients) -> CEMACoefficients:
    return CEMACoefficients(*(tensor.double() for tensor in _parts(coefficients)))


def _reference(x, coefficients, state, *, segments, skip):
    y, after = cema_reference(x, coefficients, state, segments)
    return y + skip * x, after


def _read(form, x, coefficients, state, segments):
    """Return outputs, state, and their gradients by all inputs, including the skip connection."""
    skip = torch.linspace(-1, 2, x.shape[-1]).to(state.dtype)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, state, skip, *_parts(coefficients))]
    y, after = form(leaves[0], CEMACoefficients(*leaves[3:]), leaves[1], segments=segments, skip=leaves[2])
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(tensor.shape, generator=generator).to(x.dtype).to(tensor.dtype) for tensor in (y, after)]
    return [y.detach(), after.detach(), *torch.autograd.grad([y, after], leaves, weights)]


def test_cema_refuses_more_modes_than_fit_by_taking_the_chunked_form():
    x, coefficients, state, segments = _call(4, 17, 32, torch.float32)
    y, _ = cema(x, coefficients, state, segments=segments)
    expected, _ = cema_reference(x, coefficients, state, segments)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_with_room_for_more_documents_computes_the_same_numbers(monkeypatch):
    given = _call(5, 3, 80, torch.float32)
    found = _read(cema, *given)
    assert len(VarlenTilePlan.of(given[-1]).forwards.kind) > 16 * VarlenTilePlan.of(given[-1]).forwards.tiles[-1]
    monkeypatch.setattr(varlen_tiles, "_capacity", lambda tiles, *_: tiles)
    exact = _read(cema, *_call(5, 3, 80, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def _op_arguments() -> tuple[object, ...]:
    x, coefficients, state, segments = _call(5, 3, 40, torch.float32)
    plan = VarlenTilePlan.build(segments)
    given = x[:, plan.head :], *_parts(coefficients), torch.randn(5), state
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    return (*leaves, plan.continues, list(plan.forwards), list(plan.backwards), plan.unit)


def test_the_operator_is_registered_in_full_and_compiles_in_one_graph():
    arguments = _op_arguments()
    torch.library.opcheck(triton._cema.registered, arguments)

    def squared(*given: object) -> torch.Tensor:
        y, after, *_ = torch.ops.gecko.cema(*given)
        return (y * y).sum() + after.sum()

    compiled = torch.compile(squared, backend="aot_eager", fullgraph=True)
    plain, whole = squared(*arguments), compiled(*arguments)
    torch.testing.assert_close(whole, plain)
    leaves = arguments[:7]
    for found, expected in zip(torch.autograd.grad(whole, leaves), torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("channels", "modes", "dtype"), [(5, 3, torch.bfloat16), (130, 16, torch.float32), (1, 1, torch.float32)]
)
def test_coefficients_and_their_gradients(channels, modes, dtype):
    """Coefficients are rounded once, as a token's index multiplies their errors; also log |q| of δ down to −30."""
    shapes = (channels, modes), (channels, modes), (channels,), (channels, modes, 2)
    parameters = [normal(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    parameters[1][:, ::2] = -8 * parameters[1][:, ::2].abs()
    parameters = [x.to(dtype).requires_grad_() for x in parameters]
    wide = [x.detach().double().requires_grad_() for x in parameters]
    found, exact = (list(vars(CEMACoefficients.from_parameters(*given)).values()) for given in (parameters, wide))
    assert "cema_coefficients" in str(found[0].grad_fn)
    weights = [normal(*x.shape, seed=9).detach().double() for x in exact]
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=6e-8, atol=0)
    grads = torch.autograd.grad(found, parameters, [x.to(y.dtype) for x, y in zip(weights, found, strict=True)])
    for got, wanted, leaf in zip(grads, torch.autograd.grad(exact, wide, weights), parameters, strict=True):
        assert got.dtype == leaf.dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_coefficients_of_which_some_have_no_gradient():
    parameters = normal(5, 3), normal(5, 3, seed=1), normal(5), normal(5, 3, 2)
    wide = [x.detach().double().requires_grad_() for x in parameters]
    for name in ("input", "log_damping", "angle"):
        results = []
        for given in (parameters, wide):
            total = getattr(CEMACoefficients.from_parameters(*given), name).sum()
            results.append(torch.autograd.grad(total, given[:3], materialize_grads=True))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-7)


def test_coefficients_are_well_registered():
    is_well_registered(triton_coefficients.coefficients_triton, normal(5, 3), normal(5, 3, seed=1), normal(5))


def test_long_memories_stay_accurate():
    """Check a few thousand steps of modes that hardly decay, with the largest possible state."""
    x, coefficients, state, segments = _call(4, 3, 2500, torch.float32, batch=1, documents=False)
    slow = dataclasses.replace(coefficients, log_damping=coefficients.log_damping * 1e-3)
    y, _ = cema(x, slow, state, segments=segments)
    expected, _ = cema_reference(x.double(), _double(slow), state.double(), segments)
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()
