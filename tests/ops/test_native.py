"""The kernels in C keep the laws, at sizes that cross the borders of their blocks."""

from __future__ import annotations

import cases
import laws
import pytest
import torch

from gecko.ops.kernels import native_runs_on

pytestmark = pytest.mark.skipif(not native_runs_on(torch.zeros(1)), reason="no C compiler")


@pytest.mark.parametrize(("law", "case"), laws.over(cases.SINGLE))
@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_native(operator, law, case):
    law(operator, case)
