"""The C kernels satisfy the laws, at sizes that cross the borders of their blocks."""

from __future__ import annotations

import pytest
import torch
from support import cases, laws
from support.native_agreement import needs_compiler, on_two_threads

pytestmark = needs_compiler


@pytest.mark.parametrize(("law", "case"), laws.over(cases.SINGLE))
@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_native(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_the_number_of_threads_changes_no_bit(operator):
    case = cases.Case(300, "packed", (40,), batch=3, dtype=torch.float32)
    given = cases.problem(operator, case)
    one, two = laws.read(operator.fast, given), on_two_threads(lambda: laws.read(operator.fast, given))
    for found, expected in ((two.values, one.values), (two.gradients, one.gradients)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
