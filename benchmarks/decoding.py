"""Long texts: milliseconds per decoded token and memory by position, a long stream, and prefill by piece size.

    python benchmarks/decoding.py --up-to 1000000 --stream 2000000 --text book.txt --write

Without --text the bytes are random, without --model the weights are random; neither changes the times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import torch
from measuring import byte_tokens, described, in_turns, parsed, parser_of, peak, publish, resident, seconds_of, table
from torch import Tensor

import gecko
from gecko.eval.scored_model import Cursor
from gecko.inference import Prefill, Sampling, TokenStream, piece_length, read

CURVE_POINTS = 20
PIECES = (256, 1024, 2048, 4096, 8192)
ROUNDS = 9
WARM_UP_PIECES = 24


def endless(texts: Sequence[str]) -> Cursor:
    """Return a reader of bytes as ids: of the files repeated, or of random ones."""
    if texts:
        return Cursor(byte_tokens([Path(path) for path in texts], sys.maxsize))
    generator = torch.Generator().manual_seed(0)
    return Cursor(torch.randint(0, 256, (1 << 16,), generator=generator) for _ in count())


def decoding(model: gecko.Gecko, source: Cursor, up_to: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield position, milliseconds, memory, highest memory and state at 1, 2, 5 · 10^k positions from 1,000 on."""
    steps = (factor * 10**power for power in range(3, 10) for factor in (1, 2, 5))
    state, before = None, 0
    for position in sorted({*(step for step in steps if step < up_to), up_to}):
        reading = read(model, source.take(position - before), state)
        state, before = reading.state, position
        yield position, decode(model, reading, tokens), resident(), peak(), state.num_bytes


def decode(model: gecko.Gecko, reading: Prefill, tokens: int) -> float:
    """Return the median milliseconds of a token."""
    stream = iter(TokenStream(model, [reading], seeds=[0], sampling=Sampling(1.0), max_new_tokens=tokens))
    return 1e3 * statistics.median(seconds_of(lambda: next(stream)) for _ in range(tokens))


def streaming(model: gecko.Gecko, source: Cursor, length: int) -> list[tuple[int, float, int, int]]:
    """Read ``length`` tokens in one call; return position, seconds, memory and highest memory along the way."""
    points, begin = [], time.perf_counter()
    ends = [length * point // CURVE_POINTS for point in range(CURVE_POINTS + 1)]

    def watched() -> Iterator[Tensor]:
        for last, end in pairwise(ends):
            yield from source.take(end - last)
            # The tokens given out so far have been read, except up to one piece.
            points.append((end, time.perf_counter() - begin, resident(), peak()))

    read(model, watched())
    return points


def main() -> None:
    given = parsed(parser_of(
        __doc__, threads=True, up_to=(1_000_000, "last position to decode at"),
        stream=(2_000_000, "tokens to stream through"), tokens=(200, "tokens to decode at each position"),
        text=([], "files to read, as bytes"), preset=("tiny", "architecture, with random weights"),
        model=(None, "a model's folder instead"),
    ))  # fmt: skip
    torch.manual_seed(0)
    model = gecko.load(given.model) if given.model else gecko.Gecko(gecko.GeckoConfig.preset(given.preset))
    # First calls are slower, and the allocator needs some pieces to settle.
    decode(model, read(model, [torch.zeros(WARM_UP_PIECES * piece_length(model.config), dtype=torch.int64)]), 20)
    points = list(decoding(model, endless(given.text), given.up_to, given.tokens))
    streamed = streaming(model, endless(given.text), given.stream)
    text = torch.cat(list(endless(given.text).take(4 * max(PIECES))))
    pieces = {size: partial(seconds_of, partial(read, model, [text], piece=size)) for size in PIECES}
    (first, first_ms, least, *_), (last, last_ms, most, *_) = points[0], points[-1]
    (start, _, low, low_peak), (end, _, high, high_peak) = streamed[0], streamed[-1]
    names = ", ".join(Path(path).name for path in given.text) or "random bytes"
    publish(
        "decoding.md", given, "Decoding far into a text",
        f"{described(model, given.model or given.preset, names)} Read in pieces of {piece_length(model.config):,} "
        "tokens.",
        f"## Time a token and memory by position, {given.tokens} tokens decoded at each",
        table(
            ["position|,", "ms a token (median)|.2f", "memory in use, MB|.1f", "highest so far, MB|.1f",
             "reading state, bytes|,"],
            ((at, ms, now / 1e6, top / 1e6, state) for at, ms, now, top, state in points),
        ),
        f"From position {first:,} to {last:,}: time a token × {last_ms / first_ms:.2f}, memory in use "
        f"× {most / least:.3f}.",
        f"## {end:,} tokens streamed through",
        table(
            ["position|,", "tokens/s so far|,.0f", "memory in use, MB|.1f", "highest so far, MB|.1f"],
            ((at, at / seconds, now / 1e6, top / 1e6) for at, seconds, now, top in streamed),
        ),
        f"From position {start:,} to {end:,}: memory in use × {high / low:.3f}, highest × {high_peak / low_peak:.3f}.",
        "## Reading in pieces",
        table(
            ["tokens in a piece|,", "tokens/s|,.0f"],
            ((size, len(text) / statistics.median(times)) for size, times in in_turns(pieces, ROUNDS).items()),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
