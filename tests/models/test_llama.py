"""A Llama: its numbers and its config."""

from __future__ import annotations

import copy
import json
import random
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, random_llama
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig as TransformersConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import gecko
from gecko.config import GeckoConfig
from gecko.data import IGNORED
from gecko.inference.generate import score_llama
from gecko.models import PRESETS, Llama, LlamaConfig, build_model, find_preset, llama, load_any, load_config, meta_model
from gecko.models.gecko import Gecko
from gecko.models.llama import NAMES
from gecko.train.model import compile_block

# ---- Our Llama equals that of transformers, and documents in a packed row are independent.

LENGTH = 23
documents = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed(lengths: list[int]) -> Tensor:
    """Return segment ids (1, T) of documents of these lengths; the ids are not sorted."""
    ids = random.Random(len(lengths)).sample(range(100), len(lengths))
    return torch.tensor([[segment for segment, length in zip(ids, lengths, strict=True) for _ in range(length)]])


def gradients(model: Llama) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name: grad for name, grad in found.items() if grad is not None}


def test_loss_and_gradients_are_those_of_transformers(model: Llama, tmp_path: Path) -> None:
    """They load the folder that we write."""
    model.save(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    tokens = random_tokens(3, LENGTH + 1)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    found = gradients(model)
    expected = theirs(tokens[:, :-1]).logits
    reference = F.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten())
    reference.backward()
    torch.testing.assert_close(model(tokens[:, :-1]), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, reference, rtol=1e-9, atol=1e-9)
    whole = dict(theirs.named_parameters())
    assert found.keys() == whole.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, whole[name].grad, rtol=1e-8, atol=1e-10, msg=name)


