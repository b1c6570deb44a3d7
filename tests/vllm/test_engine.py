"""Greedy tokens in vLLM's scheduler are those of ``gecko.generate`` for each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import LLAMA
from support.vllm_texts import continued, expected, greedy, metric, prompt
from vllm import SamplingParams
from vllm.config import CompilationMode, CUDAGraphMode

import gecko
from gecko.hf import GeckoConfig, GeckoForSequenceClassification, byte_tokenizer, export
from gecko.io.quantization import quantize


@pytest.mark.parametrize("in_c", [False, True])
def test_every_length_in_c_and_in_pytorch(in_c, start, model, monkeypatch):
    """Most of the second texts get pages of the first. Graphs are off."""
    if not in_c:
        monkeypatch.setattr("gecko.vllm.model.decoder_of", lambda *_: None)
    texts = [prompt(n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 200)]
    alone, engine = [expected(model, text, 40) for text in texts], start(enforce_eager=in_c)
    config = engine.llm_engine.vllm_config.compilation_config
    assert (config.mode, config.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.NONE)
    assert continued(engine, texts, greedy(40)) == alone
    assert continued(engine, texts[::-1], greedy(40)) == alone[::-1]


def test_64_mixed_requests_in_pieces(start, model):
    """Prompts of 1 to 330 tokens in pieces of 64, for 1 to 40 tokens; every fourth request samples meanwhile. Then the
    log-probabilities of a prompt."""
    texts, engine = [prompt(1 + 37 * i % 330, seed=i) for i in range(64)], start()
    lengths = [1 + 13 * i % 40 for i in range(64)]
    parameters = [
        SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True) if i % 4 == 3 else greedy(new)
        for i, new in enumerate(lengths)
    ]
    found = continued(engine, texts, parameters)
    assert [len(tokens) for tokens in found] == lengths
    for i, (text, new) in enumerate(zip(texts, lengths, strict=True)):
        if i % 4 != 3:
            assert found[i] == expected(model, text, new), f"prompt {i}"
    text, scored = prompt(50), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (found,) = engine.generate([{"prompt_token_ids": text.tolist()}], scored, use_tqdm=False)
    with torch.no_grad():
        logprobs = model(text.unsqueeze(0))[0][0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, text[1:, None]).flatten()
    given = [one[int(token)].logprob for one, token in zip(found.prompt_logprobs[1:], text[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(given), wanted, atol=1e-4, rtol=0)


def test_new_weights_take_effect_in_a_running_engine_and_damaged_ones_are_refused(start, model, folder, tmp_path):
    """From a folder, from a trainer in one call or name by name, and written into the parameters."""
    torch.manual_seed(1)
    other, engine, texts = gecko.Gecko(model.config), start(), [prompt(n) for n in (1, 33)]
    export(other, tmp_path, byte_tokenizer())
    weights = {name: dict(one.state_dict()) for name, one in (("model", model), ("other", other))}

    def is_now(one: gecko.Gecko) -> bool:
        return continued(engine, texts, greedy(6)) == [expected(one, text, 6) for text in texts]

    def inside(worker: Any, change: str, name: str) -> None:
        network = worker.get_model()
        if change == "whole":
            network.load_weights(weights[name].items())
        for part in weights[name].items() if change == "parts" else ():
            network.load_weights([part])
        for key, parameter in network.gecko.named_parameters() if change == "in place" else ():
            parameter.data.copy_(weights[name][key])

    for change, name, one in (
        ("whole", "other", other),
        ("parts", "model", model),
        ("in place", "other", other),
        ("in place", "model", model),
    ):
        engine.collective_rpc(inside, args=(change, name))
        assert is_now(one), change
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    assert is_now(other)
    damaged = bytearray((tmp_path / "model.safetensors").read_bytes())
    damaged[-5] ^= 64
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged"):
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    assert is_now(model)


def test_a_seed_decides_the_text_of_a_prompt_however_it_is_cut(start):
    texts, engine = [prompt(n) for n in (300, 150, 5, 200)], start()
    drawn = [SamplingParams(temperature=0.9, seed=seed, max_tokens=8) for seed in range(4)]
    together = continued(engine, texts, drawn)
    engine = start(max_num_batched_tokens=512)
    assert together == [continued(engine, [text], one)[0] for text, one in zip(texts, drawn, strict=True)]


def test_prefix_hits_and_preemption(start, model):
    engine = start(enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=10)
    shared = prompt(150)
    texts = [shared.new_tensor([*shared, *prompt(1 + 9 * i, seed=i)]) for i in range(6)]
    alone = [expected(model, text, 24) for text in texts]
    assert continued(engine, texts[:1], greedy(24)) == alone[:1]
    assert continued(engine, texts, greedy(24)) == alone
    assert metric(engine, "prefix_cache_hits") >= 5 * 128
    others = [prompt(10 + i, seed=i) for i in range(8)]  # one page each at first, two when they grow
    assert continued(engine, others, greedy(150)) == [expected(model, text, 150) for text in others]
    assert metric(engine, "num_preemptions") > 0


ARCHITECTURES = {
    "8 bits": {"memory": "none", "attention": "sliding_window", "timestep_betas": None, "tie_embedding": True},
    "llama": {**LLAMA, "num_heads": 4, "key_value_heads": 2, "sinks": 1, "bfloat16_window": True},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(name, start, tmp_path):
    """Weights in 8 bits, a tied head, and no working memory; shared heads, a sink, and a window in bfloat16, without
    norms with statistics and a moving average."""
    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", chunk_size=16, **ARCHITECTURES[name]))
    if name == "8 bits":
        quantize(model, 8)
    model.save(tmp_path)
    texts = [prompt(n) for n in (1, 33, 60)]  # a call of the model, as one piece, has a window in float32
    found = continued(start(model=str(tmp_path), skip_tokenizer_init=True), texts, greedy(40))
    assert found == [expected(model, text, 40) for text in texts]


IGNORED = {
    "cache_dtype must be auto": {"kv_cache_dtype": "fp8"},
    "mamba_cache_dtype must be auto": {"mamba_cache_dtype": "float16"},
    "enable_prompt_embeds must be off": {"enable_prompt_embeds": True},
    "runner must be generate": {"runner": "pooling", "convert": "classify"},
    "enable_lora must be off": {"enable_lora": True},
    "kv_transfer_config must be unset": {
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    },
    "must be at least block_size=128": {"enable_prefix_caching": True, "block_size": 128},
    "cannot go back": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
}


@pytest.mark.parametrize("message", IGNORED)
def test_an_option_that_would_be_ignored_is_refused(message, start):
    with pytest.raises(ValueError, match=message):
        start(**IGNORED[message])


def test_a_saved_classifier_and_ranks_that_cannot_divide_the_heads_are_refused(start, tmp_path):
    GeckoForSequenceClassification(GeckoConfig(num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="runner must be generate"):
        start(model=str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"attention heads|num_heads"):
        start(tensor_parallel_size=3)
