"""Decoded tokens of several rows: one captured graph, the same launches one by one, and the model in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu.timing import Bench
from inference import bytes_of_weights

import gecko
from gecko.config import GeckoConfig
from gecko.inference.packed_weights import PackedWeights, decoder_of
from gecko.inference.prefill import inference
from gecko.state import GeckoState

CAPTURED, LAUNCHED, PYTORCH = "one graph", "its launches one by one", "Gecko.step"
FORMS = CAPTURED, LAUNCHED, PYTORCH


@dataclass(frozen=True)
class Decoding:
    model: str
    form: str
    rows: int
    seconds: float
    """Seconds of a step of all rows, including the time of the host."""
    launching: float
    """Seconds in which the host launches the kernels of a step."""
    bytes_read: float
    """Weights, and what a token reads of the states, once."""


def measure(name: str, config: GeckoConfig, form: str, rows: int, bench: Bench) -> Decoding:
    """Time steps of ``rows`` rows, three and a half chunks into their texts; weights are random, states are empty.

    Raises:
        ValueError: there are no kernels for this device and dtype.
    """
    torch.manual_seed(0)
    with bench.device:
        model = gecko.Gecko(config).to(bench.dtype).eval()
    state = state_at(model, rows, 3 * config.chunk_size + config.chunk_size // 2)
    with inference(model):
        step = _stepping(model, state) if form == PYTORCH else _launching(model, state, rows, form)
        call = bench.seconds(step)
    read = bytes_of_weights(model) + bytes_of_states(state)
    return Decoding(name, form, rows, call.seconds, call.launching, read)


def state_at(model: gecko.Gecko, rows: int, position: int) -> GeckoState:
    """Return a state of zeros whose clock says that ``position`` tokens were read; it belongs to no weights."""
    weight = model.embedding.weight
    state = GeckoState.empty(model.config, rows, value_dtype=weight.dtype, device=weight.device).map(torch.clone)
    state.clock.position.fill_(position)
    return replace(state, exclusive=True)


def bytes_of_states(state: GeckoState) -> int:
    """Return the bytes of a state that a token reads on average: three quarters of the attention window, and every
    other tensor except the summary of the previous chunk."""
    total = 0
    for name, tensor in state.tensors().items():
        share = 3 / 4 if ".attention." in name else 0 if ".previous" in name else 1
        total += int(share * tensor.nbytes)
    return total


def _stepping(model: gecko.Gecko, state: GeckoState) -> Callable[[], None]:
    tokens = torch.zeros(state.batch_size, dtype=torch.int64, device=model.embedding.weight.device)
    current = state

    def step() -> None:
        nonlocal current
        _, current = model.step(tokens, current)

    return step


def _launching(model: gecko.Gecko, state: GeckoState, rows: int, form: str) -> Callable[[], None]:
    if decoder_of(model, state) != "triton":
        raise ValueError("decoding needs a GPU, Triton, and weights in float32 or bfloat16.")
    network: Any = PackedWeights(model, "triton").with_states(state)
    network.step([0] * rows)  # compiles and captures

    def launch() -> None:
        for one in network.launches(rows):
            one.run()

    return launch if form == LAUNCHED else lambda: network.replay(rows)
