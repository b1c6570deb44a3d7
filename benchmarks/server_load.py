"""`gecko serve` under load: first the engine alone, then clients over HTTP, then clients of which a third leaves early.

    python benchmarks/server_load.py --minutes 5 --write

Starts the server as a separate process and connects over loopback. Clients and server share the machine's processors,
so times are higher than those of a server alone; CPU seconds are those of the server only. The ideal CPU seconds are
those of the same work at the best rates that this process measures before: prompt tokens as in one long prompt, read in
the fastest pieces; new tokens as in steps of a batch in which every place is taken. In the engine alone, a text that
ends is replaced by another at once. Fails if a response is not the intended one, a place is not freed, or memory grows;
missed targets are printed. Without --model, weights are random (and write letters only), which changes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from measuring import described, median_seconds, parsed, parser_of, publish, serving, settled_numbers, table

import gecko
from gecko.inference import Sampling, read
from gecko.inference.decoder import Decoder
from gecko.inference.request import Finished, Request
from gecko.inference.scheduler import Engine
from gecko.runtime.process import keep_freed_memory

SHORTEST, LONGEST = 16, 20_000
"""Tokens of a prompt, evenly by logarithm."""
FEWEST, MOST = 8, 64
"""New tokens of a text."""
SHORT = 256
"""Longest prompt whose first token must come soon."""
PIECES = (1024, 2048, 4096, 8192)
"""Sizes of pieces that are tried for the best rate of reading."""
ROUNDS, STEPS = 5, 100
CLASSES = ((16, 256), (256, 2_000), (2_000, 20_000))
"""Ranges of prompt lengths that are reported together, in tokens."""
SHARED = "This is a beginning that one prompt in four has in common with others. " * 40
PREFIX_CACHE = 64
"""Size of the cache in megabytes. It is small, so that the cache is full before memory is measured."""
WARM_UP, ENGINE_WARM_UP = 15.0, 5.0
"""Seconds that do not count: the first calls of a process are slower, and the prefix cache fills."""
FLAT = 1.05
"""Largest ratio of memory in use in the last third of the time to that in the first third."""


class Rates(NamedTuple):
    """CPU seconds of a token at the best rate."""

    read: float
    step: float
    piece: int
    """Tokens of the pieces with the best rate of reading."""


class Work(NamedTuple):
    """Tokens of an engine or a server, and the seconds that they took."""

    prompt_tokens: int
    new_tokens: int
    cpu: float
    wall: float

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens:,} prompt tokens and {self.new_tokens:,} new tokens in {self.wall:.0f} s "
            f"({self.cpu:.0f} CPU s)"
        )

    def share(self, rates: Rates) -> str:
        """Return the share of the ideal CPU seconds."""
        return f"{(self.prompt_tokens * rates.read + self.new_tokens * rates.step) / self.cpu:.0%}"


class Manner(NamedTuple):
    """How clients behave."""

    leaving: float
    """Share of the requests whose client disconnects after two seconds on average."""
    sharing: float
    """Share of the prompts with a common beginning."""
    pause: float
    """Longest time between two requests of a client, in seconds."""


CLOSED_LOOP = Manner(0, 0, 0)
LEAVING = Manner(1 / 3, 0.25, 0.2)


class Visit(NamedTuple):
    """One request as seen by its client; times in seconds."""

    length: int
    outcome: str
    """``complete``, ``left``, or a description of the error."""
    first: float | None = None
    between: tuple[float, ...] = ()


@dataclass
class Load:
    visits: list[Visit] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    """Memory in use by the server in bytes, once per second."""
    seconds: float = 0
    """Seconds until the last client had its response."""
    work: Work | None = None

    def outcomes(self) -> str:
        found = Counter(visit.outcome for visit in self.visits).most_common()
        return ", ".join(f"{count:,} {name}" for name, count in found)

    def firsts(self, low: int = 0, high: int = LONGEST + 1) -> list[float]:
        """Return the times to the first token of prompts with these lengths."""
        return [one.first for one in self.visits if one.first is not None and low <= one.length < high]

    def gaps(self) -> list[float]:
        return [gap for visit in self.visits for gap in visit.between]


def draw_sizes(chance: random.Random) -> tuple[int, int]:
    """Return the prompt tokens and new tokens of a text."""
    length = round(math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST))))
    return length, chance.randint(FEWEST, MOST)


def best_rates(model: gecko.Gecko, rows: int) -> Rates:
    """Measure the best rates of this process with one thread of work at a time; medians count."""
    prompt = torch.randint(0, 256, (2 * max(PIECES),))
    prefill = read(model, [prompt])
    reading = {
        piece: median_seconds(lambda piece=piece: read(model, [prompt], piece=piece), ROUNDS, time.process_time)
        for piece in PIECES
    }
    piece = min(reading, key=reading.__getitem__)
    decoder = Decoder(model, rows)
    with torch.inference_mode():
        for _ in range(rows):
            decoder.add(prefill.state, prefill.seen)
        steps = median_seconds(
            lambda: [decoder.step([65] * rows) for _ in range(STEPS)], ROUNDS, time.process_time, warm_ups=1
        )
    return Rates(reading[piece] / len(prompt), steps / STEPS / rows, piece)


def run_engine(model: gecko.Gecko, rows: int, texts: int, seconds: float) -> Work:
    """Run an engine with ``texts`` texts for some seconds, after a warm-up."""
    engine, chance = Engine(model, rows=rows, max_queued=texts), random.Random(0)

    def submit() -> None:
        length, new = draw_sizes(chance)
        engine.submit(Request(torch.randint(97, 123, (length,)), new, Sampling(1.0), seed=length))

    def step_for(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for event in engine.step():
                if isinstance(event, Finished):
                    if event.reason != "length":
                        raise RuntimeError(
                            f"texts must end by their length; one ended by {event.reason}: {event.error}"
                        )
                    submit()

    for _ in range(texts):
        submit()
    step_for(ENGINE_WARM_UP)
    before = engine.prompt_tokens_read, engine.tokens_made, time.process_time(), time.perf_counter()
    step_for(seconds)
    after = engine.prompt_tokens_read, engine.tokens_made, time.process_time(), time.perf_counter()
    return Work(*(b - a for a, b in zip(before, after, strict=True)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


@contextmanager
def model_folder(given: argparse.Namespace) -> Iterator[Path]:
    """Yield the given folder, or one of a new model whose most likely tokens are small letters.

    Then each token is a character and arrives as a separate piece.
    """
    if given.model:
        yield Path(given.model)
        return
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        torch.manual_seed(0)
        model = gecko.Gecko(gecko.GeckoConfig.preset("tiny"))
        first = model.head.weight[97:110].clone()
        model.head.weight.zero_()
        model.head.weight[97:110] = first
        model.head.weight[110:123] = -first  # the larger of a logit and its opposite is above 0
        model.save(folder)
        yield Path(folder)


@contextmanager
def counted(load: Load, process: psutil.Popen, port: int) -> Iterator[None]:
    """Count the server's tokens and CPU seconds."""
    names = ("gecko_prompt_tokens_total", "gecko_generated_tokens_total")
    before, cpu = settled_numbers(port), process.cpu_times()
    yield
    after, now = settled_numbers(port), process.cpu_times()
    tokens = [round(after[name] - before[name]) for name in names]
    load.work = Work(*tokens, now.user + now.system - cpu.user - cpu.system, load.seconds)


