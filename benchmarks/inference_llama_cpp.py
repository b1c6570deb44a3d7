"""Gecko beside llama.cpp on the CPU: one decoded token after 512 and 32,768 tokens, and reading 32,768 tokens.

    python benchmarks/inference_llama_cpp.py --write

The peer is a Llama with about as many weights, random, in the same type: float32, bfloat16, and 8 bit (Q8_0 there).
Both take the same number of threads. Rounds alternate between the two, and medians count. The first type of weights
reads the long text; the peers of the others take its cache of keys and values, because reading it again takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from inference import Case, gecko_case, in_format, measure
from llama_gguf import Llama, llama_cpp, system_info, write
from measuring import command, machine, of_processor, parser_of, publish

import gecko
from gecko.inference import Prefill, read
from gecko.runtime.process import keep_freed_memory

SHORT, LONG = 512, 32_768
"""Tokens before and with the decoded one."""
WEIGHTS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
"""Types of weights by their name in Gecko and in llama.cpp."""
STEPS = {"tiny": 200, "gecko-125m": 20}
"""Steps of a measurement."""
ASKED = {
    (SHORT, "float32"): 1, (SHORT, "bfloat16"): 1, (SHORT, "int8"): 1, (LONG, "float32"): 2, (LONG, "int8"): 4,
}  # fmt: skip
"""Least ratio that is asked of a decoded token, by context and weights."""
ASKED_READING = 5


@dataclass(frozen=True)
class Pair:
    """Tokens per second of both."""

    preset: str
    weights: str
    work: str
    gecko: float
    llama: float
    asked: float | None

    @property
    def row(self) -> str:
        ratio = self.gecko / self.llama
        asked = "" if self.asked is None else f"≥ {self.asked:g} ×"
        return (
            f"| {self.preset} | {self.weights} | {self.work} | {_rate(self.gecko)} | {_rate(self.llama)} | {asked} | "
            f"{ratio:.2f} × |"
        )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    arguments = _arguments()
    keep_freed_memory()
    torch.manual_seed(0)
    pairs: list[Pair] = []
    for preset in arguments.preset or STEPS:
        pairs += compare(preset, arguments.weights or list(WEIGHTS), arguments.reads)
    publish(of_processor("inference_llama_cpp"), report(arguments, pairs), arguments.write)


def compare(preset: str, weights: Sequence[str], reads: int) -> list[Pair]:
    """Measure one model in several formats, each beside its peer."""
    model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
    tokens, cache, pairs = torch.randint(0, 256, (LONG - 1,)), None, []
    for name in weights:
        changed = in_format(model, name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "llama.gguf"
            write(path, model, WEIGHTS[name], LONG)
            llama = Llama(path, LONG, torch.get_num_threads())
        if cache is None:
            pairs.append(_reading(preset, changed, name, llama, tokens, reads))
            cache = llama.cache()
        else:
            llama.fill(cache)
        pairs += [_decoding(preset, changed, name, llama, tokens[: context - 1]) for context in (LONG, SHORT)]
        llama.close()
    return pairs


def _reading(preset: str, model: gecko.Gecko, weights: str, llama: Llama, tokens: torch.Tensor, reads: int) -> Pair:
    ids = tokens.tolist()

    def read_llama() -> None:
        llama.cut(0)
        llama.read(ids)

    sides: tuple[Callable[[], object], ...] = (lambda: read(model, [tokens]), read_llama)
    found: list[list[float]] = [[], []]
    read(model, [tokens[: len(tokens) // 64]])  # the first calls of a process are slower
    llama.read(ids[: len(ids) // 64])
    for _ in range(reads):
        for side, times in zip(sides, found, strict=True):
            begin = time.perf_counter()
            side()
            times.append(time.perf_counter() - begin)
    speeds = [len(ids) / statistics.median(times) for times in found]
    return Pair(preset, weights, f"reading {len(ids) + 1:,}", *speeds, ASKED_READING)


def _decoding(preset: str, model: gecko.Gecko, weights: str, llama: Llama, before: torch.Tensor) -> Pair:
    """Measure steps after ``before``, of which the peer's cache holds all or more; it returns there after each step."""
    context = len(before) + 1
    prefill: Prefill = read(model, [before])
    llama.cut(len(before))

    def step() -> None:
        llama.step(65)
        llama.cut(len(before))

    steps = STEPS[preset]
    ours = gecko_case("gecko", model, prefill, 1, steps)
    seconds = measure([ours, Case("llama", 1, step, 0, steps)])
    speeds = 1 / seconds["gecko"], 1 / seconds["llama"]
    return Pair(preset, weights, f"a token at {context:,}", *speeds, ASKED.get((context, weights)))


def report(arguments: argparse.Namespace, pairs: list[Pair]) -> list[str]:
    """Return the results in Markdown."""
    return [
        "# Gecko beside llama.cpp on the CPU", "",
        f"{date.today()}, {machine()}, {torch.get_num_threads()} threads on both sides. llama-cpp-python "
        f"{llama_cpp.__version__}, built from source for this processor ({system_info()}); its cache is float16, flash "
        "attention is off because it is slower here. Random weights, as many as in the Gecko model. Medians of "
        f"alternating rounds; reading {arguments.reads} times. Command: `{command(arguments)}`.", "",
        "| model | weights | work | Gecko, tokens/s | llama.cpp, tokens/s | asked | measured |",
        "|---|---|---|---:|---:|---:|---:|", *(pair.row for pair in pairs),
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", action="append", default=[], choices=STEPS, help="only this model; repeatable")
    parser.add_argument("--weights", action="append", default=[], choices=WEIGHTS, help="only these; repeatable")
    parser.add_argument("--reads", type=int, default=1, help="how often each side reads the long text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
