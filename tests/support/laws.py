"""Laws: properties that every operator must have, checked for any case (``cases.py``).

A law is a function of an operator and a case; ``over`` pairs laws with the cases to which they apply.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.cases import CHUNK, LONG_CHUNK, Case, Form, Operator, Problem, map_state, problem, tensors
from torch import Tensor

from gecko.segments import Clock, Segments

Law = Callable[[Operator, Case], None]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference, relative to the largest number of the tensor."""


@dataclass(frozen=True)
class Prefill:
    """Result of reading a text: the outputs, the state after it, and the gradients of all inputs."""

    output: Tensor
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]

    @property
    def values(self) -> dict[str, Tensor]:
        return {"output": self.output, **{f"state {name}": x for name, x in self.state.items()}}


def read(
    form: Form, given: Problem, cuts: Iterable[int] = (), weights: Tensor | None = None,
    laid: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> Prefill:  # fmt: skip
    """Read a text in one call, or in several with ``cuts`` between them.

    Gradients are those of Σ weights · output. Without ``weights``, outputs and last state get random weights, whose
    memory layout is that of ``laid``.
    """
    leaves = _leaves(given)
    output, state = _call(form, leaves, [0, *cuts, given.length])
    if weights is not None:
        terms = [(output, weights)]
    else:
        generator = torch.Generator().manual_seed(7)
        terms = [(x, laid(random_like(x, generator))) for x in (output, *_floats(tensors(state)).values())]
    gradients = _meant(_gradients(terms, _named(leaves)), given)
    return Prefill(output.detach(), {name: x.detach() for name, x in tensors(state).items()}, gradients)


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def _call(form: Form, given: Problem, borders: list[int]) -> tuple[Tensor, object]:
    state, clock, outputs = given.state, given.clock, []
    for begin, end in pairwise(borders):
        ids = None if given.ids is None else given.ids[:, begin:end]
        segments = Segments.build(given.batch, end - begin, segment_ids=ids, clock=clock)
        inputs = [x.narrow(given.operator.time, begin, end - begin) for x in given.inputs]
        output, state = form(given.parameters, inputs, state, segments)
        outputs.append(output)
        clock = segments.end
    return torch.cat(outputs, dim=given.operator.time), state


def _leaves(given: Problem) -> Problem:
    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    return replace(
        given, parameters=list(map(leaf, given.parameters)), inputs=list(map(leaf, given.inputs)),
        state=map_state(given.state, leaf),
    )  # fmt: skip


def _named(leaves: Problem) -> dict[str, Tensor]:
    return {
        **{f"parameter {i}": x for i, x in enumerate(leaves.parameters)},
        **{f"input {i}": x for i, x in enumerate(leaves.inputs)},
        **({} if leaves.state is None else {f"state in {n}": x for n, x in _floats(tensors(leaves.state)).items()}),
    }


def _floats(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in named.items() if x.is_floating_point()}


def _gradients(terms: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    live = [(x, w) for x, w in terms if x.requires_grad]
    if not leaves or not live:
        return {}
    found = torch.autograd.grad(
        [x for x, _ in live], list(leaves.values()), [w for _, w in live], allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def _meant(gradients: dict[str, Tensor], given: Problem) -> dict[str, Tensor]:
    """Drop undefined gradients: those of the memory's current chunk in rows that have read no tokens."""
    if given.clock is None:
        return gradients
    begun = given.clock.position > 0
    return {name: x[begun] if name.startswith("state in current") else x for name, x in gradients.items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        if not wanted.is_floating_point():
            assert torch.equal(got, wanted), name
            continue
        finite = wanted[wanted.abs() < 1e20]  # the log of an empty sum is −1e30
        scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=tolerance, atol=tolerance * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


# The laws


def fast_is_reference(operator: Operator, case: Case) -> None:
    """Check that the fast form equals the reference in outputs, state and gradients, including those of the state."""
    given = problem(operator, case)
    fast = read(operator.fast, given)
    exact = given.double()
    if exact.state is None:
        exact = replace(exact, state=operator.empty(case.batch, torch.float64))
    reference = read(operator.reference, exact)
    assert fast.output.dtype == case.dtype
    assert_same(fast.values, reference.values, TOLERANCE[case.dtype])
    expected = {name: reference.gradients[name] for name in fast.gradients}
    assert_same(fast.gradients, expected, TOLERANCE[case.dtype])


def split_anywhere(operator: Operator, case: Case) -> None:
    """Check that reading in several calls, also token by token, gives the outputs, state and gradients of one call."""
    given = problem(operator, case)
    whole = read(operator.fast, given)
    for cuts in partitions(case):
        parts = read(operator.fast, given, cuts)
        assert_same(parts.values, whole.values, TOLERANCE[case.dtype])
        assert_same(parts.gradients, whole.gradients, TOLERANCE[case.dtype])


def no_gradient_changes_no_value(operator: Operator, case: Case) -> None:
    """Check that several calls without gradients, which may take other kernels, give the values of one call."""
    given = problem(operator, case)
    whole = read(operator.fast, given)
    for cuts in partitions(case):
        with torch.no_grad():
            parts = read(operator.fast, given, cuts)
        assert_same(parts.values, whole.values, TOLERANCE[case.dtype])


def packed_is_alone(operator: Operator, case: Case) -> None:
    """Check that a packed document has the outputs and gradients that it has alone at the same chunk offset."""
    given = problem(operator, case)
    weights = random_like(read(operator.fast, given).output, case.generator())
    whole = read(operator.fast, given, weights=weights)
    for row, begin, end in documents(given):

        def part(x: Tensor, row: int = row, begin: int = begin, end: int = end) -> Tensor:
            return x[row : row + 1].narrow(operator.time, begin, end - begin)

        single = read(operator.fast, alone(given, row, begin, end), weights=part(weights))
        assert_same({"output": part(whole.output)}, {"output": single.output}, TOLERANCE[case.dtype])
        names = [name for name in single.gradients if name.startswith("input")]
        packed_gradients = {name: part(whole.gradients[name]) for name in names}
        assert_same(packed_gradients, {name: single.gradients[name] for name in names}, TOLERANCE[case.dtype])


def any_strides(operator: Operator, case: Case) -> None:
    """Check that inputs, states and gradients in another memory layout give the same results."""
    given = problem(operator, case)
    turned = replace(
        given, parameters=list(map(_turned, given.parameters)), inputs=list(map(_turned, given.inputs)),
        state=map_state(given.state, _turned),
    )  # fmt: skip
    expected, found = read(operator.fast, given), read(operator.fast, turned, laid=_turned)
    assert_same(found.values, expected.values, TOLERANCE[case.dtype])
    assert_same(found.gradients, expected.gradients, TOLERANCE[case.dtype])


def _turned(x: Tensor) -> Tensor:
    """Return an equal tensor with its first axis innermost in memory, or just outside (real, imaginary) pairs."""
    last = x.dim() - (2 if x.dim() > 2 and x.shape[-1] == 2 else 1)
    return x if last < 1 else x.transpose(0, last).contiguous().transpose(0, last)


ALL = (fast_is_reference, split_anywhere, no_gradient_changes_no_value, packed_is_alone, any_strides)


def over(cases: Iterable[Case]) -> list[Any]:
    """Return every law with every case to which it applies, as parameters of a test."""
    return [
        pytest.param(law, case, id=f"{law.__name__}-{case}")
        for law in ALL
        for case in cases
        if _says_something(law, case)
    ]


def _says_something(law: Law, case: Case) -> bool:
    if law is split_anywhere:
        return case.length > 1
    if law is no_gradient_changes_no_value:
        return case.length > 1 and case.dtype == torch.float32
    if law is any_strides:
        return case.layout == "packed" and case.batch > 1
    return law is not packed_is_alone or case.layout != "one"


def check_all(operator: Operator, case: Case) -> None:
    """Check every law that applies to the case."""
    for law in ALL:
        if _says_something(law, case):
            law(operator, case)


def gradients_are_numerical(operator: Operator, case: Case) -> None:
    """Check gradients by parameters, inputs and state against finite differences."""
    given = problem(operator, case)
    counts = len(given.parameters), len(given.inputs)
    state_names = list(_floats(tensors(given.state)))

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        parameters, inputs, floats = leaves[: counts[0]], leaves[counts[0] : sum(counts)], leaves[sum(counts) :]
        filled = iter({**tensors(given.state), **dict(zip(state_names, floats, strict=True))}.values())
        state = map_state(given.state, lambda _: next(filled))
        varied = replace(given, parameters=list(parameters), inputs=list(inputs), state=state)
        output, after = _call(operator.fast, varied, [0, given.length])
        return output, *_floats(tensors(after)).values()

    leaves = _named(_leaves(given))
    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


def partitions(case: Case) -> list[list[int]]:
    """Return two lists of cuts: single tokens everywhere (or at the ends of a long text), and at random places."""
    length, generator = case.length, case.generator()
    singles = set(range(1, length)) if length <= 2 * CHUNK + 2 else {1, 2, length - 2, length - 1}
    anywhere = set((torch.randperm(length - 1, generator=generator)[:5] + 1).tolist())
    chosen = [sorted(singles), sorted({*anywhere, *(cut + 1 for cut in list(anywhere)[:2] if cut + 1 < length)})]
    return chosen if chosen[0] != chosen[1] else chosen[:1]


def documents(given: Problem) -> list[tuple[int, int, int]]:
    """Return (row, begin, end) of every document of the call."""
    assert given.ids is not None
    found = []
    for row, ids in enumerate(given.ids.tolist()):
        borders = [0, *(t for t in range(1, given.length) if ids[t] != ids[t - 1]), given.length]
        found += [(row, begin, end) for begin, end in pairwise(borders)]
    return found


def alone(given: Problem, row: int, begin: int, end: int) -> Problem:
    """Return one document alone: with its state if it started before the call, else at its chunk offset."""
    inputs = [x[row : row + 1].narrow(given.operator.time, begin, end - begin) for x in given.inputs]
    position = int(given.clock.position[row]) if given.clock is not None else 0
    carried = given.clock is not None and begin == 0 and int(given.ids[row, 0]) == int(given.clock.segment_id[row])
    if carried:
        clock, state = given.clock.map(lambda x: x[row : row + 1]), map_state(given.state, lambda x: x[row : row + 1])
        return replace(given, inputs=inputs, ids=None, clock=clock, state=state)
    phase = torch.tensor([(position + begin) % LONG_CHUNK])
    clock = Clock(phase, phase, torch.zeros(1, dtype=torch.int64)) if int(phase) else None
    return replace(given, inputs=inputs, ids=None, clock=clock, state=None)
