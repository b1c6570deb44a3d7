"""Decoding on the CPU against the bytes that a token must read, beside transformers' Llama of equal size.

    python benchmarks/inference.py --write

The byte limit of a step is the bytes of weights and states that it must read, over the rate at which a loop in C reads
the same memory (``memory_rate.py``), immediately before or after the step; the faster one counts. Times and shares are
medians over rounds. ``--only NAME`` measures the cases whose name contains NAME.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import torch
from measuring import machine, of_processor, parser_of, publish
from memory_rate import read_rate
from torch import nn

import gecko
from gecko.inference import Prefill, read
from gecko.inference.decoder import Decoder
from gecko.io.quantization import plain_tensors, quantize

PROMPT = 1000
ROUNDS = 5
FORMATS = ("float32", "bfloat16", "int8", "int4")
POSITIONS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Case:
    """A model with some sequences that decode side by side."""

    name: str
    rows: int
    step: Callable[[], None]
    bytes_read: int
    """By one step."""
    steps: int
    """Number of steps in one measurement."""
    memory: Sequence[torch.Tensor]
    """Weights and states."""


@dataclass(frozen=True)
class Measured:
    """Result of a case in one round."""

    seconds: float
    """Time of one step."""
    rate: float
    """Bytes per second at which this memory can be read."""


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    cases = [case for case in _cases() if arguments.only in case.name]
    rounds = [[measured_beside_memory(case) for case in cases] for _ in range(ROUNDS)]
    sections = [_steps_table(cases, rounds)]
    if arguments.only in "generate":
        sections.append(_generate_table())
    if arguments.only in "positions":
        sections.append(_positions_table())
    page = "\n".join([_heading(), *sections])
    publish(of_processor("inference"), page.splitlines(), arguments.write)


def measured_beside_memory(case: Case) -> Measured:
    """Return the seconds of a step, and the rate at which its memory can be read at that time."""
    before = read_rate(case.memory)
    seconds = median_step(case)
    return Measured(seconds, max(before, read_rate(case.memory)))


def measure(cases: list[Case]) -> dict[str, float]:
    """Return the median seconds of a step; every round takes each case once."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(ROUNDS):
        for case in cases:
            found[case.name].append(median_step(case))
    return {name: statistics.median(times) for name, times in found.items()}


def median_step(case: Case) -> float:
    """Return the median seconds of the steps of one measurement."""
    case.step()
    times = []
    for _ in range(case.steps):
        begin = time.perf_counter()
        case.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bytes_of_weights(model: gecko.Gecko) -> int:
    """Return the bytes of all weights that a token reads: all but the embedding, unless it is the head too."""
    return sum(map(_stored_bytes, _weights_read(model)))


def _weights_read(model: gecko.Gecko) -> list[nn.Parameter]:
    unread = None if model.config.tie_embedding else model.embedding.weight
    return [parameter for parameter in model.parameters() if parameter is not unread]


def _stored_bytes(parameter: nn.Parameter) -> int:
    integers, *scale = plain_tensors(parameter)
    halved = getattr(parameter, "target_dtype", None) == torch.int4  # type: ignore[attr-defined]
    return integers.nbytes // (2 if halved else 1) + sum(one.nbytes for one in scale)


def bytes_of_state(prefill: Prefill, config: gecko.GeckoConfig, window_dtype: torch.dtype | None = None) -> int:
    """Return the bytes of one sequence's state that a token reads: all but slots of the window that it does not see,
    the summary of the previous chunk, and what is only written."""
    seen = config.chunk_size + prefill.state.position[0] % config.chunk_size
    total = 0
    for name, tensor in prefill.state.tensors().items():
        if ".attention." in name:
            itemsize = (window_dtype or tensor.dtype).itemsize
            total += tensor.numel() * itemsize * seen // (2 * config.chunk_size)
        elif ".previous" not in name:
            total += tensor.nbytes
    return total


def _cases() -> list[Case]:
    cases = []
    for preset, rows, steps in (("tiny", (1, 16), 300), ("gecko-125m", (1, 16), 12)):
        model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
        prefill = read(model, [torch.randint(0, 256, (PROMPT,))])
        for name in FORMATS:
            one = in_format(model, name)
            start = prefill if name == "float32" else read(one, [torch.randint(0, 256, (PROMPT,))])
            for count in rows:
                cases.append(gecko_case(f"{preset}, {name}, {count} rows", one, start, count, steps))
            narrow = f"{preset}, {name}, window in bfloat16, {rows[-1]} rows"
            cases.append(gecko_case(narrow, one, start, rows[-1], steps, torch.bfloat16))
        cases += [_llama_case(preset, model, context, steps) for context in (128, 512, 4096)]
    return cases


def in_format(model: gecko.Gecko, name: str) -> gecko.Gecko:
    """Return a copy of ``model`` with weights in one of ``FORMATS``."""
    changed = copy.deepcopy(model)
    if name == "bfloat16":
        changed.bfloat16()
    elif name != "float32":
        quantize(changed, int(name.removeprefix("int")))
    return changed


