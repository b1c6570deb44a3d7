"""A Llama's config round-trips through a file with the names of transformers, and refuses invalid values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig as TransformersConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gecko.models import LlamaConfig, find_preset, load_config
from gecko.models.llama import NAMES, PRESETS

configs = st.builds(
    lambda heads, groups, width, **fields: LlamaConfig(
        num_heads=heads * groups, key_value_heads=heads, model_dim=2 * heads * groups * width, **fields
    ),
    heads=st.integers(1, 3), groups=st.integers(2, 3), width=st.integers(1, 4), vocab_size=st.integers(1, 999),
    num_layers=st.integers(1, 9), ffn_dim=st.integers(1, 99), rope_base=st.floats(2, 1e6),
    norm_eps=st.floats(1e-9, 1e-3), tie_embedding=st.booleans(),
)  # fmt: skip


@given(config=configs)
def test_files_say_the_same_to_us_and_to_transformers(config: LlamaConfig, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("config")
    config.save(folder / "config.json")
    assert load_config(folder / "config.json") == config
    theirs = TransformersConfig.from_pretrained(folder)
    for ours, name in NAMES.items():
        if ours != "rope_base":
            assert getattr(theirs, name) == getattr(config, ours)
    # transformers has moved the field of the base, so compare the frequencies that it computes and the file that it
    # writes.
    turns = LlamaRotaryEmbedding(theirs).inv_freq
    expected = config.rope_base ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    torch.testing.assert_close(turns, expected.float())
    theirs.save_pretrained(folder)
    assert load_config(folder / "config.json") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"multiple of 2 · num_heads; got 32 and 5. Try model_dim=60"),
        ({"num_heads": 32}, "turns pairs of features"),
        ({"key_value_heads": 3}, "key_value_heads must divide num_heads; got 3 and 4"),
        ({"key_value_heads": 0}, "key_value_heads must be a whole number of at least 1; got 0"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1; got 0"),
        ({"num_layers": 10**9}, "num_layers must be a whole number of at most 10,000; got 1000000000"),
        ({"norm_eps": 0.0}, "norm_eps must be a number, above 1e-30"),
        ({"rope_base": 1.0}, "rope_base must be a number, above 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"vocab_size": 64, "num_layers": 1, "model_dim": 32, "num_heads": 4, "ffn_dim": 48, **changes}
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**fields)


def test_scaled_positions_are_refused(tmp_path: Path) -> None:
    fields = PRESETS["llama-tiny"].for_transformers()
    for scaled in ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters": {"rope_type": "llama3"}}):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **scaled}))
        with pytest.raises(ValueError, match="plain rotary embedding"):
            load_config(tmp_path / "config.json")


def test_files_that_are_no_config_of_a_llama(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, message in (
        ("{", "must hold a model config as JSON"),
        ("[1]", "must hold a model config as a JSON object; got a list"),
        ('{"hidden_size": 8}', "it must be of a llama model, and is of 'no model_type'"),
        ('{"model_type": "gecko"}', "it must be of a llama model, and is of 'gecko'"),
        ('{"model_type": "llama", "hidden_size": 8}', r"a config needs the fields \['vocab_size', 'num_layers'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            LlamaConfig.load(path)


def test_names_are_suggested() -> None:
    assert find_preset("llama-tiny") == LlamaConfig.preset("llama-tiny")
    with pytest.raises(ValueError, match="Did you mean 'llama2-7b'"):
        find_preset("llama-7b")
    with pytest.raises(ValueError, match="Did you mean 'ffn_dim'"):
        LlamaConfig.from_dict({"ffn_dims": 3})
