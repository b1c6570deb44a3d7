"""In evaluations, a Llama gives the losses and tokens that it computes on the whole text at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import document_ids, load_tokenizer
from gecko.eval import LlamaModel
from gecko.eval.perplexity import perplexity
from gecko.eval.scored_model import open_texts
from gecko.inference import llama as generation
from gecko.models import Llama

TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 2


@pytest.fixture
def scored(model: Llama) -> LlamaModel:
    return LlamaModel(model, load_tokenizer("bytes"), "random", 64)


def whole_losses(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    return model.token_losses(tokens[None, :-1], tokens[None, 1:])[0][0]


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, len(TEXT)), max_size=5, unique=True), piece=st.sampled_from([7, 50, 2048]))
def test_losses_do_not_depend_on_how_the_stream_is_cut(model: Llama, cuts: list[int], piece: int) -> None:
    tokens = torch.tensor([256, *TEXT])
    scored = LlamaModel(model, load_tokenizer("bytes"), "random", 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "PIECE_TOKENS", piece)
        found = torch.cat(list(scored.losses(torch.tensor_split(tokens, sorted(cuts)))))
    torch.testing.assert_close(found, whole_losses(model, tokens))


@settings(max_examples=20)
@given(begin=st.integers(1, 60), length=st.integers(1, 40))
def test_a_continuation_is_scored_after_what_was_read(model: Llama, begin: int, length: int) -> None:
    """Its losses equal those of the whole text there, and reading on does not change an earlier state."""
    tokens = torch.tensor([256, *TEXT])[: begin + length]
    scored = LlamaModel(model, load_tokenizer("bytes"), "random", 64)
    reading = scored.read(tokens[:begin])
    for _ in range(2):
        predicted = scored.predict(reading, tokens[begin:])
        torch.testing.assert_close(predicted.losses, whole_losses(model, tokens)[begin - 1 :])
    later = scored.read(tokens[begin:], reading)
    torch.testing.assert_close(later.logits, scored.read(tokens).logits)


def test_greedy_is_what_is_written(scored: LlamaModel) -> None:
    """Compare with a computation over the whole text for every token, without a cache."""
    prompt = document_ids(scored.tokenizer, "What is")
    tokens = prompt
    for _ in range(12):
        tokens = torch.cat([tokens, scored.model(tokens[None])[0, -1:].argmax(-1)])
    written = tokens[len(prompt) :]
    stops = (written == scored.tokenizer.document_end).nonzero().flatten().tolist()
    expected = scored.tokenizer.decode(written[: stops[0] if stops else None].tolist())
    reading = scored.read(prompt)
    assert scored.write(reading, 12) == expected
    assert scored.write(reading, 12) == expected, "the reading was used up"
    assert scored.write(reading, 12, [expected[2]]) == expected[: expected.index(expected[2])]
    assert bool(scored.predict(reading, written).greedy.all())
    other = torch.cat([written[:-1], (written[-1:] + 1) % 256])
    assert scored.predict(reading, other).greedy.tolist() == [True] * 11 + [False]


def test_it_says_where_it_reads_further_than_it_was_trained(scored: LlamaModel, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT)
    texts = open_texts([str(tmp_path / "text.txt")], joined=False)
    perplexity(scored, texts, [64])
    assert scored.notes == []
    perplexity(scored, texts, [64, 128])
    assert len(scored.notes) == 1 and "context of 64 tokens, and the longest text had 128" in scored.notes[0]
    unknown = LlamaModel(scored.model, scored.tokenizer, "random", None)
    unknown.read(torch.tensor([256, 1, 2]))
    assert "had 3 tokens; the training context of random is not known" in unknown.notes[0]


def test_what_it_does_not_take(scored: LlamaModel) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        scored.read(torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ids in 0\.\.263; got 300"):
        list(scored.losses([torch.tensor([256, 300])]))
    assert list(scored.losses([])) == list(scored.losses([torch.tensor([256])])) == []
