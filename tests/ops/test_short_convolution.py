"""The short convolution satisfies the laws."""

from __future__ import annotations

import pytest
import torch
from support import cases, laws

from gecko.ops.short_convolution import short_convolution


@pytest.mark.parametrize(("law", "case"), laws.over(cases.COMMON))
@pytest.mark.parametrize("operator", cases.CONVOLUTIONS, ids=str)
def test_short_convolution(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("case", cases.TINY, ids=str)
@pytest.mark.parametrize("operator", cases.CONVOLUTIONS, ids=str)
def test_short_convolution_gradients_are_numerical(operator, case):
    laws.gradients_are_numerical(operator, case)


def test_other_shapes_are_refused():
    x = torch.zeros(1, 5, 3)
    with pytest.raises(ValueError, match=r"taps must have shape \(3, 4\)"):
        short_convolution(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"state must have shape \(1, 3, 3\)"):
        short_convolution(x, torch.zeros(3, 4), torch.zeros(1, 4, 3))
