"""Denormal numbers are zero in the thread that asked for it, and in those that PyTorch starts afterwards."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from gecko.denormals import flush_denormals
torch.set_num_threads(3)
assert flush_denormals()
small = torch.full((1 << 20,), 1.0e-30)
assert not (small * 1.0e-9).any()
small.requires_grad_(True)
(small * 1.0e-9).sum().backward(torch.tensor(1.0e-30))
assert not small.grad.any()
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")
def test_all_threads_flush() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", PROGRAM.replace("assert flush_denormals()", "")], check=True)
