"""Registers, and bytes spilled, that the kernels may need, by the version of Triton that compiles them.

GPU machines often have an older Triton than the pinned one, which compiles the same kernels to other code. Shared
memory has one limit for all versions: that of the card (``compiling.SHARED_LIMIT``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import triton
from kernels.recording import Configuration

REGISTERS = {
    "cema.triton_backward": 128, "cema.triton_forward": 64, "chunk_attention.triton_layout": 96,
    "chunk_attention.triton_narrow": 255, "chunk_attention.triton_wide": 255, "decoding.triton_average": 96,
    "decoding.triton_ends": 64, "decoding.triton_mixer": 168, "decoding.triton_products": 255,
    "feed_forward.triton": 128, "gates.triton": 128, "loss.triton": 128, "norms.triton": 128,
    "qk_scale_shift.triton": 128,
    "timestep_norm.triton_backward": 255, "timestep_norm.triton_forward": 224, "working_memory.triton_chain": 255,
    "working_memory.triton_factors": 168, "working_memory.triton_features": 168,
}  # fmt: skip
"""Largest number of registers per thread (at most 255), by the module of the kernel."""

MORE = {
    "filter_kernel": (224, 255), "gradients_kernel": (224, 255), "_row_dot_kernel": (255, 255),
    "enter_kernel": (255, 255),
}  # fmt: skip
"""Kernels with their own limits, for activations of 16 and of 32 bits. CEMA's kernels over tokens run one block per
multiprocessor. ``enter_kernel`` works at the ends of chunks only."""


@dataclass(frozen=True)
class Budget:
    """Limits for one version of Triton."""

    registers: Mapping[str, int]
    """By the module of the kernel."""
    kernels: Mapping[str, tuple[int, int]]
    """By the name of the kernel, for activations of 16 and of 32 bits; instead of those of its module."""
    spilled: Mapping[str, int] = field(default_factory=dict)
    """Bytes per thread, by the name of the kernel."""


PINNED = Budget(REGISTERS, MORE)
OLDEST = replace(PINNED, registers=REGISTERS | {"qk_scale_shift.triton": 176})
BUDGETS = {"3.6": OLDEST}
"""Budgets of other versions than the pinned one."""

SPILLED = 8
"""Bytes that ptxas keeps on the stack in a few tiles of norms, at any number of warps."""


def budget(configuration: Configuration) -> tuple[int, int]:
    """Return the registers, and the bytes spilled, that a thread of this kernel may need in the installed Triton."""
    found = BUDGETS.get(triton.__version__.rpartition(".")[0], PINNED)
    name, module = configuration.kernel.__name__, configuration.kernel.fn.__module__.removeprefix("gecko.ops.")
    rough = any(kind in ("*bf16", "*fp16") for _, kind in configuration.signature)
    narrow, wide = found.kernels.get(name, (found.registers[module],) * 2)
    return narrow if rough else wide, found.spilled.get(name, SPILLED)
