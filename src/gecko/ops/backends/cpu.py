"""Build, load and call the C kernels of all operators, and choose between PyTorch's two libraries for linear layers.

**Files.** The kernels of an operator are in ``ops/NAME/cpu.c`` (and ``cpu_*.c`` if one file is too long), their
autograd functions in ``ops/NAME/cpu.py``, and code shared by the C files in ``ops/backends/*.h``. The kernels need
contiguous float32 tensors on the CPU. ``dispatch.choose_backend`` decides when they run.

**Build.** All files become one library, which is compiled for the processor of this machine when an operator first
needs it. On two cores this takes five to fifteen seconds. The library is kept in the user's cache. Its name is a hash
of the sources, the compiler and the processor's features, so machines that share a home directory keep one library
each. Processes that start together wait for the one that builds it.

**Threads** are PyTorch's: its OpenMP runtime is in the process before the library, which uses the same one. Work is
divided by shape and not by the number of threads, and sums have a fixed order: results are the same on any number of
cores.

**Memory.** A kernel allocates its own work memory: a few megabytes, and up to a hundred for the widest layers. It
returns 0, or the number of bytes that the system refused; ``call`` raises MemoryError in that case. The outputs must
then not be used; the same call can be repeated.

**Linear layers.** For float32 on a CPU, PyTorch uses MKL. MKL does not use AVX-512 on AMD processors. oneDNN, which
PyTorch also contains, takes half as long there for the same numbers. C kernels with packed weights run if a core's
cache holds the weights (``cpu_panels.h``).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.io.files import locked, whole_file
from gecko.ops.backends.dispatch import CPU_KERNEL_WIDTH, cpu_kernels_run_on, is_plain_float32, products_are_rounded
from gecko.runtime.private import onednn_linear
from gecko.runtime.process import processor_field

_FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp",
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
"""The parameter: for some processors (AMD Zen 2 and 3) GCC rounds products before it adds them to a single sum, but not
to several sums. The same sum would then depend on how many are computed together, and so on the number of threads."""
COMPILERS = ("gcc", "cc")
_LOCK = ".building"


def refuse_second_derivatives() -> None:
    """Raise RuntimeError if the result of a kernel's backward pass would itself be differentiated.

    ``once_differentiable`` alone does not see a path around the operator and would silently omit its share.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("C kernels have first derivatives only; got create_graph=True.")


def library() -> ctypes.CDLL | None:
    """Return the library, building it if necessary; None, with one line in the log, if it cannot be built."""
    return _loaded()[0]


def missing() -> str:
    """Return the reason why the library could not be built; empty if it was."""
    return _loaded()[1]


def multiplies_bfloat16() -> bool:
    """Return whether the library has bfloat16 products, which both processor and compiler must support."""
    loaded = library()
    return loaded is not None and ctypes.c_int.in_dll(loaded, "projections_of_pairs").value == 1


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    try:
        return ctypes.CDLL(str(_built(_compiler()))), ""
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-300:]}"
    except OSError as error:
        reason = str(error)
    logging.getLogger(__name__).warning(
        "the CPU runs operators without their C kernels, which is slower: %s. Install GCC to get them.",
        reason,
    )
    return None, reason


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise FileNotFoundError("none of " + ", ".join(COMPILERS) + " is installed")
    return found


Argument = Tensor | tuple[Tensor | None, ...] | int | float | None


def call(name: str, *arguments: Argument) -> None:
    """Call one kernel.

    Tensors are passed as pointers, tuples as arrays of pointers, integers as int64 and other numbers as float. The
    number of threads follows as the last argument.

    Raises:
        MemoryError: the system refused the work memory of the kernel. The outputs are not valid then.
        TypeError: a tensor has 16 bits.
    """
    function = _functions.get(name) or _prepared(name, arguments)
    refused = function(*map(_plain, arguments), torch.get_num_threads())
    if refused:
        raise MemoryError(
            f"the kernel {name} needs {refused:,} bytes to work in; the system refused them. "
            "Try a smaller batch or shorter pieces of text, fewer threads, or end other programs."
        )


_NARROW = (torch.bfloat16, torch.float16)

_functions: dict[str, Any] = {}
"""Functions with their argument types set. Setting them at each call would take longer than the call."""


def _prepared(name: str, arguments: tuple[Argument, ...]) -> Any:
    loaded = library()
    assert loaded is not None, "operators ask choose_backend first"
    function = getattr(loaded, name)
    function.argtypes = [*map(_kind, arguments), ctypes.c_int64]
    function.restype = ctypes.c_int64
    return _functions.setdefault(name, function)


