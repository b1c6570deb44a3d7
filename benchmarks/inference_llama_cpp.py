"""Gecko beside llama.cpp on the CPU: one decoded token after short and long texts, and reading a text.

    python benchmarks/inference_llama_cpp.py --write
    python benchmarks/inference_llama_cpp.py --model models/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --write

The peer is a Llama with about as many weights, random, in the same type: float32, bfloat16, and 8 bit (Q8_0 there).
With ``--model`` and ``--gguf`` it is the Llama that the model was converted from, with the same weights in other types.
Both take the same number of threads. Rounds alternate between the two, and medians count. The first type of weights
reads the longest text; the peers of the others take its cache of keys and values, because reading it again takes
minutes. The byte limit of a token is the bytes that it reads of weights and of the state or the cache, over the rate
at which this memory is read (``inference.py``).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from inference import ROUNDS, Case, gecko_case, in_format, llama_hidden
from measuring import find_model, in_turns, of_processor, parsed, parser_of, publish, seconds_of, table
from torch import Tensor

import gecko
from gecko.inference import read
from gecko.runtime.process import keep_freed_memory, require

gguf = require("gguf", "llamacpp")
llama_cpp = require("llama_cpp", "llamacpp")

BATCH = 2048
"""Tokens of one call while reading, the default of llama.cpp."""
WEIGHTS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
STEPS = {"tiny": 200, "gecko-125m": 20}
Asked = dict[tuple[int | str, str], float]
"""Least ratio of a decoded token by context and weights, and of reading."""
ASKED: Asked = {
    (512, "float32"): 1, (512, "bfloat16"): 1, (512, "int8"): 1, (32_768, "float32"): 2, (32_768, "int8"): 4,
    ("reading", "float32"): 5,
}  # fmt: skip
CONTEXTS = (512, 8_192, 32_768)
"""Tokens with the decoded one."""

# llama.cpp


def random_llama(like: gecko.Gecko, context: int, path: Path, weights: str) -> None:
    """Write a Llama with random weights of one of llama.cpp's types, such as ``Q8_0``.

    It has the heads of ``like``: with heads of 64 features, llama.cpp took up to 1.8 times as long.
    """
    config, hidden = like.config, llama_hidden(like)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(config.model_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(config.model_dim // config.num_heads)
    _add_tokenizer(writer, config.vocab_size)
    for name, shape in _shapes(config, hidden).items():
        _add_tensor(writer, name, shape, gguf.GGMLQuantizationType[weights])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_type(source: Path, path: Path, weights: str) -> None:
    """Write the model of a GGUF file with weights of another of llama.cpp's types."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights}"), True
    options.pure = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp must write {source} with weights in {weights}; it did not.")


def _shapes(config: gecko.GeckoConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    width = config.model_dim
    square, wide = (width, width), (hidden, width)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab_size, width), "output_norm": (width,)}
    if not config.tie_embedding:
        shapes["output"] = (config.vocab_size, width)
    for layer in range(config.num_layers):
        block = {
            "attn_norm": (width,), "attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square,
            "ffn_norm": (width,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": (width, hidden),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
    if len(shape) == 1:  # llama.cpp keeps the weights of norms in float32
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        return
    numbers = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.02)
    writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of ``size`` names; llama.cpp does not load a model without one, nor without a merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token}" for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 1"])


