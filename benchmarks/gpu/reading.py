"""Reading and decoding far into a text: tokens a second of prefill, and the time of a token at a position."""

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
    """Tokens a second, over all that was read up to here."""
    decode: float
    """Seconds of one token."""
    launching: float
    """Seconds in which the host launched its kernels."""


def positions(name: str, config: GeckoConfig, wanted: list[int], bench: Bench) -> Iterator[Position]:
    """Read on to each position in turn, and decode there; weights and text are random."""
    torch.manual_seed(0)
    with bench.device:
        model = gecko.Gecko(config).to(bench.dtype)
    # Kernels are compiled, memory is found; a text that goes on takes others than one that begins.
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
    """A step writes into the state that it is given: a copy of the one that reading goes on from."""
    current = state.map(torch.clone)
    token = torch.zeros(1, dtype=torch.int64, device=bench.device)

    def step() -> None:
        nonlocal current
        _, current = model.step(token, current)

    with inference(model):
        return bench.seconds(step)
