"""A model on the GPU equals the model on the CPU in logits, loss, gradients and states; bfloat16 is close to it."""

from __future__ import annotations

import copy

import pytest
import torch
from support import cases
from support.cases import CHUNK, VARIANTS, tokens

import gecko
from gecko.inference import read
from gecko.inference.decoder import Decoder
from gecko.train.step import autocast

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

IDS = torch.tensor([[0] * 5 + [1] * 40, [0] * 30 + [1] * 15])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    expected = expected.detach().double()
    return float((actual.detach().cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, device):
    """Return one model twice: on the CPU in float64, and on the GPU in float32."""
    model = cases.model(request.param)
    return model, copy.deepcopy(model).float().to(device)


def test_logits_and_gradients(pair, device):
    text = tokens(2, 46)
    for model in pair:
        where = model.embedding.weight.device
        model.zero_grad()
        model.loss(text[:, :-1].to(where), text[:, 1:].to(where), IDS.to(where)).backward()
    exact, fast = pair
    assert difference(fast(text.to(device))[0], exact(text)[0]) < 1e-4
    for (name, wanted), got in zip(exact.named_parameters(), fast.parameters(), strict=True):
        assert difference(got.grad, wanted.grad) < 1e-3, name


def test_reading_in_parts_and_token_by_token(pair, device):
    exact, fast = pair
    text = tokens(2, 3 * CHUNK + 5).to(device)
    with torch.no_grad():
        whole, _ = exact(text.cpu())
        first, state = fast(text[:, :13])
        second, state = fast(text[:, 13:-3], state=state)
        steps = []
        for token in text[:, -3:].unbind(1):
            logits, state = fast.step(token, state)
            steps.append(logits)
    read = torch.cat([first, second, torch.stack(steps, dim=1)], dim=1)
    assert difference(read, whole) < 1e-4


def test_bfloat16_is_near(pair, device):
    exact, fast = pair
    text = tokens(2, 46)
    with autocast("bfloat16", device), torch.no_grad():
        loss = fast.loss(text[:, :-1].to(device), text[:, 1:].to(device), IDS.to(device))
    with torch.no_grad():
        wanted = exact.loss(text[:, :-1], text[:, 1:], IDS)
    assert difference(loss, wanted) < 0.03


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 0, "top_k": 37}], ids=["greedy", "host"])
def test_generation_is_the_same(device, options):
    """Longer than a chunk; the host draws with top-k."""
    model = cases.model("gecko", torch.float32)
    prompts = [tokens(1, length)[0].tolist() for length in (20, 3)]
    here = gecko.generate(model, prompts, max_new_tokens=2 * CHUNK + 3, **options)
    assert gecko.generate(model.to(device), prompts, max_new_tokens=2 * CHUNK + 3, **options).tokens == here.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", cases.IN_TRITON)
def test_decoding_by_graphs(variant, dtype, device):
    """Steps replay one graph; rows are at different positions, and join and leave."""
    model = cases.model(variant, torch.float32).to(dtype)
    exact, model = copy.deepcopy(model).double(), model.to(device)
    texts = [tokens(1, length + 2 * CHUNK + 3, length)[0] for length in (1, CHUNK + 3, 3 * CHUNK - 1)]
    decoder = Decoder(model, 4)
    with torch.inference_mode():
        for text in texts:
            prefill = read(model, [text[: -2 * CHUNK - 3]])
            decoder.add(prefill.state, prefill.seen)
        columns = torch.stack([text[-2 * CHUNK - 3 :] for text in texts]).unbind(1)
        logits = torch.stack([decoder.step(column.tolist()).clone() for column in columns], dim=1)
        expected = torch.stack([exact(text[None])[0][0, -2 * CHUNK - 3 :] for text in texts])
    assert decoder.backend == "triton"
    assert difference(logits, expected) < (1e-4 if dtype == torch.float32 else 0.05)


def test_a_seed_draws_the_same_tokens_beside_others(device):
    model = cases.model("gecko", torch.float32).to(device)
    prompts = [tokens(1, length)[0].tolist() for length in (20, 3, 9)]
    together = gecko.generate(model, prompts, max_new_tokens=10, seed=[4, 5, 6]).tokens
    assert together == [
        gecko.generate(model, [p], max_new_tokens=10, seed=s).tokens[0] for p, s in zip(prompts, (4, 5, 6), strict=True)
    ]
