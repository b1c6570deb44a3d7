"""Barriers between what some threads of a program write to memory and what others read, in the compiled kernels.

No simulator runs the warps of a program side by side, so a missing barrier changes no number without a card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import triton
from kernels.compiling import compiled
from kernels.recording import decode, model_on_nothing, recorded, train
from kernels.sass import Code, printed
from support import cases

from gecko import GeckoConfig


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Any]]:
    """Return the kernels with barriers, compiled for sm_90, in all configurations of training and decoding gecko-1b."""
    config = replace(GeckoConfig.preset("gecko-1b"), num_layers=1, vocab_size=264)
    model, decoder = model_on_nothing(config), model_on_nothing(config, torch.bfloat16)
    found = recorded(lambda: train(model, 2 * config.chunk_size + 14, "bfloat16", documents=False))
    found += recorded(lambda: decode(decoder, 1))
    names = ("_chain_kernel", "_chain_backward_kernel", "enter_kernel")
    return {
        name: [compiled(configuration, 90) for configuration in found if configuration.kernel.__name__ == name]
        for name in names
    }


def places(kernel: Any, *words: str) -> list[int]:
    """Return the lines of the kernel's Triton IR that have one of these words."""
    lines = kernel.asm["ttir"].splitlines()
    return [i for i, line in enumerate(lines) if any(word in line for word in words)]


@pytest.mark.parametrize("name", ["_chain_kernel", "_chain_backward_kernel"])
def test_a_step_of_the_chain_ends_with_a_barrier(kernels, name):
    """The next step reads what all threads have written."""
    assert kernels[name]
    for kernel in kernels[name]:
        last_store, last_loop = places(kernel, "tt.store")[-1], places(kernel, "scf.yield")[-1]
        assert any(last_store < i < last_loop for i in places(kernel, "barrier"))
        code = Code.of(kernel.asm["cubin"])
        (loop,) = [loop for loop in code.loops if code.depth(loop) == 0]
        inside = [x for x in code.instructions if loop.holds(x.address)]
        last = max(x.address for x in inside if x.kind == "STG")
        assert any(x.kind == "BAR" and x.address > last for x in inside)


def test_the_memory_is_replaced_after_all_threads_have_read_it(kernels):
    assert kernels["enter_kernel"]
    for kernel in kernels["enter_kernel"]:
        last_product, first_store = places(kernel, "tt.dot")[-1], places(kernel, "tt.store")[0]
        assert any(last_product < i < first_store for i in places(kernel, "barrier"))


ACCESS = re.compile(r"tt\.(load|store) (%\w+)[ ,].* : tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>> loc\((#loc\d*)\)")
POINTER = re.compile(r"(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims) (%\w+)")
LOCATION = re.compile(
    r"^(#loc\d*) = loc\((?:callsite\(|\"\w+\"\()?(?:(#loc\d*)|\"[^\"]*/([\w.]+)\":(\d+))", re.MULTILINE
)
MOST_BYTES = 16
"""Bytes of the widest load of a thread."""
Line = tuple[str, int]


class Access(NamedTuple):
    """A load or store of a tile: its line in the Triton IR and in the source, its parameter and its size."""

    ir_line: int
    kind: str
    parameter: str
    elements: int
    bits: int
    """Of an element."""
    source: Line

    def shares(self, threads: int) -> bool:
        """Return whether several threads may hold one element: wide loads give each thread several."""
        return self.elements < threads * max(1, 8 * MOST_BYTES // self.bits)


def accesses(kernel: Any) -> list[Access]:
    """Return the accesses to tiles in the order of the Triton IR."""
    text, found, origin = kernel.asm["ttir"], [], {}
    locations = {name: (of, file, line) for name, of, file, line in LOCATION.findall(text)}
    for i, line in enumerate(text.splitlines()):
        if derived := POINTER.search(line):
            origin[derived[1]] = origin.get(derived[2], derived[2])
        if access := ACCESS.search(line):
            kind, pointer, shape, bits, location = access.groups()
            while locations[location][0]:
                location = locations[location][0]
            source = locations[location][1], int(locations[location][2])
            found.append(Access(i, kind, origin[pointer], math.prod(map(int, shape.split("x"))), int(bits), source))
    return found


def replaced(kernel: Any, threads: int) -> Iterator[tuple[Access, Access]]:
    """Yield each load of elements that several threads may share, with the next store to the same parameter."""
    found = accesses(kernel)
    for load in found:
        if load.kind == "load" and load.shares(threads):
            yield from [(load, x) for x in found if x[1:3] == ("store", load.parameter) and x > load][:1]


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("variant", ["gecko", "no-memory", "cumulative", "shared-keys"])
def test_states_are_replaced_after_all_threads_have_read_them(variant, rows):
    """If a tile has fewer elements than threads can load, threads share some: all load them, and one stores them."""
    config = replace(cases.SMALL, **cases.VARIANTS[variant], num_layers=1, cema_modes=1)
    model, checked = model_on_nothing(config, torch.bfloat16), set()
    for configuration in recorded(lambda: decode(model, rows)):
        kernel = compiled(configuration, 90)
        lines = kernel.asm["ttir"].splitlines()
        for load, store in replaced(kernel, 32 * configuration.warps):
            checked.add(load.parameter)
            between = [lines[i] for i in places(kernel, "barrier") if load.ir_line < i < store.ir_line]
            # One that is indented more is in a branch that a program may not take.
            limit = _depth(lines[store.ir_line])
            assert any(_depth(line) <= limit for line in between), (str(configuration), load.parameter)
            _in_order(kernel, load.source, store.source)
    assert {"%p_mean", "%p_variance", "%p_state"} <= checked
    assert variant == "no-memory" or {"%p_weight", "%p_normaliser", "%p_previous_weight", "%p_value_sum"} <= checked


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _in_order(kernel: Any, load: Line, store: Line) -> None:
    """Assert that in the machine code a barrier stands between what these two lines load and store."""
    wanted = (("LDG", load), ("STG", store))
    order = [x[0] for x in instructions(kernel.asm["cubin"]) if x[0] == "BAR" or x in wanted]
    first, stores = order.index("LDG"), [i for i, kind in enumerate(order) if kind == "STG"]
    assert stores and all("BAR" in order[first:i] and order[i - 1] != "LDG" for i in stores), order


@cache
def instructions(cubin: bytes) -> list[tuple[str, Line]]:
    """Return kind and line of the source of each instruction of a kernel."""
    text = printed(triton.knobs.nvidia.nvdisasm.path, "-g", "-c", cubin=cubin)
    found, line = [], ("", 0)
    for file_name, number, kind in re.findall(
        r'## File ".*?([\w.]+)", line (\d+)|\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)', text
    ):
        line = (file_name, int(number)) if file_name else line
        found += [(kind, line)] if kind else []
    return found
