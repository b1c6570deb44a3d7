"""Decoding on the CPU against the bytes that a token must read, beside transformers' Llama of equal size.

    python benchmarks/inference.py --write

The byte limit of a step is the bytes of weights and states that it must read, over the rate at which a loop in C reads
the same memory, immediately before or after the step; the faster one counts: on a virtual machine two blocks of memory
may differ by a factor of two, for as long as the process lives. Times and shares are medians over rounds. ``--only
NAME`` measures the cases whose name contains NAME.
"""

from __future__ import annotations

import copy
import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from measuring import in_turns, median_seconds, of_processor, parsed, parser_of, publish, seconds_of, table
from torch import Tensor, nn

import gecko
from gecko.inference import Prefill, read
from gecko.inference.decoder import Decoder
from gecko.io.quantization import plain_tensors, quantize

PROMPT = 1000
ROUNDS, READINGS = 5, 5
FORMATS = ("float32", "bfloat16", "int8", "int4")
POSITIONS = (1_000, 10_000, 100_000, 1_000_000)
_LOOP = """
#include <stdint.h>
typedef int64_t lanes __attribute__((vector_size(64), aligned(8)));
// Reads whole lines of 64 bytes of all blocks, each divided over the threads.
int64_t read_blocks(const char **block, const int64_t *bytes, int64_t count, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = 0; b < count; b++) {
            const int64_t lines = bytes[b] / 64;
            const lanes *at = (const lanes *)block[b] + lines * thread / threads;
            const lanes *end = (const lanes *)block[b] + lines * (thread + 1) / threads;
            lanes sums[4] = {{0}};
            for (; at + 4 <= end; at += 4) {
                __builtin_prefetch((const char *)at + 8192, 0, 2), __builtin_prefetch((const char *)at + 8256, 0, 2);
                __builtin_prefetch((const char *)at + 8320, 0, 2), __builtin_prefetch((const char *)at + 8384, 0, 2);
                for (int i = 0; i < 4; i++) sums[i] += at[i];
            }
            lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
            for (int i = 0; i < 8; i++) total += sum[i];
        }
    return total;
}
"""


@dataclass(frozen=True)
class Case:
    """A model with some sequences that decode side by side."""

    name: str
    rows: int
    step: Callable[[], object]
    bytes_read: int
    """By one step."""
    steps: int
    """Number of steps in one measurement."""
    memory: Sequence[Tensor]
    """Weights and states."""

    def seconds(self) -> float:
        return median_seconds(self.step, self.steps, warm_ups=1)

    def beside_memory(self) -> tuple[float, float]:
        """Return the seconds of a step, and the bytes per second at which its memory can be read at that time."""
        before = read_rate(self.memory)
        seconds = self.seconds()
        return seconds, max(before, read_rate(self.memory))


def read_rate(tensors: Sequence[Tensor]) -> float:
    """Return bytes per second of reading all ``tensors`` once: the best of several readings."""
    sizes = [tensor.nbytes for tensor in tensors]
    blocks = (ctypes.c_void_p * len(sizes))(*[tensor.data_ptr() for tensor in tensors])
    bytes_of_each = (ctypes.c_int64 * len(sizes))(*sizes)
    loop = partial(_read_blocks(), blocks, bytes_of_each, len(sizes), torch.get_num_threads())
    return sum(sizes) / min(seconds_of(loop) for _ in range(READINGS))


@cache
def _read_blocks() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_LOOP, encoding="ascii")
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
        subprocess.run(["gcc", *flags, str(source), "-o", str(built)], check=True)
        function = ctypes.CDLL(str(built)).read_blocks
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    function.restype = ctypes.c_int64
    return function


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


def cases() -> Iterator[Case]:
    for preset, rows, steps in (("tiny", (1, 16), 300), ("gecko-125m", (1, 16), 12)):
        model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
        prefill = read(model, [torch.randint(0, 256, (PROMPT,))])
        for name in FORMATS:
            one = in_format(model, name)
            start = prefill if name == "float32" else read(one, [torch.randint(0, 256, (PROMPT,))])
            for count in rows:
                yield gecko_case(f"{preset}, {name}, {count} rows", one, start, count, steps)
            narrow = f"{preset}, {name}, window in bfloat16, {rows[-1]} rows"
            yield gecko_case(narrow, one, start, rows[-1], steps, torch.bfloat16)
        for context in (128, 512, 4096):
            yield llama_case(preset, model, context, steps)


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


def llama_case(preset: str, model: gecko.Gecko, context: int, steps: int) -> Case:
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


def steps_table(cases: Sequence[Case]) -> list[str]:
    rows = []
    rounds = in_turns({case.name: case.beside_memory for case in cases}, ROUNDS)
    for case in cases:
        took, rate = (statistics.median(column) for column in zip(*rounds[case.name], strict=True))
        share = statistics.median(case.bytes_read / rate / seconds for seconds, rate in rounds[case.name])
        rows.append((case.name, 1e3 * took, case.rows / took, case.bytes_read / 1e6, rate / 1e9, share))
    columns = ["case", "ms per step|.3f", "tokens/s|,.0f", "MB read|,.1f", "GB/s of this memory|.1f",
               "share of the byte limit|.0%"]  # fmt: skip
    return [f"## A decoded token, Gecko after {PROMPT:,} tokens", table(columns, rows)]


def generate_table() -> list[str]:
    """Measure whole calls of ``gecko.generate``, without the prompt: a long call minus a short one."""
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    prompt = torch.randint(0, 256, (PROMPT,))

    def call(rows: int, temperature: float, count: int) -> object:
        return gecko.generate(model, [prompt] * rows, max_new_tokens=count, temperature=temperature, seed=0)

    found = []
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        for rows in (1, 16):
            short, long = (partial(call, rows, temperature, count) for count in (1, 501))
            rates = [rows * 500 / (seconds_of(long) - seconds_of(short)) for _ in range(ROUNDS)]
            found.append((name, rows, statistics.median(rates)))
    return ["## gecko.generate, tiny, float32", table(["sampling", "rows|,", "tokens/s|,.0f"], found)]


def positions_table() -> list[str]:
    """Measure steps of ``tiny`` far into a text."""
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny")).eval()
    ways, state, before = {}, None, 0
    for position in POSITIONS:
        prefill = read(model, [torch.randint(0, 256, (position - before,))], state)
        state, before = prefill.state, position
        ways[position] = gecko_case(f"{position:,}", model, prefill, 1, 300).seconds
    medians = {position: statistics.median(times) for position, times in in_turns(ways, ROUNDS).items()}
    rows = [(position, 1e3 * took, took / medians[POSITIONS[0]]) for position, took in medians.items()]
    return ["## tiny, float32, by position", table(["position|,", "ms per step|.3f", "of the first|.3f"], rows)]


def main() -> None:
    given = parsed(parser_of(__doc__, only=("", "measure the cases whose name contains this text")))
    torch.manual_seed(0)
    parts = steps_table([case for case in cases() if given.only in case.name])
    if given.only in "generate":
        parts += generate_table()
    if given.only in "positions":
        parts += positions_table()
    publish(
        of_processor("inference"), given, "Inference on the CPU",
        f"{torch.get_num_threads()} threads. The limit of a step is the rate at which a loop in C reads its weights "
        f"and states, also from caches. Random weights. Medians of {ROUNDS} alternating rounds.", *parts,
    )  # fmt: skip


if __name__ == "__main__":
    main()
