"""The cache returns the state after exactly the given tokens, and never exceeds its budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.inference import Sampling
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Request, Token
from gecko.inference.scheduler import Engine
from gecko.state import GeckoState

CHUNK, PIECE = 8, 16
LOGITS = torch.zeros(264)


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(seed))


class Notes:
    """A cache, and a record of all states that were ever stored in it."""

    def __init__(self, model: gecko.Gecko, states: int) -> None:
        self.model, self.size = model, model.empty_state().num_bytes + LOGITS.nbytes
        self.cache, self.written = PrefixCache(states * self.size), {}

    def read(self, tokens: Tensor, name: str = "model") -> int:
        """Read a prompt as the engine would; return how many of its tokens the cache knew."""
        prefix = self.cache.find(name, tokens, CHUNK, PIECE)
        if prefix.state is None:
            assert prefix.length == 0
        else:
            assert prefix.state.position == [prefix.length]
            assert self.written[name, tuple(tokens[: prefix.length].tolist())] == int(prefix.state.clock.segment_id)
        for border, key in sorted(prefix.borders.items()):
            assert prefix.length < border <= len(tokens)
            assert border % CHUNK == 0 or border == len(tokens)
            self.cache.keep(key, self._state(border, name, tokens), LOGITS if border == len(tokens) else None)
        assert (prefix.logits is not None) == (prefix.length == len(tokens))
        assert self.cache.bytes == sum(entry.bytes for entry in self.cache._entries.values()) <= self.cache.max_bytes
        assert {(key, tail) for key, tails in self.cache._tails.items() for tail in tails} == set(self.cache._entries)
        return prefix.length

    def _state(self, border: int, name: str, tokens: Tensor) -> GeckoState:
        """Return a state with a unique segment id."""
        number = self.written.setdefault((name, tuple(tokens[:border].tolist())), len(self.written))
        state = self.model.empty_state().map(torch.clone)
        state.clock.position.fill_(border)
        state.clock.segment_id.fill_(number)
        return state


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 3), st.integers(0, 30)), max_size=25)


@settings(max_examples=60)
@given(prompts=PROMPTS, states=st.integers(1, 6), names=st.lists(st.sampled_from("ab"), min_size=25, max_size=25))
def test_what_is_found_is_what_was_kept_for_these_tokens(
    model: gecko.Gecko, prompts: list[tuple[int, int, int, int]], states: int, names: list[str]
) -> None:
    notes = Notes(model, states)
    for name, (first, length, second, more) in zip(names, prompts, strict=False):
        notes.read(torch.cat([text(length, first), text(more, 10 + second)]), name)
    assert notes.cache.hits + notes.cache.misses == len(prompts)


def test_the_longest_known_beginning_is_found(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 20), text(100)
    assert notes.read(prompt) == 0
    assert notes.read(prompt) == 100
    assert notes.read(torch.cat([prompt, text(50, 1)])) == 100
    assert notes.read(torch.cat([prompt, text(50, 1)])) == 150
    assert notes.read(torch.cat([prompt, text(50, 1)[:20], text(50, 2)])) == 100
    assert notes.read(torch.cat([prompt, text(50, 1)[:20], text(50, 3)])) == 120
    assert notes.read(text(99)) == 96
    assert (notes.cache.hits, notes.cache.misses) == (6, 1)


def test_a_state_without_logits_leaves_one_token_to_read(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 20), text(96)
    for seed in (1, 2):
        notes.read(torch.cat([prompt, text(5, seed)]))
    assert notes.read(prompt) < 96, "the state after it was kept when another prompt was read"
    assert notes.read(prompt) == 96


def test_a_beginning_is_known_by_all_of_its_tokens(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 9), text(100)
    notes.read(prompt)
    for place in (0, 50, 95):
        other = prompt.clone()
        other[place] += 1
        assert notes.read(other) <= place


def test_what_two_prompts_share_is_known_to_the_third(model: gecko.Gecko) -> None:
    notes, shared = Notes(model, 9), text(50)
    prompts = [torch.cat([shared, text(40, seed)]) for seed in (1, 2, 3)]
    assert [notes.read(prompt) for prompt in prompts] == [0, 0, 48]


def test_a_long_text_with_another_end_is_known_up_to_its_last_whole_piece(model: gecko.Gecko) -> None:
    notes, book = Notes(model, 9), text(1000)
    assert notes.read(torch.cat([book, text(4, 1)])) == 0
    assert notes.read(torch.cat([book[:-2], text(9, 2)])) == 992


def test_least_recently_used_states_go_first(model: gecko.Gecko) -> None:
    notes = Notes(model, 2)
    first, second, third = (text(CHUNK + 1, seed) for seed in (1, 2, 3))
    notes.read(first), notes.read(second)
    assert notes.read(first) == CHUNK + 1
    notes.read(third)
    assert [notes.read(prompt) for prompt in (third, first)] == [CHUNK + 1, CHUNK + 1]
    assert notes.read(second) == 0


def test_a_state_larger_than_the_budget_is_not_kept(model: gecko.Gecko) -> None:
    cache, size = PrefixCache(model.empty_state().num_bytes - 1), model.empty_state().num_bytes
    cache.keep((b"key", b""), model.empty_state())
    assert cache.bytes == 0 < size


def test_what_is_kept_holds_on_to_no_larger_tensors(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=1, prefix_cache=PrefixCache(1 << 24), piece=16)
    run(engine, [text(90)])
    (entry, *_) = engine._cache._entries.values()
    for name, tensor in entry.state.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("length", [0, -1])
def test_no_budget_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(length)


def run(
    engine: Engine, prompts: list[Tensor], sampling: Sampling | None = None
) -> list[list[tuple[int, float | None]]]:
    ids = [engine.submit(Request(prompt, 6, sampling or Sampling(0.9), 5, logprobs=0)) for prompt in prompts]
    made: dict[int, list[tuple[int, float | None]]] = {request_id: [] for request_id in ids}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Token):
                made[event.request_id].append((event.token, event.logprob))
    return [made[request_id] for request_id in ids]


SHARED = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(0, 20)), min_size=1, max_size=8)


@settings(max_examples=10)
@given(prompts=SHARED, rows=st.integers(1, 3), piece=st.sampled_from([5, 16, None]), states=st.integers(1, 8))
def test_a_hit_changes_no_token(
    model: gecko.Gecko, prompts: list[tuple[int, int, int]], rows: int, piece: int | None, states: int
) -> None:
    texts = [torch.cat([text(length, seed), text(more, 9)]) for seed, length, more in prompts]
    cache = PrefixCache(states * model.empty_state().num_bytes)
    cached, plain = Engine(model, rows=rows, piece=piece, prefix_cache=cache), Engine(model, rows=rows, piece=piece)
    penalised = Sampling(0.9, repetition_penalty=1.3)  # it also depends on the tokens that were not read again
    for sampling in (Sampling(0.9), penalised, penalised):
        for found, expected in zip(run(cached, texts, sampling), run(plain, texts, sampling), strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [chance for _, chance in found] == pytest.approx([chance for _, chance in expected], abs=1e-4)
    total = 3 * sum(len(prompt) for prompt in texts)
    for engine in (cached, plain):
        assert engine.prompt_tokens_read + engine.prefix_tokens_reused == total
    assert cache.hits + cache.misses <= 3 * len(texts)


def test_prompts_after_a_state_of_their_own_are_read_anew(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=1, prefix_cache=PrefixCache(1 << 24))
    run(engine, [text(50)])
    book = gecko.generate(model, text(30, 3), max_new_tokens=0).state
    engine.submit(Request(text(50), 1, Sampling(0.0), 0, state=book))
    while not engine.idle:
        engine.step()
    assert engine.prefix_tokens_reused == 0


def test_weights_that_change_are_another_model(model: gecko.Gecko) -> None:
    changed = gecko.Gecko(model.config)
    engine = Engine(changed, rows=1, prefix_cache=PrefixCache(1 << 24))
    run(engine, [text(50)])
    with torch.no_grad():
        changed.head.weight.add_(1)
    run(engine, [text(50)])
    assert engine.prefix_tokens_reused == 0
