"""Compile the C kernels. This module does not import PyTorch, so that it can compile while PyTorch is imported.

There are two libraries. ``decoding`` has the kernels of the decoder; a model in bfloat16 needs no others to continue a
short text. ``operators`` has all other kernels. Each is compiled for the processor of this machine when it is first
needed, which takes some seconds. A library is kept in the user's cache. Its name has a hash of the sources, the
compiler and the processor's features, so machines that share a home directory keep their own.
Processes that start together wait for the one that builds a library.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Literal

from gecko.io.files import locked, whole_file

Name = Literal["decoding", "operators"]

_FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp",
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
"""The parameter: for some processors (AMD Zen 2 and 3) GCC rounds products before it adds them to a single sum, but not
to several sums. The same sum would then depend on how many are computed together, and so on the number of threads."""
COMPILERS = ("gcc", "cc")
_OPERATORS = Path(__file__).parents[1]


def start_building(name: Name) -> None:
    """Build a library in another thread, unless it is cached. The thread ignores errors; ``cpu.library`` logs them."""
    Thread(target=_try_to_build, args=(name,)).start()


def _try_to_build(name: Name) -> None:
    with suppress(subprocess.CalledProcessError, OSError):
        built(name)


def built(name: Name) -> Path:
    """Return the path of a library for these sources, this compiler and this processor; build it if missing.

    Raises:
        OSError: there is no compiler, or the library could not be written.
        subprocess.CalledProcessError: the compiler failed.
    """
    compiler, files = _compiler(), sources(name)
    features = _run([compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    read = (path.read_text(encoding="utf-8") for path in (*sorted(_OPERATORS.rglob("*.h")), *files))
    code = hashlib.sha256("\0".join((*_FLAGS, features, *read)).encode()).hexdigest()[:24]
    path = _folder() / f"{name}-{code}.so"
    if not path.exists():
        with locked(path.parent / f".building-{name}", wait=True):  # of processes that start together, one builds
            if not path.exists():
                with whole_file(path) as temporary:
                    _build(compiler, files, temporary)
    return path


def sources(name: Name) -> list[Path]:
    """Return the C files of a library."""
    files = sorted(_OPERATORS.glob("*/cpu*.c"))
    return [path for path in files if (path.parent.name == "decoding") == (name == "decoding")]


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise FileNotFoundError("none of " + ", ".join(COMPILERS) + " is installed")
    return found


def _build(compiler: str, files: Sequence[Path], library: Path) -> None:
    """Compile the files, as many at once as there are processors, and link them."""
    with tempfile.TemporaryDirectory(prefix="gecko-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder, f"{number}.o")) for number in range(len(files))]
        list(pool.map(lambda source, to: _run([compiler, *_FLAGS, "-c", str(source), "-o", to]), files, objects))
        _run([compiler, *_FLAGS, *objects, "-o", str(library), "-lm"])


@cache
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
