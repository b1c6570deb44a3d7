"""Resources that a kernel needs: registers, spills and shared memory. Compiling suffices; no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from kernels.recording import Configuration
from kernels.sass import printed
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448}
"""Largest shared memory of one block in bytes, by compute capability."""

CAPABILITIES = (80, 90, 100)
"""Those that most launches are compiled for."""

REGISTERS = 65_536
"""Registers of one multiprocessor, shared by all threads of its blocks."""


@dataclass(frozen=True)
class Resources:
    """Registers per thread, bytes spilled per thread, and bytes of shared memory per block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def compiled(configuration: Configuration, capability: int) -> Any:
    """Compile a recorded configuration for compute capability 80, 90 or 100, and return Triton's compiled kernel."""
    constants = dict(configuration.constants)
    attributes = {place: [list(fact) for fact in facts] for place, facts in configuration.attributes}
    source = ASTSource(configuration.kernel, dict(configuration.signature), constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(configuration.options))


def resources(configuration: Configuration, capability: int) -> Resources:
    """Compile a recorded configuration, and return the resources it needs."""
    kernel = compiled(configuration, capability)
    used = usage(kernel.asm["cubin"])
    return Resources(int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"]), kernel.metadata.shared)


def usage(cubin: bytes) -> dict[str, str]:
    """Return the resource usage of the one kernel in ``cubin``. Kernels use the stack only for spilled registers."""
    text = printed(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin=cubin)
    lines = [line for line in text.splitlines() if "REG:" in line]
    assert len(lines) == 1, text
    return dict(re.findall(r"(\w+):(\d+)", lines[0]))


def check(configuration: Configuration, capability: int, *, registers: int, spilled: int = 0) -> Resources:
    """Fail on more than ``spilled`` bytes of spills or ``registers`` registers per thread, too much shared memory for
    the card, or a block that does not fit on a multiprocessor."""
    found = resources(configuration, capability)
    limit = SHARED_LIMIT[capability]
    too_many = found.registers > registers or found.registers * 32 * configuration.warps > REGISTERS
    if found.spilled_bytes > spilled or found.shared_bytes > limit or too_many:
        pytest.fail(
            f"{configuration} for sm_{capability}: {found.registers} registers a thread (budget {registers}, and "
            f"{REGISTERS:,} a multiprocessor), {found.spilled_bytes} bytes spilled (limit {spilled}), "
            f"{found.shared_bytes:,} bytes of shared memory (limit {limit:,})."
        )
    return found
