"""Gecko beside llama.cpp on the CPU: one decoded token after short and long texts, and reading a text.

    python benchmarks/inference_llama_cpp.py --write
    python benchmarks/inference_llama_cpp.py --model models/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --write

The peer is a Llama with about as many weights, random, in the same type: float32, bfloat16, and 8 bit (Q8_0 there).
With ``--model`` and ``--gguf`` it is the Llama that the model was converted from, with the same weights in other types.
Both take the same number of threads. Rounds alternate between the two, and medians count. The first type of weights
reads the longest text; the peers of the others take its cache of keys and values, because reading it again takes
minutes. The byte limit of a token is the bytes that it reads of weights and of the state or the cache, over the rate
at which this memory is read (``memory_rate.py``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from inference import ROUNDS, Case, gecko_case, in_format, measured_beside_memory
from llama_gguf import Llama, in_type, llama_cpp, random_llama, system_info
from measuring import command, find_model, machine, of_processor, parser_of, publish
from torch import Tensor

import gecko
from gecko.inference import Prefill, read
from gecko.runtime.process import keep_freed_memory

WEIGHTS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
STEPS = {"tiny": 200, "gecko-125m": 20}
ASKED: dict[tuple[int | str, str], float] = {
    (512, "float32"): 1, (512, "bfloat16"): 1, (512, "int8"): 1, (32_768, "float32"): 2, (32_768, "int8"): 4,
    ("reading", "float32"): 5,
}  # fmt: skip
CONTEXTS = (512, 8_192, 32_768)
"""Tokens with the decoded one."""


@dataclass(frozen=True)
class Subject:
    """A model in Gecko and as a GGUF file, and what is asked of it."""

    name: str
    model: gecko.Gecko
    write: Callable[[Path, str], None]
    """Writes the peer's file with weights of a type of llama.cpp."""
    weights: dict[str, str]
    """Types of weights by their name in Gecko and in llama.cpp."""
    reads: int
    """Tokens of the text that is read for time."""
    steps: int
    """Steps of a measurement."""
    asked: dict[tuple[int | str, str], float]
    """Least ratio of a decoded token by context and weights, and of reading."""


@dataclass(frozen=True)
class Pair:
    """Tokens per second of both, and their byte limits where tokens are decoded."""

    subject: Subject
    weights: str
    work: str
    gecko: float
    llama: float
    asked: float | None
    limits: tuple[float, float] | None = None

    @property
    def row(self) -> str:
        asked = "" if self.asked is None else f"≥ {self.asked:g} ×"
        limits = self.limits or (0.0, 0.0)
        both = (
            f"{_rate(speed)} | {f'{speed / limit:.0%}' if limit else ''}"
            for speed, limit in zip((self.gecko, self.llama), limits, strict=True)
        )
        types = f"{self.weights}, {self.subject.weights[self.weights]}"
        ratio = f"{self.gecko / self.llama:.2f} ×"
        return f"| {' | '.join((self.subject.name, types, self.work, *both, asked, ratio))} |"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    arguments = _arguments()
    keep_freed_memory()
    torch.manual_seed(0)
    pairs: list[Pair] = []
    for subject in subjects(arguments):
        pairs += compare(subject, arguments.weights or list(subject.weights), arguments.reads)
    name = of_processor("inference_llama_cpp")
    publish(
        name.replace("cpp_", "cpp_converted_") if arguments.model else name, report(arguments, pairs), arguments.write
    )


def subjects(arguments: argparse.Namespace) -> Iterator[Subject]:
    if arguments.model:
        folder = find_model(arguments.model)
        weights = {"bfloat16": "F16", "int8": "Q8_0"}
        least = {"bfloat16": (0.95, 1.5, 2.5), "int8": (0.95, 1.5, 4.0)}
        asked: dict[tuple[int | str, str], float] = {
            (context, name): ratio
            for name, ratios in least.items() for context, ratio in zip(CONTEXTS, ratios, strict=True)
        }  # fmt: skip
        asked |= {("reading", name): 1 for name in weights}
        write = partial(in_type, arguments.gguf)
        yield Subject(folder.name, gecko.load(folder), write, weights, CONTEXTS[1], 20, asked)
        return
    for preset in arguments.preset or STEPS:
        model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
        yield Subject(
            preset, model, partial(random_llama, model, CONTEXTS[-1]), WEIGHTS, CONTEXTS[-1], STEPS[preset], ASKED
        )


