"""What the Triton kernels of all operators share: when they run, how they are launched, and how they are written; and
when those in C run (``native.py``).

**Where.** Kernels of an operator are in ``ops/NAME/triton.py`` (and ``triton_*.py`` where one file is too long). The
operator's ``__init__`` takes them where ``kernels_run_on(x)``, by ``kernels_of(NAME)``: so the package itself loads no
Triton, and ``gecko.hf.export`` copies no kernels (they run from the installed package, if there is one).
Eager forms stay for the CPU, for float64, and for what a kernel leaves out (a handoff between ranks).

**Layers.** A ``@triton.jit`` function is the kernel. A plain function ``_forward(x, …)`` allocates outputs with
``torch.empty``, builds one ``Launch`` a kernel and runs it. ``custom_op("NAME")`` of ``ops/custom_op.py`` wraps it,
with a fake (shapes only) and ``register_autograd``; its backward is a custom op as well. Ops take and return tensors
and numbers only, and never return an input.

**Names.** ``p_`` pointer, ``b_`` tile in registers, ``i_`` index or offsets, ``m_`` mask. Sizes are words
(``length``, ``channels``); those that kernels unroll are ``tl.constexpr``.

**Numbers.** Upcast every load to float32 before arithmetic (the interpreter's bfloat16 arithmetic is wrong), and
downcast on the store only. ``tl.dot`` adds in float32; its operands are float32 with ``input_precision="ieee"`` or
"tf32x3" for float32 inputs; bfloat16 only where the rounding of the operand is that of the input itself.

**Offsets.** A product of a position, a row or a chunk with a stride is int64: make the index int64 first
(``tl.program_id(0).to(tl.int64)``). The number of programs that grows with the text is the first axis of the grid: the
others end at 65,535.

**Configurations.** One function per operator chooses tiles, warps and stages by shape and dtype, from few fixed ones.
No autotuning, and nothing that compiles anew as the length changes: pass lengths as arguments named in
``do_not_specialize``.

**Tests.** ``tests/kernels/interpreted`` runs kernels on CPU tensors under ``TRITON_INTERPRET=1``;
``tests/kernels/compiled`` records the launches of a call on meta tensors (``compiling.launches``), so that it compiles
the very configurations that would run, and checks their registers, spills and shared memory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gecko.version import __version__

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Inputs that kernels take."""


def kernels_run_on(x: Tensor) -> bool:
    """Whether operators take their kernels for ``x``: on a GPU, in at most 32 bits, and what they need installed."""
    return x.is_cuda and x.dtype in DTYPES and kernels_installed()


def native_runs_on(*tensors: Tensor) -> bool:
    """Whether operators take their C kernels for ``tensors``, all that they are given: plain float32 on the CPU, a
    compiler, and nobody who must see PyTorch's operations."""
    return is_plain_float32(*tensors) and _native_installed()


def is_plain_float32(*tensors: Tensor) -> bool:
    """Whether ``tensors`` are plain float32 on the CPU, and nobody must see PyTorch's operations."""
    return not is_watched() and all(map(_is_plain, tensors))


def products_are_rounded() -> bool:
    """Whether C kernels round what they multiply to bfloat16, and keep all else float32: under autocast to it on the
    CPU, where the processor has such products."""
    wanted = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return wanted and not is_watched() and _native_installed() and _native_rounds()


NATIVE_WIDTH = 16
"""What heads' features are multiples of, for kernels in C that multiply matrices of them: the widest register."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Not subclasses, which stand for shapes, shards or packed numbers."""


def _is_plain(x: Tensor) -> bool:
    # Autograd functions cannot keep what was made under inference mode; a negative view says other than its memory.
    kept = not x.is_inference() or torch.is_inference_mode_enabled()
    plain = type(x) in PLAIN and x.is_cpu and x.dtype == torch.float32
    return plain and kept and not x.is_neg() and not x._is_zerotensor()


def is_watched() -> bool:
    """Whether operations are traced, counted, chosen from, transformed (``torch.func``) or differentiated forward."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


@cache
def _native_installed() -> bool:
    return _package_installed() and importlib.import_module("gecko.ops.native").library() is not None


@cache
def _native_rounds() -> bool:
    return bool(importlib.import_module("gecko.ops.native").multiplies_bfloat16())


@cache
def kernels_installed() -> bool:
    """Whether Triton is there, and the package that has the kernels."""
    return _is_installed("triton") and _package_installed()


def _package_installed() -> bool:
    """Whether this package is there in this version: code that was copied for the hub holds no kernels, and may find
    those of another version, or none."""
    return _is_installed("gecko.version") and importlib.import_module("gecko.version").__version__ == __version__


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


@cache
def kernels_of(name: str, file: str = "triton") -> ModuleType:
    """The module ``file`` of the kernels of the operator ``name``."""
    return importlib.import_module(f"gecko.ops.{name}.{file}")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: all that decides what is compiled and what is run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Tensors, numbers and constants by the names of the kernel's parameters."""
    warps: int
    stages: int = 1

    def run(self) -> None:
        """Run it on the device of its first tensor, which need not be the current one."""
        first = next(x for x in self.arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device_of(first):
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


def blocks(total: int, size: int) -> int:
    """How many blocks of ``size`` hold ``total``."""
    return -(-total // size)


def tile(size: int, least: int = 16) -> int:
    """The power of two that holds ``size``, at least what a matrix product of tiles takes."""
    return max(least, 1 << (size - 1).bit_length())


def warps_of(sizes: Mapping[str, int]) -> int:
    """Warps for norms' tiles of steps × groups together × width, element by element: 4 to 16, one for 512 numbers."""
    return min(16, max(4, sizes["steps"] * sizes["together"] * sizes["width"] // 512))
