"""Every operator satisfies its laws on the GPU, where float32 uses kernels and float64 the eager forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import cases, laws
from support.on_device import on_device

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

OPERATORS = [cases.CEMA, *cases.TIMESTEP_NORMS, *cases.ATTENTIONS, *cases.MEMORIES]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("law", "case"), laws.over([case for case in cases.COMMON if case.dtype == torch.float64]))
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_operator(operator, law, case, dtype, device):
    law(on_device(operator, device), dataclasses.replace(case, dtype=DTYPES[dtype]))