class Llama:
    """A model of llama.cpp with one sequence.

    Args:
        context: most tokens that the cache of keys and values holds; it is float16, the default of llama.cpp.
    """

    def __init__(self, path: Path, context: int, threads: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch = context, BATCH
        options.n_threads = options.n_threads_batch = threads
        # On a CPU, one step with flash attention took two to four times as long as without it.
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = self._model and llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp must load {path}; it did not.")
        self._memory = llama_cpp.llama_get_memory(self._context)

    def read(self, tokens: list[int]) -> None:
        """Read tokens after those that the cache holds, and compute the logits of the last one."""
        for begin in range(0, len(tokens), BATCH):
            part = tokens[begin : begin + BATCH]
            array = (llama_cpp.llama_token * len(part))(*part)
            code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(part)))
            if code:
                raise RuntimeError(f"llama.cpp must read {len(part)} tokens; it returned {code}.")
            llama_cpp.llama_get_logits_ith(self._context, -1)  # waits for them

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens of the cache."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp must keep the first {length} tokens; it did not.")

    def bytes_read(self, context: int) -> int:
        """Return the bytes of weights and of the cache that a token reads at ``context`` tokens.

        The embedding counts whole: it is the head of a model that ties them, and small in a model of bytes.
        """
        heads, width = llama_cpp.llama_model_n_head(self._model), llama_cpp.llama_model_n_embd(self._model)
        numbers = 2 * llama_cpp.llama_model_n_layer(self._model) * llama_cpp.llama_model_n_head_kv(self._model)
        return int(llama_cpp.llama_model_size(self._model)) + 2 * numbers * (width // heads) * context

    def cache(self) -> ctypes.Array[ctypes.c_uint8]:
        """Return a copy of the keys and values of all tokens."""
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        kept = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, kept, size, 0)
        return kept

    def fill(self, kept: ctypes.Array[ctypes.c_uint8]) -> None:
        """Take the cache of a model of the same shape; a step takes as long as after reading the tokens."""
        if not llama_cpp.llama_state_seq_set_data(self._context, kept, len(kept), 0):
            raise RuntimeError(f"llama.cpp must take a cache of {len(kept):,} bytes; it did not.")

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:  # noqa: N802
    """Drop the log of llama.cpp."""


def system_info() -> str:
    """Return the processor's features that this build of llama.cpp uses."""
    parts = llama_cpp.llama_print_system_info().decode().removeprefix("CPU : ").split(" | ")
    return ", ".join(part.split(" = ")[0] for part in parts if part.strip().endswith("= 1"))


