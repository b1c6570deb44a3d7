"""The associative scan to which benchmarks compare CEMA computes the same moving average."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.agreement import agree, normal

BASELINE = Path(__file__).parents[3] / "benchmarks" / "gpu" / "scan_kernel.py"


@pytest.fixture(scope="module")
def baseline() -> Any:
    spec = importlib.util.spec_from_file_location("scan_kernel", BASELINE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("channels", [3, 11])
def test_scanned_average(baseline, length, channels):
    draw = [normal(channels, 3, seed=seed).detach() for seed in range(4)]
    q, gain = torch.polar(0.9 * draw[0].sigmoid(), draw[1]), torch.complex(draw[2], draw[3])

    def equation(x):
        h, outputs = torch.zeros(2, channels, 3, dtype=torch.complex128), []
        for x_t in x.unbind(1):
            h = q.to(h.dtype) * h + x_t.unsqueeze(-1)
            outputs.append((gain * h).real.sum(-1))
        return torch.stack(outputs, dim=1)

    agree(lambda x: baseline.scanned_average(x, q, gain), equation, [normal(2, length, channels)])
