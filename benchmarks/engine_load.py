"""The engine under closed-loop texts: its CPU seconds against the ideal, without a server, for ``server_load.py``.

A text that ends is replaced by another at once. The ideal CPU seconds are those of the same work at the best rates that
this process measures before: prompt tokens as in one long prompt, read in the fastest pieces; new tokens as in steps of
a batch in which every place is taken.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import gecko
from gecko.inference import Prefill, Sampling, read
from gecko.inference.decoder import Decoder
from gecko.inference.request import Finished, Request
from gecko.inference.scheduler import Engine

SHORTEST, LONGEST = 16, 20_000
"""Tokens of a prompt, evenly by logarithm."""
FEWEST, MOST = 8, 64
"""New tokens of a text."""
SHORT = 256
"""Longest prompt whose first token must come soon."""
WARM_UP = 5.0
"""Seconds that do not count."""
PIECES = (1024, 2048, 4096, 8192)
"""Sizes of pieces that are tried for the best rate of reading."""
ROUNDS = 5


@dataclass(frozen=True)
class Rates:
    """CPU seconds of a token at the best rate."""

    read: float
    step: float
    piece: int
    """Tokens of the pieces with the best rate of reading."""

    def ideal(self, prompt_tokens: float, new_tokens: float) -> float:
        """Return the CPU seconds of this work."""
        return prompt_tokens * self.read + new_tokens * self.step


@dataclass
class EngineLoad:
    """Work of an engine; times in seconds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    cpu: float = 0
    wall: float = 0


def waits(firsts: Sequence[tuple[int, float]], between: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of waiting that are asked of a load, in seconds."""
    short = [first for length, first in firsts if length <= SHORT]
    return {
        f"prompts of up to {SHORT} tokens, first token p50": percentile(short, 0.5),
        f"prompts of up to {SHORT} tokens, first token p99": percentile(short, 0.99),
        "between tokens p99": percentile(between, 0.99),
    }


def draw_sizes(chance: random.Random) -> tuple[int, int]:
    """Return the prompt tokens and new tokens of a text."""
    length = round(math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST))))
    return length, chance.randint(FEWEST, MOST)


def best_rates(model: gecko.Gecko, rows: int) -> Rates:
    """Measure the best rates of this process with one thread of work at a time; medians count."""
    prompt = torch.randint(0, 256, (2 * max(PIECES),))
    prefill = read(model, [prompt])
    reading = {piece: _median_cpu(lambda piece=piece: read(model, [prompt], piece=piece)) for piece in PIECES}
    piece = min(reading, key=reading.__getitem__)
    return Rates(reading[piece] / len(prompt), _step_cpu(model, prefill, rows), piece)


def _step_cpu(model: gecko.Gecko, prefill: Prefill, rows: int, steps: int = 100) -> float:
    """Return the CPU seconds of a token in a step of ``rows`` texts."""
    decoder = Decoder(model, rows)
    tokens = [65] * rows
    with torch.inference_mode():
        for _ in range(rows):
            decoder.add(prefill.state, prefill.seen)

        def run_steps() -> None:
            for _ in range(steps):
                decoder.step(tokens)

        run_steps()
        return _median_cpu(run_steps) / steps / rows


def _median_cpu(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def run(model: gecko.Gecko, rows: int, texts: int, seconds: float) -> EngineLoad:
    """Run an engine with ``texts`` texts for some seconds, after a warm-up."""
    engine, chance = Engine(model, rows=rows, max_queued=texts), random.Random(0)
    for _ in range(texts):
        _submit(engine, chance)
    _step_for(engine, chance, WARM_UP)
    prompt_tokens, new_tokens = engine.prompt_tokens_read, engine.tokens_made
    cpu, begin = time.process_time(), time.perf_counter()
    _step_for(engine, chance, seconds)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    return EngineLoad(engine.prompt_tokens_read - prompt_tokens, engine.tokens_made - new_tokens, cpu, wall)


def _submit(engine: Engine, chance: random.Random) -> None:
    length, new = draw_sizes(chance)
    engine.submit(Request(torch.randint(97, 123, (length,)), new, Sampling(1.0), seed=length))


def _step_for(engine: Engine, chance: random.Random, seconds: float) -> None:
    """Run the engine; a text that ends is replaced at once."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for event in engine.step():
            if isinstance(event, Finished):
                if event.reason != "length":
                    raise RuntimeError(f"texts must end by their length; one ended by {event.reason}: {event.error}")
                _submit(engine, chance)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
