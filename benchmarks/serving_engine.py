"""Many texts in one engine: tokens/s by number of texts, time between tokens while a long prompt is read, the time of
short prompts in one call of the model, and the time of drafted tokens in one call against steps of decoding.

    python benchmarks/serving_engine.py --threads 2 --write

Without --model the weights are random, which does not change the times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from measuring import described, median_seconds, parsed, parser_of, publish, seconds_of, table

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


def request(length: int, sampling: Sampling, new: int, seed: int = 0) -> Request:
    return Request(torch.randint(0, 256, (length,)), new, sampling, seed)


def running(model: gecko.Gecko, sampling: Sampling, rows: int, places: int | None = None) -> Engine:
    """Return an engine in which ``rows`` texts are being continued, without an end."""
    engine = Engine(model, rows=places or rows)
    for row in range(rows):
        engine.submit(request(10 + 37 * row, sampling, 1 << 40, seed=row))
    while engine.tokens_made < 10 * rows * rows:
        engine.step()
    return engine


def speed(model: gecko.Gecko, sampling: Sampling, rows: int, steps: int) -> float:
    """Return the tokens/s of ``rows`` texts together, at different positions; the median step counts."""
    engine = running(model, sampling, rows)
    seconds = median_seconds(engine.step, steps)
    assert len(engine.step()) == rows
    return rows / seconds


def gap_rows(model: gecko.Gecko, steps: int, prompt: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield milliseconds between tokens of eight texts, alone and while the prompt of another text is read."""
    engine = running(model, Sampling(1.0), 8, places=9)
    times = [seconds_of(engine.step) for _ in range(steps)]
    yield "alone", *gaps(times)
    engine.submit(request(prompt, Sampling(1.0), 1))
    times, finished = [], list[object]()

    def step() -> None:
        finished.extend(event for event in engine.step() if isinstance(event, Finished))

    while not finished:
        times.append(seconds_of(step))
    yield f"while a prompt of {prompt:,} tokens is read", *gaps(times)


def gaps(seconds: list[float]) -> tuple[float, float, float]:
    """Return the median, the worst of hundred and the longest, in milliseconds."""
    ordered = sorted(1e3 * gap for gap in seconds)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def prompt_rows(model: gecko.Gecko) -> Iterator[tuple[object, ...]]:
    """Yield the times to read short prompts of different lengths, one after the other and together."""

    def work(lengths: list[int], places: int) -> None:
        engine = Engine(model, rows=places)
        for length in lengths:
            engine.submit(request(length, Sampling(0.0), 1))
        while not engine.idle:
            engine.step()

    for count, longest in PROMPTS:
        lengths = [longest - i * longest // (4 * count) for i in range(count)]
        alone, together = (1e3 * median_seconds(partial(work, lengths, places), ROUNDS) for places in (1, count))
        yield f"{count} of up to {longest} tokens", alone, together, f"× {alone / together:.1f}"


def draft_rows(preset: str) -> Iterator[tuple[object, ...]]:
    """Yield the times to verify k drafted tokens in one call, beside that of k steps of decoding."""
    model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
    prefill: Prefill = read(model, [torch.randint(0, 256, (1000,))])
    with inference(model):
        decoder = Decoder(model, 1)
        decoder.add(prefill.state, prefill.seen)
        step = 1e3 * median_seconds(lambda: [decoder.step([65]) for _ in range(STEPS)], ROUNDS) / STEPS
        for drafted in DRAFTS:
            verify = partial(model, torch.full((1, drafted), 65), state=prefill.state)
            call = 1e3 * median_seconds(verify, ROUNDS)
            yield preset, drafted, call, step, call / step


def main() -> None:
    given = parsed(parser_of(
        __doc__, threads=True, steps=(300, "steps measured for each number"), prompt=(50_000, "tokens of the long one"),
        preset=("tiny", "architecture, with random weights"), model=(None, "a model's folder instead"),
    ))  # fmt: skip
    keep_freed_memory()
    torch.manual_seed(0)
    preset = gecko.GeckoConfig.preset(given.preset)
    model = gecko.load(given.model) if given.model else gecko.Gecko(preset).eval()
    engine, seconds = running(model, Sampling(1.0), 16), 0.0
    while seconds < SECONDS_TO_WARM_UP:  # the first calls of a process are slower
        seconds += seconds_of(engine.step)
    speeds = {name: [speed(model, one, rows, given.steps) for rows in ROWS] for name, one in SAMPLINGS.items()}
    of_sixteen = (f"× {found[ROWS.index(16)] / found[0]:.1f} ({name})" for name, found in speeds.items())
    gaps_found = list(gap_rows(model, given.steps, given.prompt))
    publish(
        "serving_engine.md", given, "Many texts side by side", described(model, given.model or given.preset),
        f"## Tokens a second, all texts together, by the median of {given.steps} steps",
        table(["rows|,", *(f"{name}|,.0f" for name in speeds)], zip(ROWS, *speeds.values(), strict=True)),
        f"16 rows against 1: {', '.join(of_sixteen)}.",
        "## Time between tokens of eight running texts",
        f"The prompt is read in pieces, one between two tokens, fitted to steps of {1e3 * STEP_SECONDS:.0f} ms.",
        table(["", "median, ms|.1f", "99 of 100 within, ms|.1f", "longest, ms|.1f"], gaps_found),
        "## Short prompts that arrive together",
        "Their lengths are spread evenly over the upper quarter. One place reads them one after the other; with a "
        "place for each they are read in one call of the model. Each has one new token.",
        table(["prompts", "one by one, ms|.1f", "in one call, ms|.1f", "|>"], prompt_rows(model)),
        "## Drafted tokens",
        "One call of the model on k drafted tokens after 1,000 others, which gives the logits to verify them, against "
        "one step of the decoder for one text. The last column is the number of steps that take as long as the call: "
        "drafts would pay if one call replaced more steps than that.",
        table(["model", "k|,", "one call, ms|.2f", "a step, ms|.2f", "steps in the time of the call|.1f"],
              (row for preset in DRAFTED for row in draft_rows(preset))),
    )  # fmt: skip


if __name__ == "__main__":
    main()
