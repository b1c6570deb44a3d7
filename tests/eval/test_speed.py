"""Speed by length: the text is read whole, further tokens are timed one by one, and both architectures have scores."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from gecko.data import ByteTokenizer
from gecko.eval import GeckoModel, LlamaModel
from gecko.eval.speed import NEW_TOKENS, SCORES, speed
from gecko.models import Llama, LlamaConfig

LLAMA = LlamaConfig(vocab_size=264, num_layers=1, model_dim=32, num_heads=2, ffn_dim=32)


@pytest.mark.parametrize("kind", ["gecko", "llama"])
def test_every_length_has_all_scores(model: GeckoModel, kind: str) -> None:
    measured = model if kind == "gecko" else LlamaModel(Llama(LLAMA).eval(), ByteTokenizer(), "llama", None)
    results = speed(measured, [16, 8, 16], 2)
    names = itertools.product((8, 16), (*SCORES, "peak memory, GiB"))
    assert [(one.where["length"], one.name) for one in results.scores] == list(names)
    assert all(one.value > 0 and (one.n == 2) == (one.interval is not None) for one in results.scores)
    (memory, more) = (one.value for one in results.scores if one.name == "peak memory, GiB")
    assert 0 < memory <= more
    assert all(one.interval is None for one in speed(measured, [8], 1).scores)


def test_times_are_those_of_the_text_and_of_single_tokens(model: GeckoModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a text takes a second a token here, a new token 10 s; a document end stops no measurement."""
    after = model.read(torch.tensor([256, 65]))
    assert len(list(model.stream(after, NEW_TOKENS))) == NEW_TOKENS
    assert not list(model.stream(after, 3, set(range(264))))
    now, read, texts = [0.0], GeckoModel.read, []

    def slow_read(self: GeckoModel, tokens: torch.Tensor, after: None = None) -> object:
        now[0] += len(tokens)
        texts.append(tokens)
        return read(self, tokens, after)

    def slow_stream(self: GeckoModel, after: object, count: int) -> object:
        for token in range(count):
            now[0] += 10.0
            yield token

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(GeckoModel, "read", slow_read)
    monkeypatch.setattr(GeckoModel, "stream", slow_stream)
    found = {one.name: one.value for one in speed(model, [16], 3).scores}
    assert [found[name] for name in SCORES] == [1.0, 26e3, 10e3]
    assert len(texts) == 4 and all(len(text) == 16 and text[0] == 256 for text in texts)
