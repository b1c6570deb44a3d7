"""What a kernel needs of a GPU that is not there: registers, spills and shared memory, by compiling it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from gecko.ops.kernels import Launch

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that one block may have, by compute capability."""

CAPABILITIES = tuple(SHARED_LIMIT)


@dataclass(frozen=True)
class Resources:
    """Of one block: registers of a thread, bytes of a thread that did not fit into them, bytes of shared memory."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def resources(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[Any, Any], capability: int, *,
    warps: int, stages: int, attributes: Mapping[Any, Any] | None = None,
) -> Resources:  # fmt: skip
    """Compile ``kernel`` and read what it takes.

    Args:
        signature: Triton types ("*bf16", "i32", "constexpr") by parameter.
        constants: values of the constexpr parameters.
        capability: 80, 90 or 100.
        attributes: what a launch knows of its arguments, such as alignment; None is nothing.
    """
    source = ASTSource(kernel, dict(signature), dict(constants), dict(attributes or {}))
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    used = _usage(compiled.asm["cubin"])
    return Resources(int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"]), compiled.metadata.shared)


def _usage(cubin: bytes) -> dict[str, str]:
    """Of the one kernel in ``cubin``. What a thread spills lies on its stack, which kernels use for nothing else."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if "REG:" in line]
    assert len(lines) == 1, text
    return dict(re.findall(r"(\w+):(\d+)", lines[0]))


def resources_of(launch: Launch, capability: int) -> Resources:
    """What the kernel takes that Triton would compile for this launch: types, alignment and constants are its own."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(backend, {}, bound, specialization, None)
    return resources(
        kernel, signature, constants, capability, warps=launch.warps, stages=launch.stages, attributes=attributes
    )


def check(launch: Launch, capability: int, *, registers: int) -> Resources:
    """Fails on spills, on shared memory over the card's limit, and on more ``registers`` than that."""
    found = resources_of(launch, capability)
    limit = SHARED_LIMIT[capability]
    if found.spilled_bytes or found.shared_bytes > limit or found.registers > registers:
        constants = {k: v for k, v in launch.arguments.items() if isinstance(v, int | float | str | bool)}
        pytest.fail(
            f"{launch.kernel.__name__} for sm_{capability} with {launch.warps} warps, {launch.stages} stages and "
            f"{constants}: {found.registers} registers (budget {registers}), {found.spilled_bytes} bytes spilled "
            f"(must be 0), {found.shared_bytes:,} bytes of shared memory (limit {limit:,})."
        )
    return found


def launches(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that ``call`` would run; its tensors are on the meta device, so nothing is computed or filled.

    ``call`` takes the plain functions below the custom ops: those would answer meta tensors by their fakes.
    """
    found: list[Launch] = []
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", lambda launch: found.append(launch))
        call()
    assert found
    return found