def _kind(argument: Argument) -> type:
    if isinstance(argument, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_void_p


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous(), "kernels take contiguous tensors"
        if argument.dtype in _NARROW:  # a hook on saved tensors can return any dtype
            raise TypeError(f"C kernels need float32; got {argument.dtype}.")
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return (ctypes.c_void_p * len(argument))(*map(_plain, argument))
    return argument


def _built(compiler: str) -> Path:
    """Return the path of the library for these sources, this compiler and this processor; build it if missing."""
    here = Path(__file__).parent.parent
    sources = sorted(here.glob("*/cpu*.c"))
    features = _run([compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    read = (path.read_text(encoding="utf-8") for path in (*sorted(here.rglob("*.h")), *sources))
    name = hashlib.sha256("\0".join((*_FLAGS, features, *read)).encode()).hexdigest()[:24]
    path = _folder() / f"native-{name}.so"
    if not path.exists():
        with locked(path.parent / _LOCK, wait=True):  # of processes that start together, one builds
            if not path.exists():
                with whole_file(path) as temporary:
                    _build(compiler, sources, temporary)
    return path


def _build(compiler: str, sources: Sequence[Path], library: Path) -> None:
    """Compile the files, as many at once as there are processors, and link them."""
    with tempfile.TemporaryDirectory(prefix="gecko-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder, f"{number}.o")) for number in range(len(sources))]
        list(pool.map(lambda source, to: _run([compiler, *_FLAGS, "-c", str(source), "-o", to]), sources, objects))
        _run([compiler, *_FLAGS, *objects, "-o", str(library), "-lm"])


def _folder() -> Path:
    """Return the folder of libraries: in the user's cache, or temporary if that cannot be written."""
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "gecko"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # a user without a home
        pass
    temporary = tempfile.mkdtemp(prefix="gecko-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


_FEWEST_MULTIPLICATIONS = 2**20
"""Below this, the setup of oneDNN takes longer than its products save."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias like ``F.linear``: x (…, inputs), weight (outputs, inputs), bias (outputs,)."""
    if x.numel() * len(weight) < _FEWEST_MULTIPLICATIONS or not _onednn_runs_on(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = (_OneDNNLinear.apply if torch.is_grad_enabled() else _onednn)(x, weight, bias)
    return y


def _onednn_runs_on(*given: Tensor | None) -> bool:
    return not torch.is_autocast_enabled("cpu") and is_plain_float32(*given) and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN uses wider registers of this processor than MKL: AVX-512 on AMD."""
    there = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return there and processor_field("vendor_id") == "AuthenticAMD"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    return onednn_linear(x, weight, bias)


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if ctx.needs_input_grad[0] else None)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else linear(grad, weight.t()),
            None if x is None else linear(rows.t(), x.reshape(-1, x.shape[-1]).t()),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


_MOST_WEIGHTS = 2**17
"""Most weights of one layer for the C kernels. With more, products are most of the work, and MKL's are as fast."""
_MOST_ON_AMD = 2**19
"""The same on AMD processors, where MKL is slower."""
_FEWEST_TOKENS = 1536
"""Fewest tokens of a call for the C kernels. With fewer, packing the weights takes longer than it saves."""
_SMALL = 2**15
"""Most weights of a layer that are packed in a few microseconds."""
_FEWEST_OF_SMALL = 32
"""Fewest tokens if all layers are small, on AMD processors: there a call of oneDNN takes longer than packing."""


def packed_weights_run_on(
    x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor | None] = (), fills_outputs: bool = False
) -> bool:
    """Return whether C kernels with packed weights support x (…, inputs) and each weight (outputs, inputs).

    A kernel that ``fills_outputs`` up to whole registers supports any number of outputs.
    """
    return (
        x.numel() >= min(_FEWEST_OF_SMALL, _FEWEST_TOKENS) * x.shape[-1]
        and cpu_kernels_run_on(x, *weights, *others)  # not while traced: before the rules on sizes
        and x.numel() >= (_FEWEST_TOKENS if fills_outputs else _fewest_tokens(weights)) * x.shape[-1]
        and torch.is_autocast_enabled("cpu") == products_are_rounded()
        and all(_fits(weight, fills_outputs) for weight in weights)
    )


def _fewest_tokens(weights: Sequence[Tensor]) -> int:
    small = onednn_is_faster() and all(weight.numel() <= _SMALL for weight in weights)
    return min(_FEWEST_OF_SMALL, _FEWEST_TOKENS) if small else _FEWEST_TOKENS


def _fits(weight: Tensor, fills_outputs: bool) -> bool:
    """Return whether sizes are multiples of the numbers, or pairs of them, that a register holds."""
    width = 2 * CPU_KERNEL_WIDTH if products_are_rounded() else CPU_KERNEL_WIDTH
    outputs, inputs = weight.shape
    return (fills_outputs or outputs % width == 0) and inputs % width == 0 and 0 < weight.numel() <= _most_weights()


@cache
def _most_weights() -> int:
    return _MOST_ON_AMD if onednn_is_faster() else _MOST_WEIGHTS
