"""Greedy tokens in vLLM's scheduler are those of ``gecko.generate`` for each prompt alone."""

from __future__ import annotations

import pytest
import torch
from support.vllm_texts import continued, expected, greedy, metric, prompt
from vllm import SamplingParams

import gecko
from gecko.io.quantization import quantize


def test_64_mixed_requests_in_pieces(start, model):
    """Prompts of 1 to 330 tokens in pieces of 64, for 1 to 40 tokens; every fourth request samples meanwhile."""
    texts = [prompt(1 + 37 * i % 330, seed=i) for i in range(64)]
    lengths = [1 + 13 * i % 40 for i in range(64)]
    parameters = [
        SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True) if i % 4 == 3 else greedy(new)
        for i, new in enumerate(lengths)
    ]
    found = continued(start(max_num_seqs=16), texts, parameters)
    assert [len(tokens) for tokens in found] == lengths
    for i, (text, new) in enumerate(zip(texts, lengths, strict=True)):
        if i % 4 != 3:
            assert found[i] == expected(model, text, new), f"prompt {i}"


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


@pytest.mark.parametrize("in_c", [True, False])
def test_restart(in_c, start, model, monkeypatch):
    """Two engines, one after the other, decode in C or in PyTorch; pages of the second one are not empty."""
    if not in_c:
        monkeypatch.setattr("gecko.vllm.model.decoder_of", lambda *_: None)
    texts = [prompt(n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 200)]
    alone = [expected(model, text, 40) for text in texts]
    for _ in range(2):
        engine = start(enforce_eager=in_c)
        assert continued(engine, texts, greedy(40)) == alone
        assert continued(engine, texts[::-1], greedy(40)) == alone[::-1]


def test_quantised_weights_of_another_architecture(start, tmp_path):
    """Weights in 8 bits, a tied head, and no working memory."""
    torch.manual_seed(0)
    changes = {"chunk_size": 16, "memory": "none", "attention": "sliding_window", "timestep_betas": None}
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", tie_embedding=True, **changes))
    quantize(model, 8)
    model.save(tmp_path)
    texts = [prompt(n) for n in (1, 33, 200)]
    found = continued(start(model=str(tmp_path), skip_tokenizer_init=True), texts, greedy(40))
    assert found == [expected(model, text, 40) for text in texts]


def test_log_probabilities(start, model):
    text = prompt(50)
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (found,) = start().generate([{"prompt_token_ids": text.tolist()}], parameters, use_tqdm=False)
    with torch.no_grad():
        logprobs = model(text.unsqueeze(0))[0][0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, text[1:, None]).flatten()
    given = [one[int(token)].logprob for one, token in zip(found.prompt_logprobs[1:], text[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(given), wanted, atol=1e-4, rtol=0)


def test_speculative_decoding_is_refused(start):
    with pytest.raises(ValueError, match="cannot go back"):
        start(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2})


def test_ranks_that_cannot_divide_the_heads_are_refused(start):
    with pytest.raises(ValueError, match=r"attention heads|num_heads"):
        start(tensor_parallel_size=3)
