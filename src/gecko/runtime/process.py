"""This process: package version and commit, optional packages, memory, garbage collection, denormals, processor.

The libraries of the Hugging Face hub would try again and again for half a minute without a network.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import logging
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"


@functools.cache
def code_version() -> dict[str, str | None]:
    """Return ``version`` and the git ``commit`` if the package is imported from its own checkout, else None.

    The commit is the full hash, followed by ``-dirty`` if tracked files differ from it.
    """
    return {"version": __version__, "commit": git_commit(Path(__file__).resolve())}


def code_name(code: Mapping[str, str | None]) -> str:
    """Return the result of ``code_version``, current or recorded, in words."""
    commit = code.get("commit")
    place = "not from a checkout" if commit is None else f"commit {commit}"
    return f"{code['version']}, {place}"


def git_commit(file: Path) -> str | None:
    """Return the commit of the checkout that tracks ``file``; None if git is missing, or does not track it: it may
    be a copy that is installed inside the checkout of another project."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, which comes with the package's optional ``extra``; ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is installed but lacks one of its own dependencies must report that itself.
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(
            f"this needs the package {module!r}, which is not installed. Run: pip install 'gecko-lm[{extra}]'"
        ) from error


@contextmanager
def without_log_warnings() -> Iterator[None]:
    """Drop warnings that libraries log, as torchao does about GPU libraries and PyTorch's developers when imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def is_reachable(address: str) -> bool:
    """Return whether the host of an address has a name record; with a proxy the proxy looks it up."""
    import socket
    import urllib.parse
    import urllib.request

    try:
        return bool(urllib.request.getproxies() or socket.getaddrinfo(urllib.parse.urlsplit(address).hostname, None))
    except OSError:
        return False


@contextmanager
def cached_data_sets_without_network(extra: str) -> Iterator[None]:
    """Load data sets from the cache of ``datasets``, which our ``extra`` installs, if the hub cannot be reached. Raise
    FileNotFoundError if the cache then lacks one."""
    hub, datasets = require("huggingface_hub", extra), require("datasets", extra)
    if is_reachable(hub.constants.ENDPOINT):
        yield
        return
    settings = (hub.constants, datasets.config)
    before = [setting.HF_HUB_OFFLINE for setting in settings]
    for setting in settings:
        setting.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"{hub.constants.ENDPOINT} cannot be reached, and the cache lacks it: {error}"
        ) from error
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.HF_HUB_OFFLINE = value


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_VERY_LARGE = 1 << 25
"""Bytes from which a server returns a freed block to the system: the most that glibc accepts."""
_MOST_KEPT = 1 << 28
"""Bytes of free memory beyond which a server returns some."""
_HUGE_PAGE, _MADV_HUGEPAGE = 1 << 21, 14


def keep_freed_memory() -> bool:
    """Make glibc keep and reuse freed blocks of any size: training steps and prefill free and allocate the same ones,
    and each fresh page costs a page fault. Return whether it accepted; False on other C libraries."""
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})


def bound_freed_memory() -> bool:
    """Make glibc keep and reuse freed blocks, except very large ones, up to a bound: in a server, long-lived states
    between short-lived blocks fragment what it keeps. Return whether it accepted; False on other C libraries."""
    return _set({_MMAP_THRESHOLD: _VERY_LARGE, _TRIM_THRESHOLD: _MOST_KEPT, _ARENA_MAX: 1})


def prefer_huge_pages(address: int, size: int) -> bool:
    """Ask Linux to back memory that was not touched yet with pages of 2 MB. Return whether it accepted.

    The processor keeps the addresses of few pages at hand, and looks up a new one every 4 KB otherwise.
    """
    first, last = -(-address // _HUGE_PAGE) * _HUGE_PAGE, (address + size) // _HUGE_PAGE * _HUGE_PAGE
    if platform.system() != "Linux" or first >= last:
        return False
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return int(advise(first, last - first, _MADV_HUGEPAGE)) == 0


def _set(options: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all([library.mallopt(option, value) == 1 for option, value in options.items()])


COLLECT_EVERY = 50
"""Steps between two collections of ``SteadyCollection``."""
_kept = False


def keep_existing_objects() -> None:
    """Collect reference cycles, and exempt all other objects of this process, such as modules, from collections."""
    global _kept
    gc.collect()
    gc.freeze()
    _kept = True


class SteadyCollection:
    """Context in which Python collects reference cycles at set steps only.

    Otherwise each rank collects in another step, and all other ranks wait for it. Objects that exist when the context
    is entered are not examined; after ``keep_existing_objects``, those that existed then.
    """

    def __enter__(self) -> SteadyCollection:
        self._was_enabled = gc.isenabled()
        gc.collect()
        if not _kept:
            gc.freeze()
        gc.disable()
        return self

    def step(self, number: int) -> None:
        """Collect if it is the turn of step ``number``."""
        if number % COLLECT_EVERY == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if not _kept:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormal numbers (below 1e-38), which processors multiply a hundred times slower than others, to zero in
    this thread while the context is active, and in threads that PyTorch starts meanwhile."""
    import torch

    before = not (torch.tensor(1e-30, dtype=torch.float32, device="cpu") * 1e-9).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def processor_name() -> str:
    """Return the model name of the processor, or the architecture if it is unknown."""
    return processor_field("model name") or platform.processor() or platform.machine()


def processor_field(name: str) -> str:
    """Return a field of /proc/cpuinfo for the first core; empty if it is missing or the system is not Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for field, _, value in fields if field.strip() == name), "")
