"""Denormal numbers are flushed to zero within the context only, also in the threads that PyTorch starts there."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from gecko.runtime.process import flushed_denormals

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")

PROGRAM = """
import torch
from gecko.runtime.process import flushed_denormals
torch.set_num_threads(3)
with flushed_denormals():
    small = torch.full((1 << 20,), 1.0e-30)
    assert not (small * 1.0e-9).any()
    small.requires_grad_(True)
    (small * 1.0e-9).sum().backward(torch.tensor(1.0e-30))
    assert not small.grad.any()
"""


def small() -> float:
    return (torch.tensor(1e-30) * 1e-9).item()


def test_only_within_it() -> None:
    assert small()
    with pytest.raises(KeyError), flushed_denormals():
        assert not small()
        with flushed_denormals():
            assert not small()
        assert not small()
        raise KeyError
    assert small()


def test_all_threads_flush() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", PROGRAM.replace("with flushed_denormals()", "if True")], check=True)
