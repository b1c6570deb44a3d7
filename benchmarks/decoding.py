"""Long texts: milliseconds per decoded token and memory by position, a long stream, and prefill by piece size.

    python benchmarks/decoding.py --up-to 1000000 --stream 2000000 --text book.txt --write

Without --text the bytes are random, without --model the weights are random; neither changes the times.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import cycle
from pathlib import Path

import psutil
import torch
from measuring import command, machine, parser_of, publish
from torch import Tensor

import gecko
from gecko.inference import Prefill, Sampling, TokenStream, piece_length, read

CURVE_POINTS = 20
PIECES = (256, 1024, 2048, 4096, 8192)
ROUNDS = 9
WARM_UP_PIECES = 24


@dataclass(frozen=True)
class DecodingPoint:
    position: int
    milliseconds: float
    """Median over the tokens decoded there."""
    resident: int
    peak: int
    state: int


@dataclass(frozen=True)
class StreamPoint:
    position: int
    seconds: float
    """Seconds since the start."""
    resident: int
    peak: int


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = gecko.load(arguments.model) if arguments.model else gecko.Gecko(gecko.GeckoConfig.preset(arguments.preset))
    _warm_up(model)
    decoding = measure_decoding(model, byte_pieces(arguments.text), arguments.up_to, arguments.tokens)
    streaming = measure_stream(model, byte_pieces(arguments.text), arguments.stream)
    page = report(arguments, model, decoding, streaming, measure_pieces(model, byte_pieces(arguments.text)))
    publish("decoding.md", page.splitlines(), arguments.write)


def byte_pieces(texts: Sequence[str]) -> Iterator[Tensor]:
    """Yield ids of bytes without end: the files repeated, or random bytes."""
    generator = torch.Generator().manual_seed(0)
    for path in cycle(texts or [""]):
        if not path:
            yield torch.randint(0, 256, (1 << 16,), generator=generator)
            continue
        with Path(path).open("rb") as file:
            while content := file.read(1 << 16):
                yield torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def measure_decoding(model: gecko.Gecko, pieces: Iterator[Tensor], up_to: int, tokens: int) -> list[DecodingPoint]:
    """Read to 1, 2, 5 · 10^k positions from 1,000 on, and decode ``tokens`` tokens at each."""
    source, reading, points = _Source(pieces), None, []
    for position in _positions(up_to):
        reading = _read_to(model, source, reading, position)
        points.append(_decode(model, reading, tokens))
    return points


def measure_stream(model: gecko.Gecko, pieces: Iterator[Tensor], length: int) -> list[StreamPoint]:
    """Read ``length`` tokens in one call; record memory and time along the way."""
    points = []
    begin = time.perf_counter()

    def watched() -> Iterator[Tensor]:
        source = _Source(pieces)
        for count in range(CURVE_POINTS):
            yield from source.take(length * (count + 1) // CURVE_POINTS - length * count // CURVE_POINTS)
            # The tokens given out so far have been read, except up to one piece.
            points.append(
                StreamPoint(length * (count + 1) // CURVE_POINTS, time.perf_counter() - begin, _resident(), _peak())
            )

    read(model, watched())
    return points


def measure_pieces(model: gecko.Gecko, pieces: Iterator[Tensor]) -> dict[int, float]:
    """Return the tokens/s of prefill by piece size; sizes alternate, and the median counts."""
    text = torch.cat(list(_Source(pieces).take(4 * max(PIECES))))
    seconds: dict[int, list[float]] = {size: [] for size in PIECES}
    for size in PIECES * ROUNDS:
        begin = time.perf_counter()
        read(model, [text], piece=size)
        seconds[size].append(time.perf_counter() - begin)
    return {size: len(text) / statistics.median(times) for size, times in seconds.items()}


def report(
    arguments: argparse.Namespace, model: gecko.Gecko, decoding: list[DecodingPoint], streaming: list[StreamPoint],
    pieces: dict[int, float],
) -> str:  # fmt: skip
    """Return the results in Markdown."""
    text = ", ".join(Path(path).name for path in arguments.text) or "random bytes"
    first, last = decoding[0], decoding[-1]
    lines = [
        "# Decoding far into a text", "",
        f"{date.today()}, {machine()}. Model: {arguments.model or arguments.preset}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, float32. Text: {text}. "
        f"Read in pieces of {piece_length(model.config):,} tokens. "
        f"Command: `{command(arguments)}`.", "",
        f"## Time a token and memory by position, {arguments.tokens} tokens decoded at each", "",
        "| position | ms a token (median) | memory in use, MB | highest so far, MB | reading state, bytes |",
        "|---:|---:|---:|---:|---:|",
        *(f"| {p.position:,} | {p.milliseconds:.2f} | {p.resident / 1e6:.1f} | {p.peak / 1e6:.1f} | {p.state:,} |"
          for p in decoding), "",
        f"From position {first.position:,} to {last.position:,}: time a token × "
        f"{last.milliseconds / first.milliseconds:.2f}, memory in use × {last.resident / first.resident:.3f}.", "",
        f"## {streaming[-1].position:,} tokens streamed through", "",
        "| position | tokens/s so far | memory in use, MB | highest so far, MB |", "|---:|---:|---:|---:|",
        *(f"| {p.position:,} | {p.position / p.seconds:,.0f} | {p.resident / 1e6:.1f} | {p.peak / 1e6:.1f} |"
          for p in streaming), "",
        f"From position {streaming[0].position:,} to {streaming[-1].position:,}: memory in use "
        f"× {streaming[-1].resident / streaming[0].resident:.3f}, highest "
        f"× {streaming[-1].peak / streaming[0].peak:.3f}.", "",
        "## Reading in pieces", "", "| tokens in a piece | tokens/s |", "|---:|---:|",
        *(f"| {size:,} | {rate:,.0f} |" for size, rate in pieces.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


class _Source:
    """Gives exact numbers of tokens from pieces of any length."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces, self._held = pieces, torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> Iterator[Tensor]:
        while count > 0:
            if not len(self._held):
                self._held = next(self._pieces)
            part, self._held = self._held[:count], self._held[count:]
            count -= len(part)
            yield part


