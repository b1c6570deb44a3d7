"""Decoded tokens of several rows, by one captured graph: their time, and whether equal rows stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from gpu.record import Row, noted
from gpu.timing import DTYPE, Bench
from inference import bytes_of_weights
from torch import Tensor, nn

from gecko import Gecko
from gecko.config import GeckoConfig
from gecko.inference.packed_weights import PackedWeights, decoder_of
from gecko.inference.prefill import inference
from gecko.models import meta_model
from gecko.ops.decoding import Weights
from gecko.state import GeckoState

CAPTURED = "one graph"


@contextmanager
def decoder(config: GeckoConfig, rows: int, position: int, bench: Bench) -> Iterator[tuple[Gecko, GeckoState, Any]]:
    """Return a model with random weights, a state of zeros whose clock says that ``position`` tokens were read, and the
    network of both. The context is that of inference.

    Raises:
        ValueError: there are no kernels for this device.
    """
    model = bench.model(config).to(DTYPE).eval()
    state = GeckoState.empty(config, rows, value_dtype=DTYPE, device=bench.device).map(torch.clone)
    state.clock.position.fill_(position)
    with inference(model):
        if decoder_of(model, state) != "triton":
            raise ValueError("decoding needs a GPU and Triton.")
        yield model, state, PackedWeights(model, "triton").with_states(state)


def measure(name: str, config: GeckoConfig, rows: int, bench: Bench, variant: str = "") -> Row:
    """Time steps of ``rows`` rows, three and a half chunks into their texts, including the time of the host. The bytes
    are those of the weights, and of what a token reads and writes of the states, once."""
    with decoder(config, rows, 3 * config.chunk_size + config.chunk_size // 2, bench) as (model, state, network):
        network.step([0] * rows)  # compiles and captures
        call = bench.seconds(lambda: network.replay(rows))
        moved = bytes_of_weights(model) + bytes_of_states(state)
    return {
        "table": "decoding", "model": name, "rows": rows, "form": f"{CAPTURED}, {variant}".removesuffix(", "),
        "seconds": call.seconds, "launching": call.launching, "speed": rows / call.seconds, "bytes": moved,
        "bandwidth": moved / call.seconds,
    }  # fmt: skip


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


def equal_rows(config: GeckoConfig, rows: int, tokens: int, again: int, bench: Bench, name: str) -> Iterator[Row]:
    """Decode equal rows over several ends of chunks, and one step again and again from one state: bit for bit."""
    with decoder(config, rows, 0, bench) as (_, state, network):
        text, unequal = torch.randint(config.vocab_size, (tokens + 1,)).tolist(), 0
        for token in text[:-1]:
            logits = network.step([token] * rows)
            state.clock.position.add_(1)
            unequal += _apart(logits)
        yield noted(f"{name}steps of {tokens} whose {rows} equal rows got different logits", unequal, "steps")
        floats = [x for x in state.tensors().values() if x.is_floating_point()]
        apart = sum(map(_apart, floats))
        yield noted(f"{name}of {len(floats)} states, those that differ between equal rows", apart, "states")
        changed = _changed(network, state, text[-1], again)
        yield noted(f"{name}of {again} equal steps, those with other logits or states than the first", changed, "steps")


def _apart(x: Tensor) -> bool:
    """Return whether the rows of a tensor differ."""
    return bool((x != x[:1]).any())


def _changed(network: Any, state: GeckoState, token: int, again: int) -> int:
    """Make a step ``again`` times from one state; return how often logits or states were not those of the first."""
    tensors = [x for name, x in state.tensors().items() if not name.startswith("clock")]
    before, wanted, changed = [x.clone() for x in tensors], None, 0
    for _ in range(again):
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
        network.buffers.position.fill_(int(state.clock.position[0]))
        network.buffers.token.fill_(token)
        network.replay(state.batch_size)
        found = [x.clone() for x in (network.buffers.logits, *tensors)]
        wanted = wanted or found
        changed += any(bool((a != b).any()) for a, b in zip(found, wanted, strict=True))
    return changed


def measure_in_8_bits(name: str, config: GeckoConfig, rows: int, bench: Bench) -> Row:
    """Time steps of a decoder that has the matrices of blocks in 8 bits, with a scale per output."""
    kept = PackedWeights.__init__

    def packed(self: Any, *arguments: Any) -> None:
        kept(self, *arguments)
        self._layers = [{name: _quantized(x) for name, x in layer.items()} for layer in self._layers]

    with patch.object(PackedWeights, "__init__", packed):
        found = measure(name, config, rows, bench, "8 bits")
    matrices = [x.weight for x in meta_model(config).blocks.modules() if isinstance(x, nn.Linear)]
    saved = sum(x.numel() * (DTYPE.itemsize - 1) - 4 * len(x) for x in matrices)
    moved = found["bytes"] - saved
    return {**found, "bytes": moved, "bandwidth": moved / found["seconds"]}


def _quantized(x: Any) -> Any:
    if not isinstance(x, Weights):
        return x
    scale = x.weight.float().abs().amax(1).clamp(min=1e-8) / 127
    return Weights((x.weight.float() / scale[:, None]).round().to(torch.int8), scale, x.bias)
