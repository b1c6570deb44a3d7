"""Llama, Mistral, Qwen2 and Qwen3 as Gecko blocks: their fields, their folders, and the layout of their weights.

Two chunks of a document are computed as the source computes them. CEMA, gate, hidden branch and memory are absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import safe_open
from torch import Tensor

from gecko.config import Epsilon, GeckoConfig, Layers, RopeBase, Size
from gecko.convert.release import all_names, renamed, with_tied_head
from gecko.data.tokenizers import copy_tokenizer
from gecko.io.files import found_at, inner_name, parse_object
from gecko.io.model_folder import CONFIG, INDEX, WEIGHTS, reading
from gecko.records import FieldError, Parsed, Positive, build
from gecko.runtime.process import __version__

TRANSFORMERS, GGUF = 0, 1
"""Places of names in the tables."""
TOP = {
    "embedding.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm.weight": ("model.norm.weight", "output_norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
}
BLOCK = {
    "mixer.norm.weight": ("input_layernorm.weight", "attn_norm.weight"),
    "mixer.to_query.weight": ("self_attn.q_proj.weight", "attn_q.weight"),
    "mixer.to_key.weight": ("self_attn.k_proj.weight", "attn_k.weight"),
    "mixer.to_value.weight": ("self_attn.v_proj.weight", "attn_v.weight"),
    "mixer.to_output.weight": ("self_attn.o_proj.weight", "attn_output.weight"),
    "feed_forward.norm.weight": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "feed_forward.fc1.weight": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "feed_forward.fc3.weight": ("mlp.up_proj.weight", "ffn_up.weight"),
    "feed_forward.fc2.weight": ("mlp.down_proj.weight", "ffn_down.weight"),
}
OWN = {
    "qwen2": {
        "mixer.to_query.bias": ("self_attn.q_proj.bias", "attn_q.bias"),
        "mixer.to_key.bias": ("self_attn.k_proj.bias", "attn_k.bias"),
        "mixer.to_value.bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    },
    "qwen3": {
        "mixer.query_norm.weight": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        "mixer.key_norm.weight": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    },
}
"""Parameters of a block that only one kind of model has."""

KINDS = ("llama", "mistral", "qwen2", "qwen3")
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": True},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
"""Defaults in transformers that differ from those of a Llama."""
_ROPES = ("default", "llama3")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_IN_ROPE = {"rope_type", "rope_theta", "partial_rotary_factor", *_LLAMA3}
"""Fields that are read in ``rope_parameters``; those but ``rope_theta`` and ``partial_rotary_factor`` only there."""
_UNREAD = {
    "llama": {"sliding_window", "use_sliding_window"}, "mistral": {"use_sliding_window", "attention_bias", "mlp_bias"},
    "qwen2": {"attention_bias", "mlp_bias"}, "qwen3": {"mlp_bias"},
}  # fmt: skip
"""Fields that a kind of model does not have; transformers computes the same whatever they say."""


def _only(*wanted: Any, because: str) -> Parsed:
    """Return metadata of a field that may have some values only; the first is its default."""

    def parse(value: Any, name: str, texts: bool) -> Any:
        if value not in wanted:
            values = " or ".join(str(each).lower() for each in wanted if each is not None) or "absent"
            raise FieldError(f"{name} must be {values}, because {because}; got {str(value)[:100]!r}.", name)
        return value

    return Parsed(parse)


@dataclass(frozen=True)
class SourceConfig:
    """Fields of a transformers config that outputs depend on. Values that a Gecko block cannot compute are refused."""

    model_type: Annotated[str, _only(*KINDS, because="a block can be one of these")]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    rope_type: Annotated[str, _only(*_ROPES, because="a block has fixed angles and unscaled scores")] = _ROPES[0]
    rope_theta: RopeBase = 10_000.0
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    rope_divisors: tuple[Positive, ...] | None = None
    """Divisors of the frequencies; GGUF files hold them in place of ``llama3`` and its factors."""
    hidden_act: Annotated[str, _only("silu", because="the feed-forward of a block has it")] = "silu"
    partial_rotary_factor: Annotated[float | None, _only(None, 1, because="all features of a head are rotated")] = None
    attention_bias: Annotated[bool | None, _only(None, False, because="the output projection has no bias")] = None
    mlp_bias: Annotated[bool | None, _only(None, False, because="the feed-forward of a block has no biases")] = None
    is_causal: Annotated[bool | None, _only(None, True, because="a block reads no later tokens")] = None
    num_experts: Annotated[int | None, _only(None, 0, because="a block has one feed-forward")] = None
    num_local_experts: Annotated[int | None, _only(None, 0, because="a block has one feed-forward")] = None
    quantization_config: Annotated[Any, _only(None, because="packed weights are not read")] = None
    auto_map: Annotated[Any, _only(None, because="code of the folder, which may compute anything, is not run")] = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SourceConfig:
        """Build it from a ``config.json`` with transformers' defaults; ValueError for what a block cannot compute."""
        rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope |= {name: fields[name] for name in _LLAMA3[-1:] if name in fields}  # which transformers prefers
        kind = str(fields.get("model_type"))
        known = cls.__dataclass_fields__.keys() - {"rope_type", "rope_divisors", *_LLAMA3} - _UNREAD.get(kind, set())
        own = {name: fields[name] for name in fields.keys() & known}
        return build(cls, {**DEFAULTS.get(kind, {}), **own, **{name: rope[name] for name in rope.keys() & _IN_ROPE}})

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def renamed(self, weights: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
        """Return weights by their names in ``Gecko``. ``place`` says whose names they have."""
        tables = (TOP, BLOCK | OWN.get(self.model_type, {}))
        top, block = ({theirs[place]: ours for ours, theirs in table.items()} for table in tables)
        names = all_names(top, block, ("model.layers", "blk")[place], self.num_hidden_layers)
        return renamed(weights, names, f"parameter of {self.model_type}")

    def frequencies(self, head_dim: int) -> tuple[float, ...] | None:
        """Return the angles per token, (head_dim / 2); None: those of ``rope_theta`` alone.

        ``llama3`` divides low frequencies by its factor and keeps high ones, with a transition between them.
        """
        plain = [self.rope_theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.rope_divisors is not None:
            if len(self.rope_divisors) != len(plain):
                raise ValueError(f"rope_divisors must be {len(plain)} numbers; got {len(self.rope_divisors)}.")
            return tuple(each / divisor for each, divisor in zip(plain, self.rope_divisors, strict=True))
        if self.rope_type == "default":
            return None
        factor, low, high, length = (getattr(self, name) or 0 for name in _LLAMA3)
        if not (factor and 0 < low < high and length):
            raise ValueError(f"rope_type llama3 needs {', '.join(_LLAMA3)}, the second below the third; one is not so.")
        kept = [min(1.0, max(0.0, (length * each / (2 * math.pi) - low) / (high - low))) for each in plain]
        return tuple(share * each + (1 - share) * each / factor for each, share in zip(plain, kept, strict=True))

    def in_gecko(self, chunk_size: int, sinks: int) -> GeckoConfig:
        """Return the config of the Gecko; ValueError if two chunks are more than the sliding window."""
        window = self.sliding_window if self.use_sliding_window else None
        if window is not None and window < 2 * chunk_size:
            raise ValueError(
                f"sliding_window must be absent, or at least the two chunks that a block sees; got {window} and chunks "
                f"of {chunk_size}. Try --chunk {max(1, window // 2)}."
            )
        heads = self.num_attention_heads
        head_dim = self.head_dim or self.hidden_size // heads
        return GeckoConfig(
            vocab_size=self.vocab_size, num_layers=self.num_hidden_layers, model_dim=self.hidden_size,
            key_dim=heads * head_dim, value_dim=heads * head_dim, num_heads=heads, ffn_dim=self.intermediate_size,
            key_value_heads=self.key_value_heads, chunk_size=chunk_size, sinks=sinks, norm_eps=self.rms_norm_eps,
            query_key_bias=self.model_type == "qwen2", query_key_norm=self.model_type == "qwen3",
            tie_embedding=self.tie_word_embeddings, rope_base=self.rope_theta,
            rope_frequencies=self.frequencies(head_dim), queries_and_keys="separate", norm="rms",
            value_activation="none", gate="none", hidden_branch=False, local_mixing="none", memory="none",
            bfloat16_window=True,
        )  # fmt: skip


@dataclass(frozen=True)
class LlamaSource:
    """A model as its files hold it, and where they come from."""

    config: SourceConfig
    weights: dict[str, Tensor]
    """By their names in ``Gecko``, as the files hold them."""
    paired: bool
    """Whether rotary pairs are neighbours (2i, 2i + 1), as in ``Gecko``, or halves of a head (i, i + d / 2)."""
    write_tokenizer: Callable[[Path], None]
    """Writes tokenizer and chat template to a folder, if the source has them."""
    name: str
    place: str
    """The source, as the model card names it."""
    changes: str
    """Sentences about changes of the weights' values."""
    licence: str | None = None
    """Identifier of the licence, if the source names one."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Licences and notices, by the names of their files."""


def read_folder(folder: Path) -> LlamaSource:
    """Read config and weights, in one file or in several; ValueError if they cannot be in a Gecko block."""
    config = parse_object(folder / CONFIG, "a config that a Gecko block can compute", SourceConfig.of)
    # Old checkpoints also hold the rotary embedding's frequencies, which the config gives.
    stored = {name: x for name, x in _read_weights(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    name, card = folder.resolve().name, folder / "README.md"
    licence = re.search(r"^license: *(\S+)", card.read_text("utf-8", "replace") if card.is_file() else "", re.MULTILINE)
    return LlamaSource(
        config, config.renamed(stored, TRANSFORMERS), False, partial(copy_tokenizer, str(folder)), name,
        f"the folder {name}", "Matrices keep their numbers.", licence and licence[1], _licences(folder),
    )  # fmt: skip


def _read_weights(folder: Path) -> dict[str, Tensor]:
    def listed(index: dict[str, Any]) -> list[str]:
        return sorted(set(map(inner_name, index["weight_map"].values())))

    several = (folder / INDEX).is_file()
    files = parse_object(folder / INDEX, "file names under weight_map", listed) if several else [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for path in (folder / file for file in files):
        if not path.is_file():
            raise FileNotFoundError(f"{path} must hold weights as safetensors; {found_at(path)}. Download it again.")
        with reading(path), safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if twice := tensors.keys() & found.keys():
            raise ValueError(f"{folder} must hold every weight once; {path.name} holds {min(twice)} again.")
        tensors |= found
    return tensors


def in_gecko(source: LlamaSource, chunk_size: int, sinks: int) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Return config and weights of a Gecko that computes what ``source`` computes, up to two chunks of a document.

    Weights keep their numbers, and their dtype except float16; those of Qwen3's norms of queries and keys become
    offsets from 1. Raise ValueError if a field has a value that a Gecko block cannot compute, or a tied model holds two
    embeddings.
    """
    config = source.config.in_gecko(chunk_size, sinks)
    heads = {"query": config.num_heads, "key": source.config.key_value_heads}
    weights = {}
    for name, weight in source.weights.items():
        layer = name.split(".")[-2]
        if layer.startswith("to_") and layer[3:] in heads and not source.paired:
            weight = _paired(weight, heads[layer[3:]])
        if layer in ("query_norm", "key_norm"):
            weight = _offset(_paired(weight, 1).repeat(heads[layer[:-5]]))
        weights[name] = weight.float() if weight.dtype == torch.float16 else weight
        if layer == "to_value" and source.config.model_type != "qwen2":
            weights[name.replace(".weight", ".bias")] = weight.new_zeros(weight.shape[:1])
    return config, with_tied_head(weights, "tie_word_embeddings") if config.tie_embedding else weights


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Return a weight (heads · d, …) with the features i and i + d / 2 of every head side by side."""
    if weight.shape[:1].numel() % (2 * heads):
        return weight  # of a wrong shape, which the check of all shapes reports
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _offset(weight: Tensor) -> Tensor:
    """Return weight − 1 in its dtype; in float32 if that would lose digits, as of small weights in 16 bits."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32)) - 1
    narrow = wide.to(weight.dtype)
    return narrow if torch.equal(narrow.to(wide.dtype), wide) else wide


_CARD = """\
---
{licence_field}pipeline_tag: text-generation
tags:
- gecko
---

# {name} in a Gecko block

The weights of {name}, from {place}, converted by gecko-lm {version}. **Nothing was trained**,
and no claim of the Gecko paper holds for this model.

- **Up to {window:,} tokens** of a text it computes what {name} computes.
- **After that** a token sees its own chunk of {chunk:,} tokens, the chunk before it{sinks}. So the state has a
  constant size, and what lies further back is forgotten. How good the answers are there was not measured.
- It has no moving average, no gate and no adaptive memory.

## Changes

{changes} Parameters have the names of this package, and rows of queries and keys another order.

## Licence

That of {name}: {licence}.
"""
_LICENCES = ("licen", "notice", "copying", "use_policy")
"""Beginnings of the names of files that must stay with the weights."""


def _licences(folder: Path) -> dict[str, bytes]:
    beside = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower().startswith(_LICENCES))
    return {path.name: path.read_bytes() for path in beside}


def copy_card(source: Path, folder: Path, trained: str) -> None:
    """Copy the card of a converted model, with a section that says what was trained, its licences and notices."""
    for name, content in _licences(source).items():
        (folder / name).write_bytes(content)
    if (source / "README.md").is_file():
        before = (source / "README.md").read_text("utf-8", "replace")
        after = f"\n## Changed since\n\n{trained} What is said above about training and memory holds for its source.\n"
        (folder / "README.md").write_text(before + after, encoding="utf-8")


def write_card(source: LlamaSource, config: GeckoConfig, folder: Path) -> None:
    """Write the card, licences and notices. What a source calls itself stays text in one line."""
    for name, content in source.files.items():
        (folder / name).write_bytes(content)
    name, place = (re.sub(r"[\s`\[\]<>]+", " ", text).strip() for text in (source.name, source.place))
    licence = source.licence if re.fullmatch(r"[\w.+-]+", source.licence or "") else None
    first = "first token" if config.sinks == 1 else f"first {config.sinks} tokens"
    sinks = f" and the {first} of the text" if config.sinks else ""
    text = _CARD.format(
        licence_field=f"license: {licence}\n" * bool(licence), name=name, place=place, version=__version__,
        window=2 * config.chunk_size, chunk=config.chunk_size, sinks=sinks, changes=source.changes,
        licence=", ".join([licence or "see its source", *source.files]),
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")
