"""Keep freed memory in the process instead of handing it back to the system after every operator.

The C library returns large freed blocks at once, and every fresh page costs a fault when it is touched
again: a training step, or a piece of a text that is read, frees and takes the same blocks each time.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks of any size; true if it agreed, false on other C libraries."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return library.mallopt(_MMAP_MAX, 0) == 1 and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1) == 1
