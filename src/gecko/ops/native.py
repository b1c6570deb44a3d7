"""The C kernels of all operators: how they are built, loaded and called.

**Where.** The kernels of an operator are in ``ops/NAME/native.c`` (and ``native_*.c`` where one file is too long),
their autograd functions in ``ops/NAME/native.py``, what C files of all operators share in ``ops/*.h``. They take
contiguous float32 on the CPU; an operator's ``__init__`` takes them where ``kernels.native_runs_on(x)``, by
``kernels_of(NAME, "native")``. Eager forms stay for machines without a compiler, for float64, for the compiler's
tracing, and for what a kernel leaves out.

**Built once.** All files become one library, for the very processor they are built on, when an operator first asks for
it (a few seconds, as Triton does with its kernels on a GPU). It is kept in the user's cache under a name made of the
sources, the compiler and the processor's features, so that machines that share a home keep one each.

**Threads** are PyTorch's: its OpenMP runtime is in the process before the library is, which has the same one.
Work is divided by shape, never by the number of threads, and sums are taken in an order of their own: the same numbers
come out on any number of cores.

**Memory** that a kernel works in is its own, a few megabytes, and up to a hundred for the widest layers it takes; where
there is none left it ends the process.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gecko.files import whole_file

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
COMPILERS = ("gcc", "cc")


def refuse_second_derivatives() -> None:
    """For backward passes of kernels: raises RuntimeError where what they compute is itself to be differentiated.

    ``once_differentiable`` alone would not see a path around the operator, and leave its share out without a word.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("kernels in C have first derivatives only; got create_graph=True.")


def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have to be; None, with one line in the log, where they cannot be."""
    return _loaded()[0]


def missing() -> str:
    """Why there are no kernels; empty where they are."""
    return _loaded()[1]


def multiplies_bfloat16() -> bool:
    """Whether the kernels have products in bfloat16: where the processor, and the compiler, know them."""
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
        "the CPU runs operators without their C kernels, which is slower: %s. Installing GCC mends it.",
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
    """Call one kernel: tensors by their first number, tuples as an array of where their tensors begin, whole numbers as
    int64, others as float; then the threads."""
    function = _functions.get(name) or _prepared(name, arguments)
    function(*map(_plain, arguments), torch.get_num_threads())


_NARROW = (torch.bfloat16, torch.float16)

_functions: dict[str, Any] = {}
"""Those called before, which know the kinds of their arguments: to name them at every call takes longer than a call."""


def _prepared(name: str, arguments: tuple[Argument, ...]) -> Any:
    loaded = library()
    assert loaded is not None, "operators ask native_runs_on first"
    function = getattr(loaded, name)
    function.argtypes = [*map(_kind, arguments), ctypes.c_int64]
    function.restype = None
    return _functions.setdefault(name, function)


def _kind(argument: Argument) -> type:
    if isinstance(argument, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_void_p


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous(), "kernels take contiguous tensors"
        if argument.dtype in _NARROW:  # a hook on saved tensors can give back what it likes
            raise TypeError(f"kernels in C take float32; got {argument.dtype}.")
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return (ctypes.c_void_p * len(argument))(*map(_plain, argument))
    return argument


def _built(compiler: str) -> Path:
    """The library of these sources, this compiler and this processor."""
    here = Path(__file__).parent
    sources = sorted(here.glob("*/native*.c"))
    features = _run([compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    read = (path.read_text(encoding="utf-8") for path in (*sorted(here.rglob("*.h")), *sources))
    name = hashlib.sha256("\0".join((*_FLAGS, features, *read)).encode()).hexdigest()[:24]
    path = _folder() / f"native-{name}.so"
    if not path.exists():
        with whole_file(path) as temporary:
            _run([compiler, *_FLAGS, *map(str, sources), "-o", str(temporary), "-lm"])
    return path


def _folder() -> Path:
    """Where libraries are kept; for this process alone where the user has no cache that can be written."""
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
