"""Prompts: read in any parts, together, and scored."""

from collections.abc import Iterator

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.texts import text
from support.model_calls import assert_same_states
from torch import Tensor

import gecko
from gecko.inference import Sampling, piece_length, read, score
from gecko.inference.prefill import MOST_TOGETHER
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Finished, KeptStates, Request
from gecko.inference.scheduler import Engine

# ---- Prefill gives the same result for any division of the prompt, in bounded memory.


@settings(max_examples=20)
@given(length=st.integers(1, 90), cuts=st.lists(st.integers(0, 90), max_size=5), piece=st.integers(1, 100))
def test_neither_pieces_nor_parts_matter(model: gecko.Gecko, length: int, cuts: list[int], piece: int) -> None:
    """The prefill is what one call of the model gives, and so are the losses."""
    tokens = text(length)
    parts = torch.tensor_split(tokens, sorted(cuts))
    with torch.no_grad():
        logits, state = model(tokens.unsqueeze(0))
    cut, scored = read(model, parts, piece=piece), list(score(model, parts, piece=piece))
    assert cut.state.position == [length]
    torch.testing.assert_close(cut.logits, logits[0, -1], rtol=1e-4, atol=1e-4)
    for found in (cut.state, scored[-1].state):
        assert_same_states(found, state, 1e-4)
    losses = torch.cat([losses for losses, _ in scored])
    assert losses.shape == (length - 1,)
    if length > 1:
        expected, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:])
        torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-4)


def test_pieces_end_at_multiples_of_their_length_wherever_the_state_stands(
    model: gecko.Gecko, calls: list[tuple[int, int]]
) -> None:
    state = read(model, [text(5)]).state
    read(model, [text(30), text(20)], state, piece=16)
    assert calls == [(1, length) for length in (5, 11, 16, 16, 7)]


def test_a_piece_is_whole_windows() -> None:
    for name, chunk, expected in (("tiny", 64, 4096), ("gecko-7b", 2048, 4096), ("megalodon-7b", 4096, 8192)):
        assert piece_length(gecko.GeckoConfig.preset(name, chunk_size=chunk)) == expected


def test_parts_are_taken_when_they_are_needed(model: gecko.Gecko) -> None:
    taken, ahead = 0, []
    hidden = model.hidden

    def parts() -> Iterator[Tensor]:
        nonlocal taken
        for _ in range(40):
            taken += 10
            yield text(10)

    def watched(tokens: Tensor, **more: object) -> object:
        result = hidden(tokens, **more)
        ahead.append(taken - result[1].position[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "hidden", watched)
        read(model, parts(), piece=32)
    assert len(ahead) == 13
    assert max(ahead) < 10


def test_memory_does_not_grow_with_the_text(model: gecko.Gecko) -> None:
    def resident_after(pieces: int) -> int:
        nonlocal state
        state = read(model, (text(4096, i) for i in range(pieces)), state, piece=512).state
        return psutil.Process().memory_info().rss

    state = None
    before = resident_after(4)
    size = state.num_bytes
    assert resident_after(12) - before < 16e6
    assert state.num_bytes == size


def test_what_is_no_prompt_is_refused(model: gecko.Gecko) -> None:
    for before in (None, read(model, [text(3)]).state):
        with pytest.raises(ValueError, match="at least one token"):
            read(model, [torch.empty(0, dtype=torch.int64)], before)
    assert list(score(model, [])) == []
    for way in (read, lambda *given: list(score(*given))):
        for wrong in (-1, 264, 2**40):
            with pytest.raises(ValueError, match=rf"a prompt must be ids in 0\.\.263; got {wrong}"):
                way(model, [torch.tensor([1, wrong])])
        for wrong in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64), torch.tensor(3), torch.tensor([True])):
            with pytest.raises(TypeError, match="1-D integers"):
                way(model, [wrong])
        with pytest.raises(ValueError, match="one row; got 3"):
            way(model, [text(3)], model.empty_state(3))


# ---- Several prompts in one call of the model: each gets what it would get alone.


def run(engine: Engine, prompts: list[Tensor], states: list[gecko.GeckoState | None]) -> list[KeptStates]:
    """Read the prompts, without an answer, and return the states that the engine keeps of them."""
    kept = [KeptStates() for _ in prompts]
    for prompt, state, keep in zip(prompts, states, kept, strict=True):
        engine.submit(Request(prompt, 0, Sampling(0.0), state=state, keep=keep))
    while not engine.idle:
        assert all(event.reason == "length" for event in engine.step() if isinstance(event, Finished))
    return kept


