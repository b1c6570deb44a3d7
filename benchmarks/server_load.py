"""`gecko serve` under load: first the engine alone, then clients over HTTP, then clients of which a third leaves early.

    python benchmarks/server_load.py --minutes 5 --write

Starts the server as a separate process and connects over loopback. Clients and server share the machine's processors,
so times are higher than those of a server alone; CPU seconds are those of the server only, against the ideal of
``engine_load.py``. Fails if a response is not the intended one, a place is not freed, or memory grows; missed targets
are printed. Without --model, weights are random (and write letters only), which changes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from engine_load import LONGEST, MOST, SHORTEST, EngineLoad, Rates, best_rates, draw_sizes, percentile, run, waits
from measuring import command, machine, parser_of, publish

import gecko
from gecko.runtime.process import keep_freed_memory

CLASSES = ((16, 256), (256, 2_000), (2_000, 20_000))
"""Ranges of prompt lengths that are reported together, in tokens."""
SHARED = "This is a beginning that one prompt in four has in common with others. " * 40
PREFIX_CACHE = 64
"""Size of the cache in megabytes. It is small, so that the cache is full before memory is measured."""
WARM_UP = 15.0
"""Seconds that do not count: the first calls of a process are slower, and the prefix cache fills."""
FLAT = 1.05
"""Largest ratio of memory in use in the last third of the time to that in the first third."""


@dataclass(frozen=True)
class Manner:
    """How clients behave."""

    leaving: float
    """Share of the requests whose client disconnects after two seconds on average."""
    sharing: float
    """Share of the prompts with a common beginning."""
    pause: float
    """Longest time between two requests of a client, in seconds."""


CLOSED_LOOP = Manner(0, 0, 0)
LEAVING = Manner(1 / 3, 0.25, 0.2)


@dataclass(frozen=True)
class Visit:
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
    work: EngineLoad = field(default_factory=EngineLoad)
    """Tokens of the server, and its CPU seconds."""


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with _model_folder(arguments) as folder:
        model = gecko.load(folder).eval()
        rates = best_rates(model, arguments.rows)
        engine = run(model, arguments.rows, arguments.clients, 60 * arguments.minutes)
        with _server(folder, arguments) as (process, port):
            asyncio.run(_run(port, arguments, WARM_UP, CLOSED_LOOP, Load(), process))
            closed, left = Load(), Load()
            for manner, load in ((CLOSED_LOOP, closed), (LEAVING, left)):
                with _counted(load, process, port):
                    asyncio.run(_run(port, arguments, 60 * arguments.minutes, manner, load, process))
            numbers = _settled_numbers(port)
    checks = _checks(left, numbers)
    page = _report(arguments, model, _asked(rates, engine, closed), left, numbers, checks)
    publish("server_load.md", page, arguments.write)
    return 0 if all(checks.values()) and _complete(closed) else 1


@contextmanager
def _model_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    if arguments.model:
        yield Path(arguments.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = gecko.Gecko(gecko.GeckoConfig.preset("tiny"))
        _write_letters_only(model)
        model.save(folder)
        yield Path(folder)


@torch.no_grad()
def _write_letters_only(model: gecko.Gecko) -> None:
    """Make small letters the most likely tokens, so that each token is a character and arrives as a separate piece."""
    first = model.head.weight[97:110].clone()
    model.head.weight.zero_()
    model.head.weight[97:110] = first
    model.head.weight[110:123] = -first  # the larger of a logit and its opposite is above 0


@contextmanager
def _server(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[psutil.Process, int]]:
    """Yield the process and its port; then stop it with SIGTERM, on which it must exit with code 0."""
    command = [sys.executable, "-m", "gecko", "serve", str(folder), "--tokenizer", "bytes", "--name", "load",
               "--port", "0", "--rows", str(arguments.rows), "--prefix-cache", str(PREFIX_CACHE)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:(\d+)", process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start; its message is above")
        yield psutil.Process(process.pid), int(found[1])
        process.terminate()
        if process.wait(60) != 0:
            raise RuntimeError(f"the server must end with code 0 after SIGTERM; got {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()


@contextmanager
def _counted(load: Load, process: psutil.Process, port: int) -> Iterator[None]:
    """Count the server's tokens and CPU seconds."""
    before, cpu = _settled_numbers(port), process.cpu_times()
    yield
    after, now = _settled_numbers(port), process.cpu_times()
    prompt_tokens, new_tokens = (
        round(after[name] - before[name]) for name in ("gecko_prompt_tokens_total", "gecko_generated_tokens_total")
    )
    seconds = now.user + now.system - cpu.user - cpu.system
    load.work = EngineLoad(prompt_tokens, new_tokens, seconds, load.seconds)