@settings(max_examples=12)
@given(rows=st.lists(documents, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_a_packed_document_is_as_if_alone(model: Llama, rows: list[list[int]], seed: int) -> None:
    """Compare outputs, losses and gradients. Shorter rows are filled up with one more document."""
    length = max(map(sum, rows))
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in rows]
    tokens, targets = random_tokens(len(rows), length, seed), random_tokens(len(rows), length, seed + 1)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = IGNORED
    ids = torch.cat([packed(row) for row in rows])
    loss = model.loss(tokens, targets, ids)
    loss.backward()
    together, losses = gradients(model), model.token_losses(tokens, targets, ids)[0]
    hidden, counted = model.hidden(tokens, ids), max(1, int((losses > 0).sum()))
    torch.testing.assert_close(losses.sum() / counted, loss.detach())
    for row, lengths in enumerate(rows):
        begin = 0
        for part in lengths:
            here = slice(begin, begin + part)
            alone = tokens[row : row + 1, here]
            # The last target of a document is the first token of the next, so it counts only at the end of the row.
            wanted = targets[row : row + 1, here].clone()
            if begin + part < length:
                wanted[:, -1] = IGNORED
            torch.testing.assert_close(hidden[row : row + 1, here], model.hidden(alone), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(losses[row : row + 1, here], model.token_losses(alone, wanted)[0])
            (model.loss(alone, wanted) * (int((wanted != IGNORED).sum()) / counted)).backward()
            begin += part
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, together[name], rtol=1e-7, atol=1e-9, msg=name)


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True), pairs=st.sampled_from([1, 40, 10**6]))
def test_read_in_any_pieces_it_is_the_whole(model: Llama, cuts: list[int], pairs: int) -> None:
    """For any number of pairs that are masked at once; reading on does not change an earlier state."""
    tokens, cache, parts = random_tokens(2, LENGTH), None, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "MASK_ELEMENTS", pairs)
        for part in torch.tensor_split(tokens, sorted(cuts), dim=1):
            model.read(random_tokens(2, 3, 5), cache)
            hidden, cache = model.read(part, cache)
            parts.append(hidden)
    assert cache is not None and cache.length == LENGTH
    torch.testing.assert_close(torch.cat(parts, dim=1), model.hidden(tokens).detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ids", [None, packed([4, 9, 10])], ids=["one", "packed"])
def test_recomputed_gradients_are_the_same(model: Llama, ids: Tensor | None) -> None:
    tokens = random_tokens(1, LENGTH + 1)
    found = []
    for model.activation_checkpointing in ("selective", "full", "none"):
        model.loss(tokens[:, :-1], tokens[:, 1:], ids).backward()
        found.append(gradients(model))
    for name, grad in found[-1].items():
        for other in found[:-1]:
            torch.testing.assert_close(other[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_bfloat16_is_near_float32_and_keeps_norms_in_it(model: Llama) -> None:
    single = build_model(model.config)
    single.load_state_dict(model.state_dict())
    tokens, seen = random_tokens(2, LENGTH + 1), []
    handles = [
        module.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        for module in single.modules()
        if isinstance(module, model.float32_layers)
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = single.loss(tokens[:, :-1], tokens[:, 1:], packed([10, 13]).expand(2, -1))
    loss.backward()
    assert seen == [torch.float32] * len(handles) and len(handles) == 2 * model.config.num_layers + 1
    expected = model.loss(tokens[:, :-1], tokens[:, 1:], packed([10, 13]).expand(2, -1))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.02)
    assert all(bool(parameter.grad.isfinite().all()) for parameter in single.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_added_to_the_head_is_in_its_losses(model: Llama, hooked: bool) -> None:
    model, tokens = copy.deepcopy(model), random_tokens(1, LENGTH + 1)
    added = torch.linspace(-1, 1, model.config.vocab_size, dtype=torch.float64)
    if hooked:
        model.lm_head.register_forward_hook(lambda module, inputs, output: output + added)
    else:
        model.lm_head.bias = torch.nn.Parameter(added)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs)[0].detach()
    each = F.cross_entropy(logits, targets[0], reduction="none")
    for model.z_loss in (0.1, 0.0):
        expected = each.mean() + model.z_loss * logits.logsumexp(-1).square().mean()
        torch.testing.assert_close(model.loss(inputs, targets).detach(), expected)
    torch.testing.assert_close(model.token_losses(inputs, targets)[0][0], each)
    torch.testing.assert_close(torch.cat([*score_llama(model, [tokens[0]])]), each)


def test_saved_and_loaded_it_is_the_same(model: Llama, tmp_path: Path) -> None:
    model.save(tmp_path)
    again, tokens = load_any(tmp_path), random_tokens(1, 5)
    assert isinstance(again, Llama) and again.config == model.config
    assert torch.equal(again(tokens), model(tokens))
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_any(tmp_path)


def test_a_folder_is_opened_as_what_it_is(tmp_path: Path) -> None:
    Gecko(GeckoConfig(64, 1, 32, 16, 32, 2, 32, timestep_groups=4)).save(tmp_path / "gecko")
    assert isinstance(load_any(tmp_path / "gecko"), Gecko)
    build_model(LlamaConfig(64, 1, 32, 2, 32)).save(tmp_path / "llama")
    with pytest.raises(ValueError, match="must be of a gecko model, and is of 'llama'"):
        gecko.load(tmp_path / "llama")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="one of the kinds gecko, llama; it is of 'bert'"):
        load_config(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="must be a model's folder"):
        load_any(tmp_path / "nothing")


@pytest.mark.parametrize(("name", "count"), [("llama2-7b", 6_738_415_616), ("llama-tiny", 995_712)])
def test_presets_have_their_parameters(name: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in meta_model(PRESETS[name]).parameters()) == count


def test_what_it_does_not_take(model: Llama) -> None:
    tokens = random_tokens(2, 4)
    with pytest.raises(ValueError, match=r"ids in 0\.\.263; got 264"):
        model(torch.full((1, 3), 264))
    with pytest.raises(ValueError, match=r"targets must have the tokens' shape \(2, 4\); got \(2, 3\)"):
        model.loss(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="ranks cannot share rows"):
        model.loss(tokens, tokens, None, object())
    with pytest.raises(TypeError, match="must be integers"):
        model(tokens.float())


def test_compiled_blocks_are_compiled_once_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager cuts and differentiates graphs as usual, but generates no code, which would take long."""
    model, whole = random_llama(CONFIGS["grouped"]), torch.nn.Module.compile
    compiled = build_model(model.config).double()
    compiled.load_state_dict(model.state_dict())
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(whole, backend="aot_eager"))
    torch.compiler.reset()
    for block in compiled.blocks:
        compile_block(block)
    counts = torch._dynamo.utils.counters["stats"]
    graphs = []
    for lengths in ([LENGTH], [4, 9, 10], [10, 13], [1] * LENGTH):
        tokens, ids = random_tokens(1, LENGTH, len(lengths)), packed(lengths)
        for one in (compiled, model):
            one.loss(tokens, tokens, ids).backward()
        expected = gradients(model)
        for name, grad in gradients(compiled).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-8, atol=1e-10, msg=name)
        graphs.append(counts["unique_graphs"])
    compiled.read(tokens)
    torch.compiler.reset()
    assert graphs[0] > 0 and graphs[1:] == [graphs[1]] * 3 and counts["unique_graphs"] == graphs[-1]


# ---- A Llama's config round-trips through a file with the names of transformers, and refuses invalid values.

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


SCALED = PRESETS["llama-tiny"].for_transformers() | {"rope_scaling": {"type": "linear", "factor": 2.0}}
LLAMA_3 = PRESETS["llama-tiny"].for_transformers() | {"rope_parameters": {"rope_type": "llama3"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must hold a model config as JSON"),
        ("[1]", "must hold a model config as a JSON object; got a list"),
        ('{"hidden_size": 8}', "it must be of a llama model, and is of 'no model_type'"),
        ('{"model_type": "gecko"}', "it must be of a llama model, and is of 'gecko'"),
        ('{"model_type": "llama", "hidden_size": 8}', r"a config needs the fields \['vocab_size', 'num_layers'"),
        (json.dumps(SCALED), "plain rotary embedding"),
        (json.dumps(LLAMA_3), "plain rotary embedding"),
    ],
    ids=range(7),
)
def test_files_that_are_no_config_of_a_llama(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        LlamaConfig.load(tmp_path / "config.json")


def test_names_are_suggested() -> None:
    assert find_preset("llama-tiny") == LlamaConfig.preset("llama-tiny")
    with pytest.raises(ValueError, match="Did you mean 'llama2-7b'"):
        find_preset("llama-7b")
    with pytest.raises(ValueError, match="Did you mean 'ffn_dim'"):
        LlamaConfig.from_dict({"ffn_dims": 3})
