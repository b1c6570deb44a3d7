"""In evaluations, Gecko gives the losses and tokens that the model computes on the whole text at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gecko
from gecko.data import document_ids, load_tokenizer
from gecko.eval import GeckoModel
from gecko.state import GeckoState

TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 4


def whole_losses(model: gecko.Gecko, tokens: torch.Tensor) -> torch.Tensor:
    losses, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:])
    return losses[0]


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, len(TEXT) - 1), max_size=5, unique=True))
def test_losses_do_not_depend_on_how_the_stream_is_cut(model: GeckoModel, cuts: list[int]) -> None:
    tokens = torch.tensor([256, *TEXT])
    parts = torch.tensor_split(tokens, sorted(cuts))
    torch.testing.assert_close(torch.cat(list(model.losses(parts))), whole_losses(model.model, tokens))


@settings(max_examples=20)
@given(begin=st.integers(1, 60), length=st.integers(1, 40))
def test_a_continuation_is_scored_after_what_was_read(model: GeckoModel, begin: int, length: int) -> None:
    """Its losses equal those of the whole text there, and reading on does not change an earlier state."""
    tokens = torch.tensor([256, *TEXT])[: begin + length]
    reading = model.read(tokens[:begin])
    for _ in range(2):
        predicted = model.predict(reading, tokens[begin:])
        torch.testing.assert_close(predicted.losses, whole_losses(model.model, tokens)[begin - 1 :])
    later = model.read(tokens[begin:], reading)
    torch.testing.assert_close(later.logits, model.read(tokens).logits)


def test_greedy_is_what_is_written(model: GeckoModel) -> None:
    prompt = document_ids(model.tokenizer, "What is")
    reading = model.read(prompt)
    written = gecko.generate(model.model, prompt, max_new_tokens=12, temperature=0).tokens[0]
    assert model.write(reading, 12) == model.tokenizer.decode(written)
    assert model.write(reading, 12) == model.tokenizer.decode(written), "the reading was used up"
    assert bool(model.predict(reading, torch.tensor(written)).greedy.all())
    other = [*written[:-1], (written[-1] + 1) % 256]
    assert model.predict(reading, torch.tensor(other)).greedy.tolist() == [True] * (len(other) - 1) + [False]


def renewed_by_hand(model: gecko.Gecko, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the losses with the release's loop, over whole tensors."""
    chunk, state, losses = model.config.chunk_size, None, []
    inputs, targets = tokens[:-1], tokens[1:]
    for begin in range(0, len(inputs), 2 * chunk):
        end = min(begin + 2 * chunk, len(inputs))
        part, state = model.token_losses(inputs[None, begin:end], targets[None, begin:end], state=state)
        losses.append(part[0])
        if 8 * chunk <= end < len(inputs):
            _, again = model.hidden(inputs[None, end - 6 * chunk : end])
            both = zip(state.mixers, again.mixers, strict=True)
            mixers = tuple(dataclasses.replace(a, norm=b.norm) for a, b in both)
            state = GeckoState(state.config, state.model, state.clock, mixers, again.final_norm)
    return torch.cat(losses)


@pytest.mark.parametrize("length", [20, 127, 128, 129, 145, 200, 301])
@torch.no_grad()
def test_renewed_norms_are_those_of_the_released_evaluator(cumulative: gecko.Gecko, length: int) -> None:
    tokens = torch.tensor([256, *TEXT])[:length]
    renewed = GeckoModel(cumulative, load_tokenizer("bytes"), "megalodon", renew_norms=True)
    found = torch.cat(list(renewed.losses(tokens.split(17))))
    torch.testing.assert_close(found, renewed_by_hand(cumulative, tokens), rtol=1e-9, atol=1e-9)
    kept = whole_losses(cumulative, tokens)
    border = 8 * cumulative.config.chunk_size
    torch.testing.assert_close(found[:border], kept[:border])
    if length > border + 1:
        assert (found[border:] - kept[border:]).abs().max() > 1e-4


def test_renewed_norms_are_refused_where_norms_decay(model: GeckoModel) -> None:
    with pytest.raises(ValueError, match="cumulative norm"):
        GeckoModel(model.model, model.tokenizer, "gecko", renew_norms=True)
