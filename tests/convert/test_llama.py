"""A converted Llama, Mistral, Qwen2 or Qwen3 computes what transformers computes, up to two chunks."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import CASES, CHUNK, LLAMA3, SIZES, in_float64, random_model, write_tiny
from torch import Tensor

import gecko
from gecko.config import GeckoConfig
from gecko.convert import convert_model
from gecko.convert.llama import SourceConfig


def frequencies(config: GeckoConfig) -> Tensor:
    given = config.rope_frequencies
    exponents = -torch.arange(0, config.key_head_dim, 2, dtype=torch.float64) / config.key_head_dim
    return config.rope_base**exponents if given is None else torch.tensor(given, dtype=torch.float64)


def check(theirs: Any, folder: Path, chunk: int, fields: dict[str, Any] | None = None) -> gecko.Gecko:
    """Convert a model of transformers, and compare the logits of two chunks in float64. ``fields`` replace its config,
    which transformers writes without what it ignores."""
    theirs.save_pretrained(folder / "source", max_shard_size="10KB")
    if fields is not None:
        (folder / "source" / "config.json").write_text(json.dumps(fields))
    said = convert_model(str(folder / "source"), folder / "out", chunk_size=chunk)
    ours = gecko.load(folder / "out")
    count = sum(parameter.numel() for parameter in theirs.parameters())
    assert said.startswith("source in a Gecko block, ") and said.endswith("in float64")
    assert ours.config.sinks == 1 and ours.config.bfloat16_window
    assert sum(p.numel() for p in ours.parameters()) >= count
    # transformers computes angles in float32, and our frequencies in float64 must be these.
    assert torch.allclose(theirs.model.rotary_emb.inv_freq.double(), frequencies(ours.config), rtol=1e-6, atol=0)
    tokens = torch.randint(ours.config.vocab_size, (2, 2 * chunk), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = in_float64(theirs, frequencies(ours.config))(tokens).logits
        found = ours(tokens)[0]
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) < 1e-8 * float(expected.abs().max())
    return ours


@pytest.mark.parametrize("name", CASES)
def test_logits_of_two_chunks(name: str, tmp_path: Path) -> None:
    check(random_model(*CASES[name]), tmp_path, CHUNK)


@pytest.mark.parametrize("seed", range(12))
def test_logits_of_any_sizes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    heads, group, half = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 5)
    sizes = {
        "num_attention_heads": heads * group, "num_key_value_heads": heads, "head_dim": 2 * half,
        "hidden_size": heads * group * draw.randint(3, 9), "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": draw.choice([LLAMA3, {"rope_theta": 10.0 ** draw.randint(1, 8)}]),
    }  # fmt: skip
    kind = draw.choice(["Llama", "Mistral", "Qwen2", "Qwen3"])
    check(random_model(kind, sizes, seed), tmp_path, chunk=draw.randint(1, 9))


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_near_as_their_own_forms(name: str, tmp_path: Path) -> None:
    """The largest difference from transformers is at most twice that between its two forms of attention."""
    own, between = 0.0, 0.0
    for seed in range(3):
        theirs = random_model(*CASES[name], seed).float()
        theirs.save_pretrained(tmp_path / f"source-{seed}")
        convert_model(str(tmp_path / f"source-{seed}"), tmp_path / f"out-{seed}", chunk_size=CHUNK)
        tokens = torch.randint(37, (2, 2 * CHUNK), generator=torch.Generator().manual_seed(1))
        forms = []
        with torch.no_grad():
            for form in ("eager", "sdpa"):
                theirs.set_attn_implementation(form)
                forms.append(theirs(tokens).logits)
            found, (eager, fused) = gecko.load(tmp_path / f"out-{seed}")(tokens)[0], forms
        own, between = max(own, float((eager - fused).abs().max())), max(between, float((found - eager).abs().max()))
    assert 0 < between <= 2 * own


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_lose_nothing(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    """bfloat16 stays, unless an offset of a norm of queries would be rounded."""
    theirs = random_model(*CASES[name]).to(dtype)
    theirs.save_pretrained(tmp_path / "source")
    convert_model(str(tmp_path / "source"), tmp_path / "out")
    ours, state = gecko.load(tmp_path / "out").state_dict(), theirs.state_dict()
    narrow = dtype == torch.bfloat16 and name == "llama"
    assert {x.dtype for x in ours.values()} == {torch.bfloat16 if narrow else torch.float32}
    for found, given in (("blocks.1.feed_forward.fc3.weight", "model.layers.1.mlp.up_proj.weight"),
                         ("blocks.1.feed_forward.norm.weight", "model.layers.1.post_attention_layernorm.weight"),
                         ("final_norm.weight", "model.norm.weight")):  # fmt: skip
        assert torch.equal(ours[found].float(), state[given].float())
    if name == "qwen3":
        own = ours["blocks.0.mixer.query_norm.weight"].double().view(-1, 3, 2) + 1
        given = state["model.layers.0.self_attn.q_norm.weight"].double().view(2, 3).T
        assert float((own / given - 1).abs().max()) < 1e-5


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    """Names cannot change the card."""
    source = write_tiny(tmp_path / "Small-Llama")
    for name in ("LICENSE.txt", "Notice", "tokenizer.model", "chat_template.jinja", "notes.txt"):
        (source / name).write_text(name)
    (source / "README.md").write_text("---\nlicense: llama3.2\n---\n# A model\n")
    said = convert_model(str(source), tmp_path / "out", chunk_size=16, sinks=3)
    assert said.startswith("Small-Llama in a Gecko block, 1 layers, ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja", "LICENSE.txt", "Notice",
        "README.md",
    }  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("license: llama3.2\n", "# Small-Llama in a Gecko block", "Up to 32 tokens", "Nothing was trained",
                 "the first 3 tokens", "LICENSE.txt, Notice"):  # fmt: skip
        assert text in card
    config = gecko.load(tmp_path / "out").config
    assert (config.chunk_size, config.sinks) == (16, 3)
    source = write_tiny(tmp_path / "x\n# y](z)`<b>")
    (source / "README.md").write_text("license: <script>\n")
    convert_model(str(source), tmp_path / "other")
    card = (tmp_path / "other" / "README.md").read_text()
    assert "# x # y (z) b in a Gecko block" in card and "<" not in card and "see its source" in card


ODD: list[dict[str, Any]] = [
    {"use_sliding_window": False, "sliding_window": 3}, {"use_sliding_window": True, "sliding_window": 3},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, {"use_sliding_window": True},
    {"sliding_window": 3}, {"sliding_window": None}, {"sliding_window": 2 * CHUNK, "use_sliding_window": True},
    {"sliding_window": 3, "layer_types": ["full_attention", "full_attention"]}, {"max_window_layers": 0},
    {"attention_bias": True}, {"attention_bias": False}, {"mlp_bias": True}, {"mlp_bias": False}, {"is_causal": False},
    {"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"tie_word_embeddings": True}, {"head_dim": 4},
    {"pretraining_tp": 2}, {"attention_dropout": 0.5},
    {"rope_theta": 100.0}, {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 50.0}},
    {"rope_scaling": {"rope_theta": 50.0}, "rope_parameters": {"rope_theta": 7.0}}, {"rope_scaling": {}},
    {"rope_parameters": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"type": "default"}, "rope_theta": 9.0},
    {"rope_type": "linear", "factor": 2.0}, {"rope_divisors": [2.0, 3.0, 4.0]}, {"factor": -1.0},
    *({"rope_parameters": LLAMA3, **more} for more in (
        {}, {"factor": 2.0}, {"low_freq_factor": 2.0}, {"original_max_position_embeddings": 16}, {"rope_theta": 7.0},
    )),
    *({"rope_parameters": more} for more in (
        {"rms_norm_eps": 5.0}, {"sliding_window": 3, "use_sliding_window": True}, {"num_key_value_heads": 1},
        {"head_dim": 2}, {"hidden_act": "gelu"}, {"attention_bias": True}, {"rope_divisors": [2.0, 3.0, 4.0]},
        {"tie_word_embeddings": True}, {"model_type": "qwen2"}, {"is_causal": False}, {"num_experts": 8}, {"x": 1},
    )),
]  # fmt: skip
"""Fields that only some models have, that have unusual values, or that are where another field should be."""


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(2 * CHUNK)[None]).logits
    return found


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("odd", ODD)
def test_a_field_means_what_it_means_to_transformers(odd: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """The logits are those of transformers, or the conversion is refused and the field changes these logits."""
    base = {"max_window_layers": 1}  # the second layer of a Qwen may have a window
    theirs, fields = random_model(kind, base | copy.deepcopy(odd)), {"model_type": kind.lower(), **SIZES, **base, **odd}
    changed = not torch.allclose(logits(theirs), logits(random_model(kind, base)))
    try:
        check(theirs, tmp_path, CHUNK, fields)
    except ValueError:
        assert changed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, "model_type must be llama or mistral or qwen2 or qwen3"),
    ({"model_type": "gecko"}, "model_type must be llama or"),
    ({"model_type": ["llama"]}, "model_type must be llama or"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu, because the feed-forward of a block has it; got 'gelu'."),
    ({"attention_bias": True}, "attention_bias must be false, because the output projection has no bias"),
    ({"mlp_bias": True}, "mlp_bias must be false"),
    ({"num_local_experts": 8}, "num_local_experts must be 0, because a block has one feed-forward; got '8'"),
    ({"num_experts": 8}, "num_experts must be 0"),
    ({"is_causal": False}, "is_causal must be true"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent"),
    ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map must be absent"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type must be default or llama3, because"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be default or llama3, because"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "got 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "got 'longrope'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3 needs factor, low_freq_factor"),
    ({"rope_parameters": {"rope_type": "llama3"}, **LLAMA3}, "rope_type llama3 needs factor, low_freq_factor"),
    ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "the second below the third"),
    ({"rope_parameters": {**LLAMA3, "factor": -1.0}}, "factor must be above 0"),
    ({"rope_parameters": "yarn"}, "config.json must hold"),
    ({"rope_theta": float("inf")}, "rope_theta must be a number"),
    ({"model_type": "mistral", "sliding_window": 31}, "sliding_window must be absent, or at least the two chunks"),
    ({"model_type": "mistral", "sliding_window": 31}, "got 31 and chunks of 16. Try --chunk 15"),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "sliding_window must be absent"),
    ({"hidden_size": None}, "a config needs the fields ['hidden_size']"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number of at most 10,000"),
    ({"num_attention_heads": "4"}, "num_attention_heads must be a whole number"),
    ({"num_key_value_heads": 3}, "key_value_heads"),
    ({"head_dim": 3}, "must be even"),
    ({"vocab_size": 38}, "embedding.weight must be float64 of shape (38, 20), and is float64 of shape (37, 20)"),
    ({"num_hidden_layers": 2}, "blocks.1.mixer"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings says that embedding and output are one"),
    ({"model_type": "qwen2"}, "blocks.0.mixer.to_query.bias must be"),
    ({"model_type": "qwen3"}, "blocks.0.mixer.query_norm.weight must be"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda _: "")
def test_fields_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_model(str(source), tmp_path / "out", chunk_size=16)
    assert not (tmp_path / "out").exists()


LAYER = "model.layers.0."
WEIGHTS: list[tuple[dict[str, Tensor | None], str]] = [
    ({f"{LAYER}self_attn.o_proj.bias": torch.zeros(20)}, "must be one of"),
    ({f"{LAYER}self_attn.q_proj.bias": torch.zeros(16)}, f"got '{LAYER}self_attn.q_proj.bias'. Did you mean"),
    ({f"{LAYER}block_sparse_moe.gate.weight": torch.zeros(8, 20)}, "parameter of llama must be one of"),
    ({"lm_head.weight": None}, "head.weight must be float64 of shape (37, 20), and is absent"),
    ({"model.embed_tokens.weight": None}, "embedding.weight must be"),
    ({f"{LAYER}self_attn.k_proj.weight": torch.zeros(7, 20)}, "to_key.weight must be"),
    ({f"{LAYER}self_attn.q_proj.weight": torch.zeros(()).double()}, "to_query.weight must be"),
    ({f"{LAYER}input_layernorm.weight": torch.full((20,), float("nan"))}, "must hold finite numbers"),
    ({f"{LAYER}mlp.up_proj.weight": torch.zeros(27, 20, dtype=torch.int8)}, "and is int8"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WEIGHTS, ids=lambda _: "")
def test_weights_are_refused_by_name(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", weights=changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert_model(str(source), tmp_path / "out")


def test_values_that_mean_nothing_are_accepted(tmp_path: Path) -> None:
    """Also frequencies of old checkpoints."""
    config = {
        "rope_scaling": None, "rope_theta": 5e5, "attention_dropout": 0.1, "pretraining_tp": 2, "auto_map": None,
        "use_sliding_window": False, "sliding_window": 4, "attention_bias": False, "my_note": "x", "num_experts": 0,
    }  # fmt: skip
    weights = {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(2)}
    convert_model(str(write_tiny(tmp_path / "source", config, weights)), tmp_path / "out")
    assert gecko.load(tmp_path / "out").config.rope_base == 5e5


NULLS = {
    "llama": ("num_key_value_heads", "sliding_window", "head_dim"), "mistral": ("sliding_window", "head_dim"),
    "qwen2": ("num_key_value_heads", "sliding_window"), "qwen3": ("num_key_value_heads", "sliding_window"),
}  # fmt: skip
"""Fields that may be null in transformers."""


@pytest.mark.parametrize(
    ("model_type", "given"),
    [(kind, given) for kind, names in NULLS.items() for given in ({}, *({name: None} for name in names))],
)
def test_missing_fields_are_those_of_transformers(model_type: str, given: dict[str, Any]) -> None:
    """Null ones mean what they mean there."""
    import transformers

    fields = {
        "model_type": model_type, "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, **given,
    }  # fmt: skip
    ours, theirs = SourceConfig.of(fields), transformers.CONFIG_MAPPING[model_type](**fields)
    assert ours.key_value_heads == theirs.num_key_value_heads
    assert (ours.head_dim or 16) == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.sliding_window if ours.use_sliding_window else None) == getattr(theirs, "sliding_window", None)
    assert ours.rms_norm_eps == theirs.rms_norm_eps and ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.hidden_act == theirs.hidden_act
    assert not getattr(theirs, "attention_bias", False) and not getattr(theirs, "mlp_bias", False)


INDEX = "model.safetensors.index.json"
FOLDERS: list[tuple[Any, type[Exception], str]] = [
    (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "must hold weights as safetensors"),
    (lambda f: (f / "model.safetensors").write_bytes(b"x"), ValueError, "must be a complete safetensors file"),
    (lambda f: (f / INDEX).write_text("[]"), ValueError, "must hold file names under weight_map"),
    (lambda f: (f / INDEX).write_text('{"weight_map": 3}'), ValueError, "must hold file names under weight_map"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../x"}}'), ValueError, "inside the folder; got '../x'"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'), ValueError, "inside the folder; got 3"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'), FileNotFoundError, "b.safetensors"),
    (
        lambda f: [
            shutil.copyfile(f / "model.safetensors", f / "b.safetensors"),
            (f / INDEX).write_text('{"weight_map": {"a": "b.safetensors", "b": "model.safetensors"}}'),
        ],
        ValueError, "must hold every weight once",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "message"), FOLDERS, ids=lambda _: "")
def test_damaged_folders_give_one_error(damage: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    damage(source)
    with pytest.raises(kind, match=message):
        convert_model(str(source), tmp_path / "out")
