"""The engine under closed-loop texts: its CPU seconds against the ideal, without a server.

    python benchmarks/engine_load.py

A text that ends is replaced by another at once. The ideal CPU seconds are those of the same work at the best rates that
this process measures before: prompt tokens as in one long prompt, read in the fastest pieces; new tokens as in steps of
a batch in which every place is taken. ``server_load.py`` measures the same texts over HTTP.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import gecko
from gecko.inference import Prefill, Sampling, read
from gecko.inference.decoder import Decoder
from gecko.inference.request import Finished, Request, Token
from gecko.inference.scheduler import Engine
from gecko.runtime.process import keep_freed_memory

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
    """Work, steps and waiting times of an engine; times in seconds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    cpu: float = 0
    wall: float = 0
    steps: int = 0
    firsts: list[tuple[int, float]] = field(default_factory=list)
    """Length of a prompt, and time to its first token."""
    between: list[float] = field(default_factory=list)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset(arguments.preset)).eval()
    rates = best_rates(model, arguments.rows)
    load = run(model, arguments.rows, arguments.texts, arguments.seconds)
    print(f"reading: {1 / rates.read:,.0f} tokens per CPU second in pieces of {rates.piece}; "
          f"steps of {arguments.rows} rows: {1 / rates.step:,.0f} tokens per CPU second")  # fmt: skip
    print(f"engine: {load.prompt_tokens:,} prompt tokens, {load.new_tokens:,} new tokens, {load.steps:,} steps, "
          f"{load.wall:.1f} s, {load.cpu:.1f} CPU s; ideal "
          f"{rates.ideal(load.prompt_tokens, load.new_tokens) / load.cpu:.0%}")  # fmt: skip
    print("; ".join(f"{name}: {value:.3f} s" for name, value in waits(load.firsts, load.between).items()))


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
    clients = _Clients(engine, chance)
    for _ in range(texts):
        clients.submit()
    clients.step_for(WARM_UP)
    clients.load = load = EngineLoad(-engine.prompt_tokens_read, -engine.tokens_made)
    cpu, begin = time.process_time(), time.perf_counter()
    clients.step_for(seconds)
    load.cpu, load.wall = time.process_time() - cpu, time.perf_counter() - begin
    load.prompt_tokens += engine.prompt_tokens_read
    load.new_tokens += engine.tokens_made
    return load


class _Clients:
    """Texts of a closed loop: one that ends is replaced at once."""

    def __init__(self, engine: Engine, chance: random.Random) -> None:
        self._engine, self._chance = engine, chance
        self._lengths: dict[int, int] = {}
        self._last: dict[int, float] = {}
        """Time of the last token of a text, or of its arrival."""
        self._begun: set[int] = set()
        self.load = EngineLoad()

    def submit(self) -> None:
        length, new = draw_sizes(self._chance)
        prompt = torch.randint(97, 123, (length,))
        request = self._engine.submit(Request(prompt, new, Sampling(1.0), seed=length))
        self._lengths[request], self._last[request] = length, time.perf_counter()

    def step_for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            events = self._engine.step()
            self.load.steps += 1
            now = time.perf_counter()
            for event in events:
                if isinstance(event, Token):
                    self._take_token(event.request_id, now)
                else:
                    self._take_end(event)

    def _take_token(self, request: int, now: float) -> None:
        waited, self._last[request] = now - self._last[request], now
        if request in self._begun:
            self.load.between.append(waited)
        else:
            self._begun.add(request)
            self.load.firsts.append((self._lengths[request], waited))

    def _take_end(self, event: Finished) -> None:
        if event.reason != "length":
            raise RuntimeError(f"every text must end by its length; one ended by {event.reason}: {event.error}")
        self._begun.discard(event.request_id)
        del self._lengths[event.request_id], self._last[event.request_id]
        self.submit()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="texts that the engine continues side by side")
    parser.add_argument("--preset", default="tiny", help="architecture, with random weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
