"""The kernels in C keep the laws, at sizes that cross the borders of their blocks."""

from __future__ import annotations

import cases
import laws
import pytest
import torch
from native_agreement import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("law", "case"), laws.over(cases.SINGLE))
@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_native(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_the_number_of_threads_changes_no_bit(operator):
    case = cases.Case(300, "packed", (40,), batch=3, dtype=torch.float32)
    readings = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        readings.append(laws.read(operator.fast, cases.problem(operator, case)))
    torch.set_num_threads(1)
    one, three = readings
    for found, expected in ((three.values, one.values), (three.gradients, one.gradients)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
