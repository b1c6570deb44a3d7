"""Kernels with the tiles of real models: loss and gradients of one block equal those of the eager forms in float64, and
rows with equal states decode alike."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import gecko
from gecko.inference import read
from gecko.inference.decoder import Decoder
from gecko.train.step import autocast

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

PRESETS = ["tiny", "megalodon-tiny", "gecko-4m", "gecko-15m", "gecko-125m", "gecko-1b", "gecko-7b"]
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.04}
"""Largest relative error (in norm) of a parameter's gradient; 1e-7 and 0.01 on a CPU. The loss gets a tenth of it."""


def one_block(preset: str, device: torch.device) -> tuple[gecko.Gecko, torch.Tensor]:
    """Return a model with one block of the preset's widths, and a text of two documents longer than two chunks."""
    torch.manual_seed(0)
    config = dataclasses.replace(gecko.GeckoConfig.preset(preset), num_layers=1, vocab_size=264)
    return gecko.Gecko(config).to(device), torch.randint(0, 256, (1, 2 * config.chunk_size + 14), device=device)


def gradients(model: gecko.Gecko, text: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    documents = (torch.arange(text.shape[1] - 1, device=text.device) >= text.shape[1] // 3).long()[None]
    with autocast(precision, text.device):
        loss = model.loss(text[:, :-1], text[:, 1:], documents)
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_real_sizes(preset, precision, device):
    model, text = one_block(preset, device)
    exact = gradients(copy.deepcopy(model).double(), text, "float32")
    found = gradients(model, text, precision)
    worst = {name: float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in exact.items()}
    assert worst.pop("loss") < TOLERANCE[precision] / 10
    assert max(worst.values()) < TOLERANCE[precision], worst


def test_equal_rows_have_equal_logits(device):
    """Bit for bit, over two ends of chunks: no row depends on what other rows or the programs beside it do."""
    torch.manual_seed(0)
    config = dataclasses.replace(gecko.GeckoConfig.preset("gecko-1b"), num_layers=2, chunk_size=64)
    model, rows = gecko.Gecko(config).to(device, torch.bfloat16), 32
    text = torch.randint(0, config.vocab_size, (200,))
    decoder = Decoder(model, rows)
    with torch.inference_mode():
        prefill = read(model, [text[:100]])
        for _ in range(rows):
            decoder.add(prefill.state, prefill.seen)
        for token in text[100:].tolist():
            logits = decoder.step([token] * rows)
            assert logits.equal(logits[:1].expand_as(logits))
