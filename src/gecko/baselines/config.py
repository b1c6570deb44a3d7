"""The architecture of a Llama, in this package's words."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.config import check_above, check_counts, check_switches, checked_fields, named, read_fields

MODEL_TYPE = "llama"
"""What ``model_type`` says in a ``config.json``, as in transformers' own."""
NAMES = {
    "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "model_dim": "hidden_size",
    "num_heads": "num_attention_heads", "key_value_heads": "num_key_value_heads", "ffn_dim": "intermediate_size",
    "rope_base": "rope_theta", "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings",
}  # fmt: skip
"""Every field's name in transformers."""


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture of a Llama 2 (Touvron et al., 2023): RMS norms before each part, rotary embedding, SwiGLU, and
    attention of every token to all before it."""

    vocab_size: int
    """Ids of tokens."""
    num_layers: int
    """Blocks, each attention and a feed-forward."""
    model_dim: int
    """Width of the residual stream."""
    num_heads: int
    """Heads of queries."""
    ffn_dim: int
    """Hidden width of the feed-forward."""
    key_value_heads: int | None = None
    """Heads of keys and values, each for as many heads of queries; None: one for each."""
    rope_base: float = 10_000.0
    """Base of the angles of rotary embedding."""
    norm_eps: float = 1e-5
    """Added in norms to a mean square before its root is taken."""
    tie_embedding: bool = False
    """Whether the head shares the embedding's weight."""

    def __post_init__(self) -> None:
        check_counts(self, ("vocab_size", "num_layers", "model_dim", "num_heads", "ffn_dim", "num_key_value_heads"))
        if self.model_dim % (2 * self.num_heads):
            raise ValueError(
                "rotary embedding turns pairs of features, so model_dim must be a multiple of 2 · num_heads; "
                f"got {self.model_dim} and {self.num_heads}. Try model_dim={2 * self.num_heads * self.head_dim}."
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"key_value_heads must divide num_heads; got {self.key_value_heads} and {self.num_heads}. "
                f"Try key_value_heads={self.num_heads}."
            )
        check_above(self, {"norm_eps": 0, "rope_base": 1})
        check_switches(self, ("tie_embedding",))

    @property
    def num_key_value_heads(self) -> int:
        return self.num_heads if self.key_value_heads is None else self.key_value_heads

    @property
    def head_dim(self) -> int:
        return max(1, self.model_dim // self.num_heads)

    @property
    def key_value_dim(self) -> int:
        """Width of all keys, and of all values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def chunk_size(self) -> None:
        """Attention has no chunks: a token sees all before it."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> LlamaConfig:
        """The named architecture, with single fields changed by keyword."""
        return dataclasses.replace(named(PRESETS, name), **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LlamaConfig:
        return cls(**checked_fields(cls, fields))

    def for_transformers(self) -> dict[str, Any]:
        """The ``config.json`` that transformers reads."""
        values = {**self.to_dict(), "key_value_heads": self.num_key_value_heads}
        fields = {theirs: values[ours] for ours, theirs in NAMES.items()}
        return {"model_type": MODEL_TYPE, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **fields}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.for_transformers(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LlamaConfig:
        """From a ``config.json`` that ``save`` or transformers wrote. ValueError where it is of another model."""
        fields = read_fields(path)
        if fields.get("model_type") != MODEL_TYPE:
            kind = fields.get("model_type", "no model_type")
            raise ValueError(f"{path} must hold the config of a {MODEL_TYPE} model; it is of {kind!r}.")
        # transformers 5 keeps the base of the rotary embedding one level deeper.
        fields = {**fields, **(fields.get("rope_parameters") or {})}
        if fields.get("rope_type", "default") != "default" or fields.get("rope_scaling"):
            raise ValueError(f"{path} must be of a Llama with plain rotary embedding; its positions are scaled.")
        values = checked_fields(cls, {ours: fields[theirs] for ours, theirs in NAMES.items() if theirs in fields})
        heads, shared = values["num_heads"], values.get("key_value_heads")
        return cls(**{**values, "key_value_heads": None if shared == heads else shared})


PRESETS: dict[str, LlamaConfig] = {
    "llama2-7b": LlamaConfig(vocab_size=32_000, num_layers=32, model_dim=4096, num_heads=32, ffn_dim=11_008),
    "llama-tiny": LlamaConfig(vocab_size=264, num_layers=5, model_dim=128, num_heads=4, ffn_dim=312),
}
