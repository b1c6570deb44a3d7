"""The decoder's kernels compile for states in pages, as vLLM holds them, and need what they need for slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernels.compiling import resources
from kernels.recording import Configuration, recorded, take_kernels
from support import cases

from gecko import Gecko
from gecko.inference.packed_weights import PackedWeights
from gecko.state import GeckoState

ROWS = 2


def kernels(model: Gecko, state: GeckoState) -> dict[str, Configuration]:
    """Return one configuration of every kernel that a step up to the head runs, by the kernel's name."""
    network = PackedWeights(model, "triton").with_states(state)
    tokens = [1] * ROWS
    calls: dict[bool, Callable[[], object]] = {
        False: lambda: network.step(tokens),
        True: lambda: network.hidden(*map(torch.tensor, (tokens, [1, 0], [0, 5]))),
    }  # fmt: skip
    is_paged = not state.mixers[0].attention.keys.is_contiguous()
    return {one.kernel.__name__: one for one in recorded(calls[is_paged])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "count"), [("gecko", 5), ("llama", 3)])
def test_kernels_of_pages_compile_and_spill_nothing(
    variant: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_kernels(monkeypatch)
    config = replace(cases.SMALL, **cases.VARIANTS[variant])
    model = Gecko(config).to(dtype)
    state = GeckoState.empty(config, ROWS, value_dtype=dtype).map(torch.clone)
    slots, pages = kernels(model, state), kernels(model, cases.in_pages(state))
    stateful = [name for name, one in pages.items() if any(key == "page_bytes" for key, _ in one.signature)]
    assert len(stateful) == count
    for name in stateful:
        found, plain = (resources(of[name], 90) for of in (pages, slots))
        assert found.spilled_bytes == 0
        assert found.registers <= plain.registers + 32
