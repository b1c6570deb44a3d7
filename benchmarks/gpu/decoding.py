"""Decoded tokens of several rows, by one captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu.timing import Bench
from inference import bytes_of_weights

import gecko
from gecko.config import GeckoConfig
from gecko.inference.packed_weights import PackedWeights, decoder_of
from gecko.inference.prefill import inference
from gecko.state import GeckoState

CAPTURED = "one graph"


@dataclass(frozen=True)
class Decoding:
    model: str
    form: str
    rows: int
    seconds: float
    """Seconds of a step of all rows, including the time of the host."""
    launching: float
    """Seconds in which the host launches the kernels of a step."""
    bytes_moved: float
    """Weights, and what a token reads and writes of the states, once."""
    variant: str = ""


def measure(name: str, config: GeckoConfig, rows: int, bench: Bench, variant: str = "") -> Decoding:
    """Time steps of ``rows`` rows, three and a half chunks into their texts; weights are random, states are empty.

    Raises:
        ValueError: there are no kernels for this device and dtype.
    """
    torch.manual_seed(0)
    with bench.device:
        model = gecko.Gecko(config).to(bench.dtype).eval()
    state = state_at(model, rows, 3 * config.chunk_size + config.chunk_size // 2)
    with inference(model):
        call = bench.seconds(_captured(model, state, rows))
    moved = bytes_of_weights(model) + bytes_of_states(state)
    return Decoding(name, CAPTURED, rows, call.seconds, call.launching, moved, variant)


def state_at(model: gecko.Gecko, rows: int, position: int) -> GeckoState:
    """Return a state of zeros whose clock says that ``position`` tokens were read; it belongs to no weights."""
    weight = model.embedding.weight
    state = GeckoState.empty(model.config, rows, value_dtype=weight.dtype, device=weight.device).map(torch.clone)
    state.clock.position.fill_(position)
    return state


def bytes_of_states(state: GeckoState) -> int:
    """Return the bytes of a state that a token reads and writes on average.

    It reads three quarters of the attention window, and the memory; of the previous chunk's summary nothing. Everything
    else it reads and writes: the sums of the current chunk, the moving average and the statistics of norms.
    """
    total = 0.0
    for name, tensor in state.tensors().items():
        once = ".memory.memory" in name or ".normaliser" in name
        share = 3 / 4 if ".attention." in name else 0 if ".previous" in name else 1 if once else 2
        total += share * tensor.nbytes
    return int(total)


def _captured(model: gecko.Gecko, state: GeckoState, rows: int) -> Callable[[], None]:
    if decoder_of(model, state) != "triton":
        raise ValueError("decoding needs a GPU, Triton, and weights in float32 or bfloat16.")
    network: Any = PackedWeights(model, "triton").with_states(state)
    network.step([0] * rows)  # compiles and captures

    return lambda: network.replay(rows)