def compare(subject: Subject, weights: Sequence[str], reads: int) -> Iterator[Pair]:
    """Measure one model in several formats, each beside its peer."""
    tokens, cache = torch.randint(0, 256, (CONTEXTS[-1] - 1,)), None
    for name in weights:
        changed = in_format(subject.model, name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "llama.gguf"
            subject.write(path, subject.weights[name])
            llama = Llama(path, CONTEXTS[-1], torch.get_num_threads())
        if cache is None:
            yield _reading(subject, changed, name, llama, tokens[: subject.reads - 1], reads)
            llama.read(tokens[subject.reads - 1 :].tolist())
            cache = llama.cache()
        else:
            llama.fill(cache)
        for context in reversed(CONTEXTS):
            yield _decoding(subject, changed, name, llama, tokens[: context - 1])
        llama.close()


def _reading(subject: Subject, model: gecko.Gecko, weights: str, llama: Llama, tokens: Tensor, reads: int) -> Pair:
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
    return Pair(subject, weights, f"reading {len(ids) + 1:,}", *speeds, subject.asked.get(("reading", weights)))


def _decoding(subject: Subject, model: gecko.Gecko, weights: str, llama: Llama, before: Tensor) -> Pair:
    """Measure steps after ``before``, of which the peer's cache holds all or more; it returns there after each step."""
    context = len(before) + 1
    prefill: Prefill = read(model, [before])
    llama.cut(len(before))

    def step() -> None:
        llama.step(65)
        llama.cut(len(before))

    ours = gecko_case("gecko", model, prefill, 1, subject.steps)
    theirs = Case("llama", 1, step, llama.bytes_read(context), subject.steps, ours.memory)
    rounds = [[measured_beside_memory(case) for case in (ours, theirs)] for _ in range(ROUNDS)]
    speeds = [statistics.median(1 / measured.seconds for measured in side) for side in zip(*rounds, strict=True)]
    rate = max(measured.rate for measured in chain(*rounds))
    limits = (rate / ours.bytes_read, rate / theirs.bytes_read)
    return Pair(subject, weights, f"a token at {context:,}", *speeds, subject.asked.get((context, weights)), limits)


def report(arguments: argparse.Namespace, pairs: list[Pair]) -> list[str]:
    """Return the results in Markdown."""
    same = (
        "The same weights on both sides, from one file." if arguments.model else "Random weights, as many as in Gecko."
    )
    return [
        "# Gecko beside llama.cpp on the CPU", "",
        f"{date.today()}, {machine()}, {torch.get_num_threads()} threads on both sides. llama-cpp-python "
        f"{llama_cpp.__version__}, built from source for this processor ({system_info()}); its cache is float16, flash "
        f"attention is off because it is slower here. {same} Medians of alternating rounds; reading {arguments.reads} "
        f"times. Limit: the share of the byte limit of a token. Command: `{command(arguments)}`.", "",
        "| model | weights | work | Gecko, tokens/s | limit | llama.cpp, tokens/s | limit | asked | measured |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|", *(pair.row for pair in pairs),
    ]  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", action="append", default=[], choices=STEPS, help="only this model; repeatable")
    parser.add_argument("--weights", action="append", default=[], help="only these, such as int8; repeatable")
    parser.add_argument("--reads", type=int, default=1, help="how often each side reads the text")
    parser.add_argument("--model", help="a folder of gecko convert")
    parser.add_argument("--gguf", type=Path, help="file of the Llama that it was converted from")
    given = parser.parse_args()
    if (given.model is None) != (given.gguf is None):
        parser.error("--model and --gguf must be given together")
    return given


if __name__ == "__main__":
    main()