async def visit_all(port: int, clients: int, seconds: float, manner: Manner, load: Load, process: psutil.Popen) -> None:
    begin = time.monotonic()

    async def watch() -> None:
        while True:
            load.resident.append(process.memory_info().rss)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(port, number, manner, begin + seconds, load) for number in range(clients)))
    watching.cancel()
    load.seconds = time.monotonic() - begin


async def client(port: int, number: int, manner: Manner, end: float, load: Load) -> None:
    """Send a request, read the response, wait a moment, and repeat."""
    chance = random.Random(number)
    while time.monotonic() < end:
        length, tokens = draw_sizes(chance)
        # Some leave while they wait for the first token, some in the middle of the response.
        patience = chance.expovariate(1 / 2) if chance.random() < manner.leaving else None
        shared = chance.random() < manner.sharing
        # ASCII text of ``length`` − 1 characters; the server adds a token before it.
        words = " ".join(f"{chance.getrandbits(20):x}" for _ in range(length // 5 + 1))
        prompt = ((SHARED if shared else "") + words)[: length - 1]
        load.visits.append(await visit(port, prompt, tokens, patience))
        await asyncio.sleep(chance.uniform(0, manner.pause))


async def visit(port: int, prompt: str, tokens: int, patience: float | None) -> Visit:
    times = [time.perf_counter()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(patience):
            outcome = await stream(reader, writer, prompt, tokens, times)
    except TimeoutError:
        outcome = "left"
    finally:
        writer.transport.abort()
    gaps = tuple(later - earlier for earlier, later in pairwise(times[1:]))
    return Visit(len(prompt) + 1, outcome, times[1] - times[0] if len(times) > 1 else None, gaps)


async def stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: str, tokens: int, times: list[float]
) -> str:
    """Read the events of a response. This is written by hand: a client library would cost as much as the server."""
    asked = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    status = (await reader.readline()).split()[1:2]
    if status != [b"200"]:
        return f"status {b''.join(status).decode() or 'none'}"
    made = 0
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return "complete" if made == tokens else f"{made} tokens of {tokens}"
        event = json.loads(line[6:])
        if "error" in event:
            return f"error {event['error']['code']}"
        if event["choices"]:
            times.append(time.perf_counter())
        else:
            made = event["usage"]["completion_tokens"]
    return "cut short"


def thirds(values: Sequence[int]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


def staying(rates: Rates, engine: Work, closed: Load) -> list[str]:
    """Return what is asked of a load without leaving clients, and what was measured."""
    short, work = closed.firsts(high=SHORT + 1), closed.work
    assert work is not None
    rows = [
        ("engine: ideal CPU seconds of those it took", "≥ 80 %", engine.share(rates)),
        ("over HTTP: ideal CPU seconds of those the server took", "≥ 70 %", work.share(rates)),
    ]
    for name, values, share, limit in (
        (f"prompts of up to {SHORT} tokens, first token p50", short, 0.5, "≤ 1 s"),
        (f"prompts of up to {SHORT} tokens, first token p99", short, 0.99, "≤ 5 s"),
        ("between tokens p99", closed.gaps(), 0.99, "≤ 0.15 s"),
    ):
        rows.append((f"over HTTP: {name}", limit, f"{percentile(values, share):.3f} s"))
    return [
        "## Clients that stay",
        f"Ideal: {1 / rates.read:,.0f} prompt tokens per CPU second, as in one long prompt in pieces of {rates.piece}, "
        f"and {1 / rates.step:,.0f} new tokens per CPU second, as in steps with all rows taken. Engine alone: "
        f"{engine}. Over HTTP: {work}; requests: {closed.outcomes()}.",
        table(["", "asked|>", "measured|>"], rows),
    ]


def leaving(load: Load, checks: dict[str, bool], reused: float) -> list[str]:
    """Return what clients met of which a third leaves."""
    tokens = len(load.gaps()) + len(load.firsts())
    prompts = sum(visit.length for visit in load.visits if visit.first is not None)
    early, late = thirds(load.resident)

    def row(name: str, seconds: list[float]) -> tuple[object, ...]:
        return name, len(seconds), *(percentile(seconds, share) for share in (0.5, 0.9, 0.99))

    firsts = [row(f"prompts of {low:,} to {high:,} tokens", load.firsts(low, high)) for low, high in CLASSES]
    columns = ["p50, s|.3f", "p90, s|.3f", "p99, s|.3f"]
    return [
        "## Clients of which a third leaves",
        "They leave after 2 s on average. A quarter of the prompts have a common beginning.",
        f"{len(load.visits):,} requests: {load.outcomes()} ({prompts / load.seconds:,.0f} prompt tokens and "
        f"{tokens / load.seconds:,.0f} new tokens a second; the prefix cache spared {reused:,.0f} prompt tokens).",
        table(["time to the first token", "requests|,", *columns], [*firsts, row("all", load.firsts())]),
        table(["time between tokens", "tokens|,", *columns], [row("all", load.gaps())]),
        f"Memory in use: {early / 1e6:.1f} MB in the first third of the time, {late / 1e6:.1f} MB in the last "
        f"(× {late / early:.3f}; medians), at most {max(load.resident) / 1e6:.1f} MB.",
        "\n".join(f"- {'holds' if held else '**does not hold**'}: {what}" for what, held in checks.items()),
    ]


def main() -> int:
    given = parsed(parser_of(
        __doc__, threads=True, minutes=(5.0, "of each of the three parts"), clients=(64, "at once"),
        rows=(64, "texts that the server continues side by side"),
        model=(None, "a folder with a model of bytes, instead of a new tiny one"),
    ))  # fmt: skip
    keep_freed_memory()
    options = "--tokenizer", "bytes", "--name", "load", "--rows", str(given.rows), "--prefix-cache", str(PREFIX_CACHE)
    seconds, closed, left = 60 * given.minutes, Load(), Load()
    with model_folder(given) as folder:
        model = gecko.load(folder).eval()
        rates = best_rates(model, given.rows)
        engine = run_engine(model, given.rows, given.clients, seconds)
        with serving(folder, *options, threads=given.threads) as (process, port):
            asyncio.run(visit_all(port, given.clients, WARM_UP, CLOSED_LOOP, Load(), process))
            for manner, load in ((CLOSED_LOOP, closed), (LEAVING, left)):
                with counted(load, process, port):
                    asyncio.run(visit_all(port, given.clients, seconds, manner, load, process))
            numbers = settled_numbers(port)
            process.terminate()
            if (code := process.wait(60)) != 0:
                raise RuntimeError(f"the server must end with code 0 after SIGTERM; got {code}")
    early, late = thirds(left.resident)
    checks = {
        "every answer is complete, or its client left": {x.outcome for x in left.visits} <= {"complete", "left"},
        "no row and no place of the queue is taken at the end": numbers["gecko_rows_active"] == 0
        and numbers["gecko_queue_length"] == 0,
        f"memory in the last third is at most {FLAT} × that of the first": late <= FLAT * early,
        "SIGTERM ended the server with code 0": True,
    }
    publish(
        "server_load.md", given, "The server under load",
        f"{described(model, Path(given.model or 'tiny').name)} {given.rows} rows, {PREFIX_CACHE} MB of prefix cache. "
        f"{given.clients} clients on the same machine, {given.minutes:g} minutes for each part; prompts of {SHORTEST} "
        f"to {LONGEST:,} tokens, evenly by logarithm; answers of {FEWEST} to {MOST} tokens.",
        *staying(rates, engine, closed), *leaving(left, checks, numbers["gecko_prefix_tokens_reused_total"]),
    )  # fmt: skip
    return 0 if all(checks.values()) and all(visit.outcome == "complete" for visit in closed.visits) else 1


if __name__ == "__main__":
    sys.exit(main())