# Measurements


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
    asked: Asked

    def row(
        self, weights: str, work: str, speeds: Sequence[float], key: int | str, limits: Sequence[float] = ()
    ) -> tuple[str, ...]:
        """Return a row of the page: tokens per second of both, and shares of their byte limits if there are some."""
        asked = self.asked.get((key, weights))
        shares = [f"{speed / limit:.0%}" for speed, limit in zip(speeds, limits, strict=True)] if limits else ["", ""]
        rates = [f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" for speed in speeds]
        return (
            self.name, f"{weights}, {self.weights[weights]}", work, rates[0], shares[0], rates[1], shares[1],
            "" if asked is None else f"≥ {asked:g} ×", f"{speeds[0] / speeds[1]:.2f} ×",
        )  # fmt: skip


def subjects(given: argparse.Namespace) -> Iterator[Subject]:
    if given.model:
        folder = find_model(given.model)
        weights = {"bfloat16": "F16", "int8": "Q8_0"}
        least = {"bfloat16": (0.95, 1.5, 2.5), "int8": (0.95, 1.5, 4.0)}
        asked: Asked = {("reading", name): 1 for name in weights}
        for name, ratios in least.items():
            asked |= {(context, name): ratio for context, ratio in zip(CONTEXTS, ratios, strict=True)}
        write = partial(in_type, given.gguf)
        yield Subject(folder.name, gecko.load(folder), write, weights, CONTEXTS[1], 20, asked)
        return
    for preset in given.preset or STEPS:
        model = gecko.Gecko(gecko.GeckoConfig.preset(preset)).eval()
        write = partial(random_llama, model, CONTEXTS[-1])
        yield Subject(preset, model, write, WEIGHTS, CONTEXTS[-1], STEPS[preset], ASKED)


def compare(subject: Subject, weights: Sequence[str], reads: int) -> Iterator[tuple[str, ...]]:
    """Measure one model in several formats, each beside its peer."""
    tokens, cache = torch.randint(0, 256, (CONTEXTS[-1] - 1,)), None
    for name in weights:
        changed = in_format(subject.model, name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "llama.gguf"
            subject.write(path, subject.weights[name])
            llama = Llama(path, CONTEXTS[-1], torch.get_num_threads())
        if cache is None:
            yield reading(subject, changed, name, llama, tokens[: subject.reads - 1], reads)
            llama.read(tokens[subject.reads - 1 :].tolist())
            cache = llama.cache()
        else:
            llama.fill(cache)
        for context in reversed(CONTEXTS):
            yield decoding(subject, changed, name, llama, tokens[: context - 1])
        llama.close()


def reading(
    subject: Subject, model: gecko.Gecko, weights: str, llama: Llama, tokens: Tensor, reads: int
) -> tuple[str, ...]:
    ids = tokens.tolist()

    def read_llama() -> None:
        llama.cut(0)
        llama.read(ids)

    read(model, [tokens[: len(tokens) // 64]])  # the first calls of a process are slower
    llama.read(ids[: len(ids) // 64])
    sides = {"gecko": lambda: seconds_of(lambda: read(model, [tokens])), "llama": lambda: seconds_of(read_llama)}
    speeds = [len(ids) / statistics.median(times) for times in in_turns(sides, reads).values()]
    return subject.row(weights, f"reading {len(ids) + 1:,}", speeds, "reading")


def decoding(subject: Subject, model: gecko.Gecko, weights: str, llama: Llama, before: Tensor) -> tuple[str, ...]:
    """Measure steps after ``before``, of which the peer's cache holds all or more; it returns there after each step."""
    context = len(before) + 1
    llama.cut(len(before))

    def step() -> None:
        llama.read([65])
        llama.cut(len(before))

    ours = gecko_case("gecko", model, read(model, [before]), 1, subject.steps)
    theirs = Case("llama", 1, step, llama.bytes_read(context), subject.steps, ours.memory)
    found = in_turns({case.name: case.beside_memory for case in (ours, theirs)}, ROUNDS)
    speeds = [statistics.median(1 / seconds for seconds, _ in side) for side in found.values()]
    rate = max(rate for side in found.values() for _, rate in side)
    limits = rate / ours.bytes_read, rate / theirs.bytes_read
    return subject.row(weights, f"a token at {context:,}", speeds, context, limits)


def main() -> None:
    parser = parser_of(
        __doc__, reads=(1, "how often each side reads the text"), model=(None, "a folder of gecko convert")
    )
    parser.add_argument("--preset", action="append", default=[], choices=STEPS, help="only this model; repeatable")
    parser.add_argument("--weights", action="append", default=[], help="only these, such as int8; repeatable")
    parser.add_argument("--gguf", type=Path, help="file of the Llama that it was converted from")
    given = parsed(parser)
    if (given.model is None) != (given.gguf is None):
        parser.error("--model and --gguf must be given together")
    keep_freed_memory()
    torch.manual_seed(0)
    rows = [row for one in subjects(given) for row in compare(one, given.weights or list(one.weights), given.reads)]
    same = "The same weights on both sides, from one file." if given.model else "Random weights, as many as in Gecko."
    publish(
        of_processor("inference_llama_cpp_converted" if given.model else "inference_llama_cpp"), given,
        "Gecko beside llama.cpp on the CPU",
        f"{torch.get_num_threads()} threads on both sides. llama-cpp-python {llama_cpp.__version__}, built from source "
        f"for this processor ({system_info()}); its cache is float16, flash attention is off because it is slower "
        f"here. {same} Medians of alternating rounds; reading {given.reads} times. Limit: the share of the byte limit "
        "of a token.",
        table(["model", "weights", "work", "Gecko, tokens/s|>", "limit|>", "llama.cpp, tokens/s|>", "limit|>",
               "asked|>", "measured|>"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
