"""The rate at which this machine reads given tensors: a loop in C that does nothing else.

On a virtual machine two blocks of memory may differ by a factor of two, for as long as the process lives. So the limit
of a computation is the rate of the memory that it reads, not of another block.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

READINGS = 5
_LOOP = """
#include <stdint.h>
typedef int64_t lanes __attribute__((vector_size(64), aligned(8)));
// Reads whole lines of 64 bytes of all blocks, each divided over the threads.
int64_t read_blocks(const char **block, const int64_t *bytes, int64_t count, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = 0; b < count; b++) {
            const int64_t lines = bytes[b] / 64;
            const lanes *at = (const lanes *)block[b] + lines * thread / threads;
            const lanes *end = (const lanes *)block[b] + lines * (thread + 1) / threads;
            lanes sums[4] = {{0}};
            for (; at + 4 <= end; at += 4) {
                __builtin_prefetch((const char *)at + 8192, 0, 2), __builtin_prefetch((const char *)at + 8256, 0, 2);
                __builtin_prefetch((const char *)at + 8320, 0, 2), __builtin_prefetch((const char *)at + 8384, 0, 2);
                for (int i = 0; i < 4; i++) sums[i] += at[i];
            }
            lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
            for (int i = 0; i < 8; i++) total += sum[i];
        }
    return total;
}
"""


def read_rate(tensors: Sequence[Tensor]) -> float:
    """Return bytes per second of reading all ``tensors`` once: the best of several readings."""
    sizes = [tensor.nbytes for tensor in tensors]
    blocks = (ctypes.c_void_p * len(sizes))(*[tensor.data_ptr() for tensor in tensors])
    bytes_of_each = (ctypes.c_int64 * len(sizes))(*sizes)
    best = float("inf")
    for _ in range(READINGS):
        begin = time.perf_counter()
        _read_blocks()(blocks, bytes_of_each, len(sizes), torch.get_num_threads())
        best = min(best, time.perf_counter() - begin)
    return sum(sizes) / best


@cache
def _read_blocks() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_LOOP, encoding="ascii")
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
        subprocess.run(["gcc", *flags, str(source), "-o", str(built)], check=True)
        function = ctypes.CDLL(str(built)).read_blocks
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    function.restype = ctypes.c_int64
    return function