def _read_to(model: gecko.Gecko, source: _Source, before: Prefill | None, position: int) -> Prefill:
    state = None if before is None else before.state
    return read(model, source.take(position - (0 if state is None else state.position[0])), state)


def _decode(model: gecko.Gecko, reading: Prefill, tokens: int) -> DecodingPoint:
    stream = TokenStream(model, [reading], seeds=[0], sampling=Sampling(1.0), max_new_tokens=tokens)
    times, begin = [], time.perf_counter()
    for _ in stream:
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    state = reading.state
    return DecodingPoint(state.position[0], 1e3 * statistics.median(times), _resident(), _peak(), state.num_bytes)


def _positions(up_to: int) -> list[int]:
    steps = (factor * 10**power for power in range(3, 10) for factor in (1, 2, 5))
    return sorted({*(step for step in steps if step < up_to), up_to})


def _warm_up(model: gecko.Gecko) -> None:
    """Read and decode some tokens: first calls are slower, and the allocator needs some pieces to settle."""
    reading = read(model, [torch.zeros(WARM_UP_PIECES * piece_length(model.config), dtype=torch.int64)])
    _decode(model, reading, 20)


def _resident() -> int:
    """Return the memory in use, in bytes, without free memory that the C library keeps."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def _peak() -> int:
    """Return the largest memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--up-to", type=int, default=1_000_000, help="last position to decode at")
    parser.add_argument("--stream", type=int, default=2_000_000, help="tokens to stream through")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to decode at each position")
    parser.add_argument("--text", nargs="*", default=[], help="files to read, as bytes")
    parser.add_argument("--preset", default="tiny", help="architecture, with random weights")
    parser.add_argument("--model", help="a model's folder instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
