"""Many texts in one engine: tokens/s by number of texts, time between tokens while a long prompt is read, the time of
short prompts in one call of the model, and the time of drafted tokens in one call against steps of decoding.

    python benchmarks/serving_engine.py --threads 2 --write

Without --model the weights are random, which does not change the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch
from measuring import command, machine, parser_of, publish

import gecko
from gecko.inference import Prefill, Sampling, read
from gecko.inference.decoder import Decoder
from gecko.inference.prefill import inference
from gecko.inference.request import Finished, Request
from gecko.inference.scheduler import STEP_SECONDS, Engine
from gecko.runtime.process import keep_freed_memory

SAMPLINGS = {
    "greedy": Sampling(0.0),
    "temperature 1": Sampling(1.0),
    "top-k 50, top-p 0.9, min-p 0.05, penalty 1.2": Sampling(0.8, 50, 0.9, 0.05, 1.2),
}
"""Sampling parameters of all rows, by their name in the table."""
ROWS = (1, 2, 4, 8, 16, 32)
SECONDS_TO_WARM_UP = 1.0
PROMPTS = ((8, 16), (16, 16), (8, 64), (16, 64), (8, 128), (8, 256))
"""Numbers of short prompts that arrive together, and their tokens."""
DRAFTS = (2, 4, 8, 16)
"""Numbers of drafted tokens that one call verifies."""
DRAFTED = ("tiny", "gecko-125m")
STEPS = 16
ROUNDS = 9


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between two tokens of a text."""

    median: float
    worst_of_hundred: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Gaps:
        ordered = sorted(1e3 * gap for gap in seconds)
        return cls(statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1])


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    preset = gecko.GeckoConfig.preset(arguments.preset)
    model = gecko.load(arguments.model) if arguments.model else gecko.Gecko(preset).eval()
    _warm_up(model)
    speeds = {
        name: [measure_throughput(model, sampling, rows, arguments.steps) for rows in ROWS]
        for name, sampling in SAMPLINGS.items()
    }
    gaps = measure_gaps(model, arguments.steps, arguments.prompt)
    lines = [*report(arguments, model, speeds, gaps), *report_prompts(model), *report_drafts()]
    publish("serving_engine.md", lines, arguments.write)


def measure_throughput(model: gecko.Gecko, sampling: Sampling, rows: int, steps: int) -> float:
    """Return the tokens/s of ``rows`` texts together, at different positions; the median step counts."""
    engine = _running(model, sampling, rows)
    return rows / statistics.median(_step_times(engine, steps, rows))


def measure_gaps(model: gecko.Gecko, steps: int, prompt: int) -> dict[str, Gaps]:
    """Measure the gaps of eight texts, alone and while the prompt of another text is read."""
    engine = _running(model, Sampling(1.0), 8, places=9)
    found = {"alone": Gaps.of(_step_times(engine, steps, 8))}
    engine.submit(_request(prompt, Sampling(1.0), 1))
    found[f"while a prompt of {prompt:,} tokens is read"] = Gaps.of(_times_while_reading(engine))
    return found