def gecko_case(
    name: str, model: gecko.Gecko, prefill: Prefill, rows: int, steps: int, window_dtype: torch.dtype | None = None
) -> Case:
    """Return a case of ``rows`` sequences that go on from ``prefill``."""
    decoder = Decoder(model, rows, window_dtype)
    with torch.inference_mode():
        for _ in range(rows):
            decoder.add(prefill.state, prefill.seen)
    assert decoder.backend == "cpu" and decoder._all is not None, name
    tokens = [65] * rows
    count = bytes_of_weights(model) + rows * bytes_of_state(prefill, model.config, window_dtype)
    weights = [tensor for parameter in _weights_read(model) for tensor in plain_tensors(parameter)]
    states = [tensor[:rows] for tensor in decoder._all.tensors().values()]
    return Case(name, rows, lambda: decoder.step(tokens), count, steps, [*weights, *states])


def llama_hidden(model: gecko.Gecko) -> int:
    """Return the width of the feed-forward layers of a Llama with about as many weights in its blocks as ``model``.

    It is a multiple of 32, because llama.cpp quantises weights in groups of 32.
    """
    config = model.config
    block = sum(parameter.numel() for parameter in model.blocks.parameters()) / config.num_layers
    return 32 * round((block - 4 * config.model_dim**2) / (3 * config.model_dim) / 32)


def _llama_case(preset: str, model: gecko.Gecko, context: int, steps: int) -> Case:
    """A Llama of transformers with about as many weights in its blocks, after ``context`` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    layers = config.num_layers
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.model_dim, intermediate_size=llama_hidden(model),
        num_hidden_layers=layers,
        num_attention_heads=config.num_heads, max_position_embeddings=context + 2, attn_implementation="sdpa",
        tie_word_embeddings=config.tie_embedding,
    )).eval()  # fmt: skip
    with torch.inference_mode():
        cache = llama(torch.randint(0, 256, (1, context)), use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step() -> None:
        llama(torch.tensor([[65]]), past_key_values=cache, use_cache=True)
        cache.crop(-1)

    total = sum(parameter.nbytes for parameter in llama.parameters())
    total += 2 * layers * context * config.model_dim * 4
    return Case(f"Llama like {preset}, float32, context {context:,}", 1, step, total, steps, list(llama.parameters()))


def _steps_table(cases: list[Case], rounds: list[list[Measured]]) -> str:
    lines = [
        f"## A decoded token, Gecko after {PROMPT:,} tokens", "",
        "| case | ms per step | tokens/s | MB read | GB/s of this memory | share of the byte limit |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for case, measured in zip(cases, zip(*rounds, strict=True), strict=True):
        took = statistics.median(one.seconds for one in measured)
        share = statistics.median(case.bytes_read / one.rate / one.seconds for one in measured)
        rate = statistics.median(one.rate for one in measured)
        lines.append(
            f"| {case.name} | {took * 1e3:.3f} | {case.rows / took:,.0f} | {case.bytes_read / 1e6:,.1f} | "
            f"{rate / 1e9:.1f} | {share:.0%} |"
        )
    return "\n".join([*lines, ""])


def _generate_table() -> str:
    """Measure whole calls of ``gecko.generate``, without the prompt: a long call minus a short one."""
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    prompt = torch.randint(0, 256, (PROMPT,))
    lines = ["## gecko.generate, tiny, float32", "", "| sampling | rows | tokens/s |", "|---|---:|---:|"]
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        for rows in (1, 16):
            found = []
            for _ in range(ROUNDS):
                times = []
                for count in (1, 501):
                    begin = time.perf_counter()
                    gecko.generate(model, [prompt] * rows, max_new_tokens=count, temperature=temperature, seed=0)
                    times.append(time.perf_counter() - begin)
                found.append(rows * 500 / (times[1] - times[0]))
            lines.append(f"| {name} | {rows} | {statistics.median(found):,.0f} |")
    return "\n".join([*lines, ""])


def _positions_table() -> str:
    """Measure steps of ``tiny`` far into a text."""
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    cases, state, before = [], None, 0
    for position in POSITIONS:
        prefill = read(model, [torch.randint(0, 256, (position - before,))], state)
        state, before = prefill.state, position
        cases.append(gecko_case(f"{position:,}", model, prefill, 1, 300))
    seconds = measure(cases)
    first = seconds[cases[0].name]
    lines = ["## tiny, float32, by position", "", "| position | ms per step | of the first |", "|---:|---:|---:|"]
    lines += [f"| {name} | {took * 1e3:.3f} | {took / first:.3f} |" for name, took in seconds.items()]
    return "\n".join([*lines, ""])


def _heading() -> str:
    return (
        f"# Inference on the CPU\n\n{date.today()}, {machine()}, {torch.get_num_threads()} threads. "
        "The limit of a step is the rate at which a loop in C reads its weights and states, also from caches. "
        f"Random weights. Medians of {ROUNDS} alternating rounds. Command: `python benchmarks/inference.py --write`.\n"
    )


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="measure the cases whose name contains this text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
