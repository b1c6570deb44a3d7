"""What the C library does with freed memory: one way for work that repeats itself, another for processes that stay up.

By default glibc hands large freed blocks back at once, until a larger one was freed: then it keeps them, among
the small ones. A fresh page costs a fault when it is touched, a kept one may be too split up to be used again.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_LARGE = 1 << 18
"""Bytes."""


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks of any size; true if it agreed, false on other C libraries.

    A training step, or a piece of a text that is read, frees and takes the same blocks each time.
    """
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> bool:
    """Tell glibc to hand every large freed block back at once; true if it agreed, false on other C libraries.

    In a server, states of all ages lie between the large blocks of a moment, and would split them up.
    """
    return _set({_MMAP_THRESHOLD: _LARGE, _ARENA_MAX: 1})


def _set(options: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all([library.mallopt(option, value) == 1 for option, value in options.items()])
