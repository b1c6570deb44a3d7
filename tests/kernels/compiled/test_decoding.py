"""What a decoded token costs the host of a GPU: launches, and nothing else. The GPU is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from support import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gecko import Gecko, GeckoConfig
from gecko.inference.packed_weights import PackedWeights
from gecko.ops.backends.dispatch import Launch
from gecko.state import GeckoState

ROWS = 3
MOST_LAUNCHES = 12
"""Of a layer."""
GPU = "meta"
"""Device that stands for a GPU: its tensors have no numbers, so every read is noticed."""


class Host(TorchDispatchMode):
    """Counts what the host asks of the GPU besides launches."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if GPU in given and str(kwargs.get("device")) == "cpu":
            self.asked["read"] += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        out = func(*args, **kwargs)
        if given == {GPU, "cpu"}:
            self.asked["copy"] += 1
        elif func is torch.ops.aten.copy_.default:
            self.asked["copy on the GPU"] += 1
        elif not func.is_view and any(x.device.type == GPU for x in tree_leaves(out) if isinstance(x, Tensor)):
            self.asked["allocation or operation"] += 1
        return out


class Graph:
    """A captured graph that launches what was launched while it was captured."""

    captured: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch.run()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the list of launches on a GPU whose graphs are fake too."""
    found: list[Launch] = []

    @contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        begin = len(found)
        yield
        graph.launches = found[begin:]
        del found[begin:]
        Graph.captured.append(graph)

    monkeypatch.setattr(Launch, "run", lambda launch: found.append(launch))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(Graph, "captured", [])
    return found


def network_of(config: GeckoConfig, dtype: torch.dtype, paged: bool = False) -> tuple[Any, GeckoState]:
    """Return a network whose tensors are on the GPU, and its state, whose clock is on the host."""
    with torch.device(GPU):
        model = Gecko(config).to(dtype)
    with torch.no_grad(), torch.device(GPU):
        packed = PackedWeights(model, "triton")
        state = GeckoState.empty(config, ROWS + 1, value_dtype=dtype, device=GPU).map(torch.clone)
        return packed.with_states(cases.in_pages(state) if paged else state), state


def launches_of_a_token(config: GeckoConfig, dtype: torch.dtype, launched: list[Launch]) -> int:
    """Return their number; assert that a token takes nothing else of the host."""
    launched.clear()
    Graph.captured.clear()
    network, state = network_of(config, dtype)
    network.step([1] * ROWS)
    first = list(launched)
    state.clock.position.add_(1)
    with Host() as host:
        for _ in range(3):
            launched.clear()
            network.replay(ROWS)
            assert all(a is b for a, b in zip(launched, first, strict=True)), "the launches that were captured"
    assert not host.asked
    assert len(Graph.captured) == 1
    return len(launched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["gecko", "no-memory", "megalodon", "llama", "shared-keys"])
def test_a_token_takes_launches_only(variant: str, dtype: torch.dtype, launched: list[Launch]) -> None:
    config = replace(cases.SMALL, **cases.VARIANTS[variant])
    one, two = (launches_of_a_token(replace(config, num_layers=n), dtype, launched) for n in (1, 2))
    print(f"{two - one} launches of a layer, {2 * one - two} of the ends")
    assert two - one <= MOST_LAUNCHES


@pytest.mark.parametrize("variant", ["gecko", "no-memory", "megalodon", "llama", "shared-keys"])
def test_a_token_of_states_in_pages_takes_launches_and_three_copies_on_the_gpu(
    variant: str, launched: list[Launch]
) -> None:
    """As in vLLM, whose product with the head is one more: at most two more than in the decoder, which draws too."""
    config = replace(cases.SMALL, **cases.VARIANTS[variant])
    most = launches_of_a_token(config, torch.bfloat16, launched) + 2
    Graph.captured.clear()
    network, _ = network_of(config, torch.bfloat16, paged=True)
    rows = [torch.empty(ROWS, dtype=dtype, device=GPU) for dtype in (torch.int32, torch.int32, torch.int64)]
    for _ in range(4):
        launched.clear()
        with Host() as host:
            hidden = network.hidden(*rows)
        assert host.asked == {"copy on the GPU": 3}
        assert hidden._base is network.buffers.normal
    assert len(launched) + host.asked.total() + 1 <= most
    assert len(Graph.captured) == 1


def test_the_host_reads_the_tokens_once_and_copies_nothing(launched: list[Launch]) -> None:
    """As a batch of plain sampling does: step, draw, and step with the tokens that were drawn."""
    network, state = network_of(cases.SMALL, torch.bfloat16)
    tokens = [1] * ROWS
    for count in range(4):
        with Host() as host:
            logits = network.step(tokens)
            state.clock.position.add_(1)
            tokens = network.draw(logits, [0.5] * ROWS, [7] * ROWS)
            network.draw(logits, [0.5] * ROWS, [7] * ROWS)
        if count:  # the first one sets options and clock
            assert host.asked == {"read": 1}


@pytest.mark.parametrize("kept", [64, 2])
def test_each_number_of_rows_is_captured_once(
    kept: int, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than so many graphs are kept; other steps are launched one by one."""
    monkeypatch.setattr("gecko.ops.decoding.triton.GRAPHS", kept)
    network, state = network_of(cases.SMALL, torch.float32)
    steps = []
    for rows in (1, 2, 1, 3, 2, 1, 3):
        launched.clear()
        network.step([1] * rows)
        state.clock.position[:rows] += 1
        steps.append(list(launched))
    assert len(Graph.captured) == min(kept, 3) and steps[6] == steps[3] != []


def test_tokens_of_the_host_and_a_moved_clock_are_copied(launched: list[Launch]) -> None:
    network, state = network_of(cases.SMALL, torch.float32)
    network.step([1] * ROWS)
    state.clock.position.add_(1)
    with Host():
        tokens = network.draw(network.buffers.logits[:ROWS], [0.0] * ROWS, [0] * ROWS)
    with Host() as host:
        network.step([token + 1 for token in tokens])
    assert host.asked == {"copy": 1}
    with Host() as host:  # the clock was not counted on
        network.step([1] * ROWS)
    assert host.asked["copy"] == 2
