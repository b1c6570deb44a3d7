"""A random Llama in llama.cpp: a GGUF file of the size of a Gecko model, reading and decoding."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from inference import llama_hidden

import gecko
from gecko.runtime.process import require

gguf = require("gguf", "llamacpp")
llama_cpp = require("llama_cpp", "llamacpp")

BATCH = 2048
"""Tokens of one call while reading, the default of llama.cpp."""


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
            self._decode(tokens[begin : begin + BATCH])

    def step(self, token: int) -> None:
        """Read one token and compute its logits."""
        self._decode([token])

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

    def _decode(self, tokens: list[int]) -> None:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(tokens)))
        if code:
            raise RuntimeError(f"llama.cpp must read {len(tokens)} tokens; it returned {code}.")
        llama_cpp.llama_get_logits_ith(self._context, -1)  # waits for them


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:  # noqa: N802
    """Drop the log of llama.cpp."""


def system_info() -> str:
    """Return the processor's features that this build of llama.cpp uses."""
    parts = llama_cpp.llama_print_system_info().decode().removeprefix("CPU : ").split(" | ")
    return ", ".join(part.split(" = ")[0] for part in parts if part.strip().endswith("= 1"))