def report(
    arguments: argparse.Namespace, model: gecko.Gecko, speeds: dict[str, list[float]], gaps: dict[str, Gaps]
) -> list[str]:
    """Return the results in Markdown."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return [
        "# Many texts side by side", "",
        f"{date.today()}, {machine()}. Model: {arguments.model or arguments.preset}, {size:,} parameters, float32. "
        f"Command: `{command(arguments)}`.", "",
        f"## Tokens a second, all texts together, by the median of {arguments.steps} steps", "",
        "| rows | " + " | ".join(speeds) + " |", "|---:|" + "---:|" * len(speeds),
        *(f"| {rows} | " + " | ".join(f"{speed[i]:,.0f}" for speed in speeds.values()) + " |"
          for i, rows in enumerate(ROWS)), "",
        "16 rows against 1: " + ", ".join(
            f"× {speed[ROWS.index(16)] / speed[0]:.1f} ({name})" for name, speed in speeds.items()) + ".", "",
        "## Time between tokens of eight running texts", "",
        f"The prompt is read in pieces, one between two tokens, fitted to steps of {1e3 * STEP_SECONDS:.0f} ms.", "",
        "| | median, ms | 99 of 100 within, ms | longest, ms |", "|---|---:|---:|---:|",
        *(f"| {name} | {gap.median:.1f} | {gap.worst_of_hundred:.1f} | {gap.longest:.1f} |"
          for name, gap in gaps.items()),
    ]  # fmt: skip


def report_prompts(model: gecko.Gecko) -> list[str]:
    """Return the times to read short prompts of different lengths, one after the other and together, in Markdown."""
    rows = []
    for count, longest in PROMPTS:
        alone, together = (_reading_time(model, count, longest, places) for places in (1, count))
        rows.append(f"| {count} of up to {longest} tokens | {alone:.1f} | {together:.1f} | × {alone / together:.1f} |")
    return [
        "", "## Short prompts that arrive together", "",
        "Their lengths are spread evenly over the upper quarter. One place reads them one after the other; with a "
        "place for each they are read in one call of the model. Each has one new token.", "",
        "| prompts | one by one, ms | in one call, ms | |", "|---|---:|---:|---:|", *rows,
    ]  # fmt: skip


def _reading_time(model: gecko.Gecko, count: int, longest: int, places: int) -> float:
    lengths = [longest - i * longest // (4 * count) for i in range(count)]

    def work() -> None:
        engine = Engine(model, rows=places)
        for length in lengths:
            engine.submit(_request(length, Sampling(0.0), 1))
        while not engine.idle:
            engine.step()

    return _median_ms(work)


def report_drafts() -> list[str]:
    """Return the time to verify k drafted tokens in one call, beside that of k steps of decoding, in Markdown."""
    rows = [row for preset in DRAFTED for row in _draft_rows(preset)]
    return [
        "", "## Drafted tokens", "",
        "One call of the model on k drafted tokens after 1,000 others, which gives the logits to verify them, against "
        "one step of the decoder for one text. The last column is the number of steps that take as long as the call: "
        "drafts would pay if one call replaced more steps than that.", "",
        "| model | k | one call, ms | a step, ms | steps in the time of the call |", "|---|---:|---:|---:|---:|", *rows,
    ]  # fmt: skip


def _draft_rows(preset: str) -> list[str]:
    model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
    prefill = read(model, [torch.randint(0, 256, (1000,))])
    with inference(model):
        decoder = Decoder(model, 1)
        decoder.add(prefill.state, prefill.seen)
        step = _median_ms(lambda: [decoder.step([65]) for _ in range(STEPS)]) / STEPS
        calls = {drafted: _median_ms(partial(_verify, model, prefill, drafted)) for drafted in DRAFTS}
    return [f"| {preset} | {k} | {call:.2f} | {step:.2f} | {call / step:.1f} |" for k, call in calls.items()]


def _verify(model: gecko.Gecko, prefill: Prefill, drafted: int) -> None:
    model(torch.full((1, drafted), 65), state=prefill.state)


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def _running(model: gecko.Gecko, sampling: Sampling, rows: int, places: int | None = None) -> Engine:
    """Return an engine in which ``rows`` texts are being continued, without an end."""
    engine = Engine(model, rows=places or rows)
    for row in range(rows):
        engine.submit(_request(10 + 37 * row, sampling, 1 << 40, seed=row))
    while engine.tokens_made < 10 * rows * rows:
        engine.step()
    return engine


def _request(length: int, sampling: Sampling, new: int, seed: int = 0) -> Request:
    return Request(torch.randint(0, 256, (length,)), new, sampling, seed)


def _step_times(engine: Engine, steps: int, rows: int) -> list[float]:
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - begin)
        assert len(events) == rows
    return times


def _times_while_reading(engine: Engine) -> list[float]:
    """Return the times of the steps until the new text has its only token."""
    times: list[float] = []
    finished = False
    while not finished:
        begin = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - begin)
        finished = any(isinstance(event, Finished) for event in events)
    return times


def _warm_up(model: gecko.Gecko) -> None:
    """Run an engine for some steps: the first calls of a process are slower."""
    engine, begin = _running(model, Sampling(1.0), 16), time.perf_counter()
    while time.perf_counter() - begin < SECONDS_TO_WARM_UP:
        engine.step()


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--steps", type=int, default=300, help="steps measured for each number")
    parser.add_argument("--prompt", type=int, default=50_000, help="tokens of the long prompt")
    parser.add_argument("--preset", default="tiny", help="architecture, with random weights")
    parser.add_argument("--model", help="a model's folder instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
