"""Barriers between what some threads of a program write to memory and what others read, in the compiled kernels.

No simulator runs the warps of a program side by side, so a missing barrier changes no number without a card.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.compiling import compiled
from kernels.recording import decode, model_on_nothing, recorded, train
from kernels.sass import Code
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


ACCESS = re.compile(r"tt\.(load|store) (%\w+)[ ,].* : tensor<([\dx]+)x!tt\.ptr")
POINTER = re.compile(r"(%\w+) = tt\.(?:splat|addptr|broadcast|expand_dims) (%\w+)")


def accesses(kernel: Any) -> list[tuple[int, str, str, int]]:
    """Return line, "load" or "store", parameter and number of elements of the accesses to tiles, in the Triton IR."""
    found, origin = [], {}
    for i, line in enumerate(kernel.asm["ttir"].splitlines()):
        if derived := POINTER.search(line):
            origin[derived[1]] = origin.get(derived[2], derived[2])
        if access := ACCESS.search(line):
            size = math.prod(map(int, access[3].split("x")))
            found.append((i, access[1], origin[access[2]], size))
    return found


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("variant", ["gecko", "no-memory", "cumulative"])
def test_states_are_replaced_after_all_threads_have_read_them(variant, rows):
    """If a tile has fewer elements than threads, threads share elements: all of them load, and one of them stores."""
    config = replace(cases.SMALL, **cases.VARIANTS[variant], num_layers=1, cema_modes=1)
    model, checked = model_on_nothing(config, torch.bfloat16), set()
    for configuration in recorded(lambda: decode(model, rows)):
        kernel = compiled(configuration, 90)
        found, lines = accesses(kernel), kernel.asm["ttir"].splitlines()
        for loaded, _, name, _size in (x for x in found if x[1] == "load" and x[3] < 32 * configuration.warps):
            stored = [i for i, kind, other, _ in found if kind == "store" and other == name and i > loaded]
            if stored:
                checked.add(name)
                between = [lines[i] for i in places(kernel, "barrier") if loaded < i < stored[0]]
                # One that is indented more is in a branch that a program may not take.
                assert any(_depth(line) <= _depth(lines[stored[0]]) for line in between), (str(configuration), name)
    assert {"%p_mean", "%p_variance", "%p_state"} <= checked
    assert variant == "no-memory" or {"%p_weight", "%p_normaliser", "%p_previous_weight"} <= checked


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