async def _run(
    port: int, arguments: argparse.Namespace, seconds: float, manner: Manner, load: Load, process: psutil.Process
) -> None:
    begin = time.monotonic()
    end = begin + seconds
    watch = asyncio.create_task(_watch(process, load))
    await asyncio.gather(*(_client(port, number, manner, end, load) for number in range(arguments.clients)))
    watch.cancel()
    load.seconds = time.monotonic() - begin


async def _watch(process: psutil.Process, load: Load) -> None:
    while True:
        load.resident.append(process.memory_info().rss)
        await asyncio.sleep(1)


async def _client(port: int, number: int, manner: Manner, end: float, load: Load) -> None:
    """Send a request, read the response, wait a moment, and repeat."""
    chance = random.Random(number)
    while time.monotonic() < end:
        length, tokens = draw_sizes(chance)
        # Some leave while they wait for the first token, some in the middle of the response.
        patience = chance.expovariate(1 / 2) if chance.random() < manner.leaving else None
        prompt = _prompt(chance, length, shared=chance.random() < manner.sharing)
        load.visits.append(await _visit(port, prompt, tokens, patience))
        await asyncio.sleep(chance.uniform(0, manner.pause))


def _prompt(chance: random.Random, length: int, *, shared: bool) -> str:
    """Return ASCII text of ``length`` − 1 characters; the server adds a token before it."""
    words = " ".join(f"{chance.getrandbits(20):x}" for _ in range(length // 5 + 1))
    return ((SHARED if shared else "") + words)[: length - 1]


async def _visit(port: int, prompt: str, tokens: int, patience: float | None) -> Visit:
    times = [time.perf_counter()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(patience):
            outcome = await _stream(reader, writer, prompt, tokens, times)
    except TimeoutError:
        outcome = "left"
    finally:
        writer.transport.abort()
    gaps = tuple(later - earlier for earlier, later in pairwise(times[1:]))
    return Visit(len(prompt) + 1, outcome, times[1] - times[0] if len(times) > 1 else None, gaps)


async def _stream(
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


def _settled_numbers(port: int) -> dict[str, float]:
    """Return the server's metrics once it is idle, or after ten seconds."""
    for _ in range(100):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
        numbers = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
        if numbers["gecko_rows_active"] + numbers["gecko_queue_length"] == 0:
            break
        time.sleep(0.1)
    return numbers


def _complete(load: Load) -> bool:
    return all(visit.outcome == "complete" for visit in load.visits)


def _asked(rates: Rates, engine: EngineLoad, closed: Load) -> list[str]:
    """Return the table of what is asked of a load without leaving clients, and what was measured."""
    firsts = [(visit.length, visit.first) for visit in closed.visits if visit.first is not None]
    waited = waits(firsts, [gap for visit in closed.visits for gap in visit.between])
    rows = [
        ("engine: ideal CPU seconds of those it took", "≥ 80 %", f"{_share(rates, engine):.0%}"),
        ("over HTTP: ideal CPU seconds of those the server took", "≥ 70 %", f"{_share(rates, closed.work):.0%}"),
        *((f"over HTTP: {name}", limit, f"{value:.3f} s")
          for (name, value), limit in zip(waited.items(), ("≤ 1 s", "≤ 5 s", "≤ 0.15 s"), strict=True)),
    ]  # fmt: skip
    outcomes = Counter(visit.outcome for visit in closed.visits)
    return [
        "## Clients that stay", "",
        f"Ideal: {1 / rates.read:,.0f} prompt tokens per CPU second, as in one long prompt in pieces of {rates.piece}, "
        f"and {1 / rates.step:,.0f} new tokens per CPU second, as in steps with all rows taken. Engine alone: "
        f"{_work(engine)}. Over HTTP: {_work(closed.work)}; "
        + ", ".join(f"{count:,} requests {name}" for name, count in outcomes.most_common()) + ".", "",
        "| | asked | measured |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows), "",
    ]  # fmt: skip


def _share(rates: Rates, work: EngineLoad) -> float:
    return rates.ideal(work.prompt_tokens, work.new_tokens) / work.cpu


def _work(work: EngineLoad) -> str:
    return (
        f"{work.prompt_tokens:,} prompt tokens and {work.new_tokens:,} new tokens in {work.wall:.0f} s "
        f"({work.cpu:.0f} CPU s)"
    )


def _checks(load: Load, numbers: dict[str, float]) -> dict[str, bool]:
    outcomes = Counter(visit.outcome for visit in load.visits)
    early, late = _thirds(load.resident)
    return {
        "every answer is complete, or its client left": outcomes.keys() <= {"complete", "left"},
        "no row and no place of the queue is taken at the end": numbers["gecko_rows_active"] == 0
        and numbers["gecko_queue_length"] == 0,
        f"memory in the last third is at most {FLAT} × that of the first": late <= FLAT * early,
        "SIGTERM ended the server with code 0": True,  # otherwise the page would not be written
    }


def _thirds(values: Sequence[int]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])


def _report(
    arguments: argparse.Namespace, model: gecko.Gecko, asked: list[str], load: Load, numbers: dict[str, float],
    checks: dict[str, bool],
) -> list[str]:  # fmt: skip
    outcomes = Counter(visit.outcome for visit in load.visits)
    tokens = sum(len(visit.between) + (visit.first is not None) for visit in load.visits)
    prompts = sum(visit.length for visit in load.visits if visit.first is not None)
    gaps = [gap for visit in load.visits for gap in visit.between]
    early, late = _thirds(load.resident)
    return [
        "# The server under load", "",
        f"{date.today()}, {machine()}. Model: {Path(arguments.model or 'tiny').name}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, float32, {arguments.threads} threads, "
        f"{arguments.rows} rows, {PREFIX_CACHE} MB of prefix cache. "
        f"{arguments.clients} clients on the same machine, {arguments.minutes:g} minutes for each part; "
        f"prompts of {SHORTEST} to {LONGEST:,} tokens, evenly by logarithm; answers of 8 to {MOST} tokens. "
        f"Command: `{command(arguments)}`.", "",
        *asked, "## Clients of which a third leaves", "",
        "They leave after 2 s on average. A quarter of the prompts have a common beginning.", "",
        f"{len(load.visits):,} requests: " + ", ".join(f"{count:,} {name}" for name, count in outcomes.most_common()),
        f"({prompts / load.seconds:,.0f} prompt tokens and {tokens / load.seconds:,.0f} new tokens a second; "
        f"the prefix cache spared {numbers['gecko_prefix_tokens_reused_total']:,.0f} prompt tokens).", "",
        "| time to the first token | requests | p50, s | p90, s | p99, s |", "|---|---:|---:|---:|---:|",
        *(_row(f"prompts of {low:,} to {high:,} tokens", _firsts(load, low, high)) for low, high in CLASSES),
        _row("all", _firsts(load, 0, LONGEST + 1)), "",
        "| time between tokens | tokens | p50, s | p90, s | p99, s |", "|---|---:|---:|---:|---:|",
        _row("all", gaps), "",
        f"Memory in use: {early / 1e6:.1f} MB in the first third of the time, {late / 1e6:.1f} MB in the last "
        f"(× {late / early:.3f}; medians), at most {max(load.resident) / 1e6:.1f} MB.", "",
        *(f"- {'holds' if held else '**does not hold**'}: {what}" for what, held in checks.items()),
    ]  # fmt: skip


def _firsts(load: Load, low: int, high: int) -> list[float]:
    return [visit.first for visit in load.visits if visit.first is not None and low <= visit.length < high]


def _row(name: str, seconds: list[float]) -> str:
    shown = [f"{percentile(seconds, share):.3f}" if seconds else "–" for share in (0.5, 0.9, 0.99)]
    return " | ".join([f"| {name}", f"{len(seconds):,}", *shown]) + " |"


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="of each of the three parts")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="texts that the server continues side by side")
    parser.add_argument("--model", help="a folder with a model of bytes, instead of a new tiny one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch in the server")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
