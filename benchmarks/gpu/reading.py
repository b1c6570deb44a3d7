"""Prefill and decoding at large positions: tokens/s of prefill, and seconds per token by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu.timing import Bench, Call

import gecko
from gecko.config import GeckoConfig
from gecko.inference import read
from gecko.inference.prefill import inference


@dataclass(frozen=True)
class Position:
    model: str
    position: int
    prefill: float
    """Tokens/s over everything read up to this position."""
    decode: float
    """Seconds per token."""
    launching: float
    """Seconds in which the host launches the kernels of one token."""


def positions(name: str, config: GeckoConfig, wanted: list[int], bench: Bench) -> Iterator[Position]:
    """Read to each position in turn, and decode there; weights and text are random."""
    torch.manual_seed(0)
    with bench.device:
        model = gecko.Gecko(config).to(bench.dtype)
    # Compile kernels and fill the allocator, both for the start of a text and for its continuation.
    text = torch.randint(config.vocab_size, (wanted[1],))
    read(model, [text], read(model, [text]).state)
    state, before, seconds = None, 0, 0.0
    for position in wanted:
        text = torch.randint(config.vocab_size, (position - before,))
        found = []
        call = bench.once(lambda text=text, state=state, found=found: found.append(read(model, [text], state)))
        state, before, seconds = found[0].state, position, seconds + call.seconds
        decoding = _decoding(model, state, bench)
        yield Position(name, position, position / seconds, decoding.seconds, decoding.launching)


def _decoding(model: gecko.Gecko, state: gecko.GeckoState, bench: Bench) -> Call:
    """Time decoding steps on a copy of the state, because a step writes into the state that it is given."""
    current = state.map(torch.clone)
    token = torch.zeros(1, dtype=torch.int64, device=bench.device)

    def step() -> None:
        nonlocal current
        _, current = model.step(token, current)

    with inference(model):
        return bench.seconds(step)