def check(
    model: gecko.Gecko, prompts: list[Tensor], states: list[gecko.GeckoState | None], kept: list[KeptStates]
) -> None:
    for prompt, before, keep in zip(prompts, states, kept, strict=True):
        assert keep.prompt is not None
        assert_same_states(keep.prompt, read(model, [prompt], before).state, 1e-4)


def test_short_prompts_are_read_in_one_call(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    prompts = [text(length, length) for length in (30, 25, 28, 31)]
    kept = run(Engine(model, rows=4), prompts, [None] * 4)
    assert calls == [(4, 31)]
    check(model, prompts, [None] * 4, kept)


def test_prompts_after_states_at_different_positions(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    states = [read(model, [text(length, 50)]).state if length else None for length in (5, 0, 16, 40)]
    calls.clear()
    prompts = [text(length, length) for length in (20, 22, 24, 19)]
    kept = run(Engine(model, rows=4), prompts, states)
    assert calls == [(4, 24)]
    check(model, prompts, states, kept)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10] * (MOST_TOGETHER + 2), [(MOST_TOGETHER, 10), (2, 10)]),
        ([10, 11, 60], [(2, 11), (1, 60)]),  # padding would be more than reading
        ([3000, 2000, 100], [(1, 100), (1, 2000), (1, 3000)]),  # beyond the tokens of a call
    ],
)
def test_which_prompts_are_read_together(
    model: gecko.Gecko, calls: list[tuple[int, int]], lengths: list[int], expected: list[tuple[int, int]]
) -> None:
    run(Engine(model, rows=32), [text(length, i) for i, length in enumerate(lengths)], [None] * len(lengths))
    assert calls == expected


def test_a_common_beginning_is_read_once(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    shared = text(40, 0)
    prompts = [torch.cat([shared, text(4, seed)]) for seed in (1, 2)]
    engine = Engine(model, rows=2, prefix_cache=PrefixCache(1 << 24))
    run(engine, [torch.cat([shared, text(4, 3)])], [None])
    calls.clear()
    kept = run(engine, prompts, [None] * 2)
    assert sorted(calls) == [(1, 4), (1, 4), (1, 40)]
    check(model, prompts, [None] * 2, kept)


def test_a_prompt_that_fails_fails_alone(model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the call that it shares with others, or in its second piece."""
    hidden, good, bad = model.hidden, [text(9, 1).clamp(min=8), text(9, 2).clamp(min=8)], torch.full((9,), 7)

    def failing(tokens: Tensor, **more: object) -> object:
        if (tokens == 7).all(1).any():
            raise RuntimeError("planted")
        return hidden(tokens, **more)

    monkeypatch.setattr(model, "hidden", failing)
    for wrong, read_before in ((bad, 0), (torch.cat([good[0], text(7, 3).clamp(min=8), bad]), 16)):
        engine = Engine(model, rows=3, piece=None if wrong is bad else 16)
        names = [engine.submit(Request(prompt, 2, Sampling(0.0))) for prompt in (good[0], wrong, good[1])]
        ends: dict[int, Finished] = {}
        while not engine.idle:
            ends |= {event.request_id: event for event in engine.step() if isinstance(event, Finished)}
        assert [ends[name].reason for name in names] == ["length", "error", "length"]
        assert ends[names[1]] == Finished(names[1], "error", "RuntimeError: planted", read_before)


# ---- Scoring after a state, and between two pieces.


def test_a_state_goes_on_and_its_next_token_is_not_scored(model: gecko.Gecko) -> None:
    tokens = text(60)
    before = read(model, [tokens[:20]]).state
    scored = list(score(model, [tokens[20:]], before, piece=16))
    expected, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:])
    losses = torch.cat([losses for losses, _ in scored])
    torch.testing.assert_close(losses, expected[0, 20:], rtol=1e-4, atol=1e-4)
    assert scored[-1].state.position == [60]


def test_between_two_pieces_gradients_are_as_the_caller_has_them(model: gecko.Gecko) -> None:
    for _ in score(model, [text(50)], piece=16):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
