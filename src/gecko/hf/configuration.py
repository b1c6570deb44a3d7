"""Config class for transformers: the fields of ``gecko.GeckoConfig``, also under the names of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from gecko.config import MODEL_TYPE, PRESETS
from gecko.config import GeckoConfig as Architecture


class GeckoConfig(PretrainedConfig):
    """Config of a Gecko in transformers. It takes the fields of ``gecko.GeckoConfig`` and of transformers by keyword.

    The defaults are those of the preset ``tiny``: transformers creates a config without arguments and compares others
    with it. The constructor of a model checks the fields by calling ``architecture``; that of a config only raises
    ValueError if both names of one field are given and differ.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (Trainer appends to this list)
    attribute_map = {  # noqa: RUF012 (transformers expects a plain dictionary)
        "hidden_size": "model_dim",
        "intermediate_size": "ffn_dim",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "tie_word_embeddings": "tie_embedding",
    }

    def __init__(self, *, use_cache: bool = True, **fields: Any) -> None:
        for theirs, ours in self.attribute_map.items():
            if theirs in fields and fields.setdefault(ours, given := fields.pop(theirs)) != given:
                raise ValueError(
                    f"{theirs} and {ours} are names of one field; got {given} and {fields[ours]}. Give one of them."
                )
        for name, value in PRESETS["tiny"].to_dict().items():
            setattr(self, name, fields.pop(name, value))
        self.use_cache = use_cache
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields.setdefault(name, None)
        fields.setdefault("auto_map", {})  # TRL reads it
        fields["tie_word_embeddings"] = self.tie_embedding
        super().__init__(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, those of ``attribute_map`` under both names: PEFT looks for ``hidden_size``."""
        fields: dict[str, Any] = super().to_dict()
        return fields | {theirs: fields[ours] for theirs, ours in self.attribute_map.items()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields of ``config.json``, each under one name."""
        fields: dict[str, Any] = super().to_diff_dict()
        return {name: value for name, value in fields.items() if name not in self.attribute_map}

    @property
    def n_ctx(self) -> int:
        """Longest context, for programs that ask for one. A Gecko reads texts of any length.

        lm-evaluation-harness cuts texts at 2,048 tokens if a config has no such number. The name is not
        ``max_position_embeddings``, because servers reserve memory for that many tokens.
        """
        return 2**31 - 1

    @classmethod
    def of(cls, architecture: Architecture, **fields: Any) -> GeckoConfig:
        """Return the config of ``architecture`` with additional fields of transformers."""
        return cls(**architecture.to_dict(), **fields)

    def architecture(self) -> Architecture:
        """Return the fields as a ``gecko.GeckoConfig``. Raise ValueError if the fields contradict each other."""
        return Architecture(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Architecture)})
