"""States of conversations and of prompts, over HTTP and in the cache."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.conftest import StartServer
from serving.sites import GREEDY, Site, check_error, greedy
from serving.texts import Log, alone, request, run, text
from torch import Tensor

import gecko
from gecko.inference import Sampling
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Finished, Request, Token
from gecko.inference.scheduler import Engine
from gecko.serving.limits import ApiError
from gecko.serving.stores import SavedStates
from gecko.state import GeckoState

# ---- States of conversations, saved and deleted over HTTP.


def begun(site: Site) -> tuple[str, str]:
    """Return the id of a response, and the conversation up to the next turn."""
    answer = site.openai.responses.create(input="Hello", max_output_tokens=20, **GREEDY)
    return answer.id, f"User: Hello\n\nAssistant:{answer.output_text}\n\n"


@pytest.fixture
def writable(start: StartServer, tmp_path: Path) -> Site:
    return start(states=tmp_path, states_bytes=1 << 20)


def test_a_saved_conversation_continues_as_if_read_anew(writable: Site, model: gecko.Gecko) -> None:
    """By every route, and also after the response is gone."""
    response, text = begun(writable)
    saved = writable.post("/v1/states", json={"name": "hello", "response_id": response})
    assert (saved.status_code, saved.json()["id"]) == (201, "hello")
    assert saved.json()["position"] == len(text.encode()) + 1
    writable.openai.responses.delete(response)
    expected = greedy(model, text + "User: More\n\nAssistant:", 20)
    asked: dict[str, Any] = {"extra_body": {"state": "hello"}, **GREEDY}
    more = writable.openai.responses.create(input="More", max_output_tokens=20, **asked)
    assert more.output_text == expected
    messages: Any = [{"role": "user", "content": "More"}]
    chat = writable.openai.chat.completions.create(messages=messages, max_tokens=20, **asked)
    assert chat.choices[0].message.content == expected
    last = writable.openai.responses.create(input="End", previous_response_id=more.id, max_output_tokens=20, **GREEDY)
    text += f"User: More\n\nAssistant:{expected}\n\nUser: End\n\nAssistant:"
    assert last.output_text == greedy(model, text, 20)


def test_states_are_listed_and_deleted(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    for name in ("b", "a"):
        assert writable.post("/v1/states", json={"name": name, "response_id": response}).status_code == 201
    listed = httpx2.get(f"{writable.url}/v1/states").json()["data"]
    assert [(one["id"], one["bytes"]) for one in listed] == [
        (name, (tmp_path / f"{name}.state").stat().st_size) for name in ("a", "b")
    ]
    assert httpx2.get(f"{writable.url}/v1/states/a").json()["position"] > 10
    assert httpx2.delete(f"{writable.url}/v1/states/a").json()["deleted"]
    for call in (httpx2.get, httpx2.delete):
        check_error(call(f"{writable.url}/v1/states/a"), 404, "'a'")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["b.state"]


def test_names_stay_inside_of_the_folder(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    for name in ("../a", "/etc/a", "..", ".a", "", "a/b", "a\0", "é", "a" * 101, "-a"):
        check_error(writable.post("/v1/states", json={"name": name, "response_id": response}), 400, "name")
    for name in ("..%2Fa", "%2Fetc%2Fpasswd", "%00"):
        for call in (httpx2.get, httpx2.delete):
            assert call(f"{writable.url}/v1/states/{name}").status_code == 404
    assert list(tmp_path.iterdir()) == []


def test_bad_requests_change_nothing(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    (tmp_path / "mine.state").write_text("mine")
    for body, status, told in (
        ({"name": "mine", "response_id": response}, 409, "mine"),
        ({"name": "a", "response_id": "resp_gone"}, 404, "resp_gone"),
        ({"name": "a"}, 400, "response_id"),
        ({"response_id": response}, 400, "name"),
        ({"name": 5, "response_id": response}, 400, "name"),
        ({"name": "a", "response_id": response, "path": "/etc"}, 400, "path"),
    ):
        check_error(writable.post("/v1/states", json=body), status, told)
    check_error(httpx2.get(f"{writable.url}/v1/states/mine"), 400, "")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.state", "mine")]
    writable.wait_until_idle()


def test_states_are_read_only_unless_there_is_a_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    model.empty_state().save(tmp_path / "book.state")
    for options in ({"states": tmp_path}, {"states_bytes": 1 << 20}):
        site = start(**options)
        response, _ = begun(site)
        check_error(site.post("/v1/states", json={"name": "a", "response_id": response}), 403, "--states-disk")
        check_error(httpx2.delete(f"{site.url}/v1/states/book"), 403, "--states-disk")
    assert [path.name for path in tmp_path.iterdir()] == ["book.state"]


def test_all_files_together_stay_below_the_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    """Also if many clients save at once, and with files that no client saved."""
    model.empty_state().save(tmp_path / "book.state")
    size = (tmp_path / "book.state").stat().st_size
    limit = int(3.9 * size) + 20_000
    site = start(states=tmp_path, states_bytes=limit)
    response, _ = begun(site)

    def save(number: int) -> int:
        return site.post("/v1/states", json={"name": f"s{number}", "response_id": response}).status_code

    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(save, range(8)))
    assert set(codes) == {201, 400}
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + codes.count(201)
    assert sum(path.stat().st_size for path in files) <= limit
    check_error(site.post("/v1/states", json={"name": "z", "response_id": response}), 400, "Delete some")
    assert httpx2.delete(f"{site.url}/v1/states/book").status_code == 200
    assert save(9) == 201


def test_one_name_is_saved_once(tmp_path: Path, model: gecko.Gecko) -> None:
    states = SavedStates(tmp_path, 1 << 20)

    def save(_: int) -> str | None:
        try:
            return states.save("a", model.empty_state())["id"]
        except ApiError as error:
            return error.code

    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(save, range(8)))
    assert sorted(map(str, ends)) == ["a"] + ["state_exists"] * 7


# ---- The cache returns the state after exactly the given tokens, and never exceeds its budget.

CHUNK, PIECE = 8, 16
LOGITS = torch.zeros(264)


def drawn_tokens(length: int, seed: int = 0) -> Tensor:
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
        notes.read(torch.cat([drawn_tokens(length, first), drawn_tokens(more, 10 + second)]), name)
    assert notes.cache.hits + notes.cache.misses == len(prompts)


def test_the_longest_known_beginning_is_found(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 20), drawn_tokens(100)
    assert notes.read(prompt) == 0
    assert notes.read(prompt) == 100
    assert notes.read(torch.cat([prompt, drawn_tokens(50, 1)])) == 100
    assert notes.read(torch.cat([prompt, drawn_tokens(50, 1)])) == 150
    assert notes.read(torch.cat([prompt, drawn_tokens(50, 1)[:20], drawn_tokens(50, 2)])) == 100
    assert notes.read(torch.cat([prompt, drawn_tokens(50, 1)[:20], drawn_tokens(50, 3)])) == 120
    assert notes.read(drawn_tokens(99)) == 96
    assert (notes.cache.hits, notes.cache.misses) == (6, 1)


def test_a_state_without_logits_leaves_one_token_to_read(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 20), drawn_tokens(96)
    for seed in (1, 2):
        notes.read(torch.cat([prompt, drawn_tokens(5, seed)]))
    assert notes.read(prompt) < 96, "the state after it was kept when another prompt was read"
    assert notes.read(prompt) == 96


def test_a_beginning_is_known_by_all_of_its_tokens(model: gecko.Gecko) -> None:
    notes, prompt = Notes(model, 9), drawn_tokens(100)
    notes.read(prompt)
    for place in (0, 50, 95):
        other = prompt.clone()
        other[place] += 1
        assert notes.read(other) <= place


def test_what_two_prompts_share_is_known_to_the_third(model: gecko.Gecko) -> None:
    notes, shared = Notes(model, 9), drawn_tokens(50)
    prompts = [torch.cat([shared, drawn_tokens(40, seed)]) for seed in (1, 2, 3)]
    assert [notes.read(prompt) for prompt in prompts] == [0, 0, 48]


def test_a_long_text_with_another_end_is_known_up_to_its_last_whole_piece(model: gecko.Gecko) -> None:
    notes, book = Notes(model, 9), drawn_tokens(1000)
    assert notes.read(torch.cat([book, drawn_tokens(4, 1)])) == 0
    assert notes.read(torch.cat([book[:-2], drawn_tokens(9, 2)])) == 992


def test_least_recently_used_states_go_first(model: gecko.Gecko) -> None:
    notes = Notes(model, 2)
    first, second, third = (drawn_tokens(CHUNK + 1, seed) for seed in (1, 2, 3))
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
    texts_of(engine, [drawn_tokens(90)])
    (entry, *_) = engine._cache._entries.values()
    for name, tensor in entry.state.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("length", [0, -1])
def test_no_budget_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(length)


def texts_of(
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
    texts = [torch.cat([drawn_tokens(length, seed), drawn_tokens(more, 9)]) for seed, length, more in prompts]
    cache = PrefixCache(states * model.empty_state().num_bytes)
    cached, plain = Engine(model, rows=rows, piece=piece, prefix_cache=cache), Engine(model, rows=rows, piece=piece)
    penalised = Sampling(0.9, repetition_penalty=1.3)  # it also depends on the tokens that were not read again
    for sampling in (Sampling(0.9), penalised, penalised):
        for found, expected in zip(texts_of(cached, texts, sampling), texts_of(plain, texts, sampling), strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [chance for _, chance in found] == pytest.approx([chance for _, chance in expected], abs=1e-4)
    total = 3 * sum(len(prompt) for prompt in texts)
    for engine in (cached, plain):
        assert engine.prompt_tokens_read + engine.prefix_tokens_reused == total
    assert cache.hits + cache.misses <= 3 * len(texts)


def test_prompts_after_a_state_of_their_own_are_read_anew(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=1, prefix_cache=PrefixCache(1 << 24))
    texts_of(engine, [drawn_tokens(50)])
    book = gecko.generate(model, drawn_tokens(30, 3), max_new_tokens=0).state
    engine.submit(Request(drawn_tokens(50), 1, Sampling(0.0), 0, state=book))
    while not engine.idle:
        engine.step()
    assert engine.prefix_tokens_reused == 0


def test_weights_that_change_are_another_model(model: gecko.Gecko) -> None:
    changed = gecko.Gecko(model.config)
    engine = Engine(changed, rows=1, prefix_cache=PrefixCache(1 << 24))
    texts_of(engine, [drawn_tokens(50)])
    with torch.no_grad():
        changed.head.weight.add_(1)
    texts_of(engine, [drawn_tokens(50)])
    assert engine.prefix_tokens_reused == 0


# ---- A prompt that several requests share is read once, and does not change their results.


@pytest.mark.parametrize("after", [0, 21])
def test_choices_of_one_prompt_read_it_once(model: gecko.Gecko, after: int) -> None:
    """One request is cancelled meanwhile, one wants no new tokens, and one arrives when half of the prompt is read."""
    state = gecko.generate(model, text(after), max_new_tokens=0).state if after else None
    numbers = enumerate((5, 9, 0, 7, 7))
    choices = [request(text(90), new, Sampling(0.9), seed=seed, state=state) for seed, new in numbers]
    engine, log = Engine(model, rows=5, piece=16), Log()
    ids = [engine.submit(asked) for asked in choices[:4]]
    for _ in range(3):
        log.take(engine.step())
    engine.cancel(ids[0])
    ids.append(engine.submit(choices[4]))
    while not engine.idle:
        log.take(engine.step())
    assert (engine.prompt_tokens_read, engine.prefix_tokens_reused) == (90, 3 * 90)
    assert log.ends[ids[0]].reason == "cancelled"
    for request_id, asked in list(zip(ids, choices, strict=True))[1:]:
        assert log.ids(request_id) == alone(model, asked).tokens[0]
        assert log.ends[request_id] == Finished(request_id, "length", None, after + 90 + asked.max_new_tokens)


@pytest.mark.parametrize("top", [None, 2])
def test_choices_that_wait_for_a_place_read_nothing(model: gecko.Gecko, top: int | None) -> None:
    """Nine choices take their turns in two places, between other prompts; all of the kept state is then free."""
    prompt = text(90)
    choices = [request(prompt, 4 + seed % 3, Sampling(0.9), seed=seed, prompt_logprobs=top) for seed in range(9)]
    others = [request(text(30, seed), 5) for seed in range(4)]
    engine = Engine(model, rows=2, piece=16)
    ids, log = run(engine, *choices, *others)
    assert (engine.prompt_tokens_read, engine.prefix_tokens_reused) == (90 + 4 * 30, 8 * 90)
    for request_id, asked in zip(ids, [*choices, *others], strict=True):
        assert log.ids(request_id) == alone(model, asked).tokens[0]
        assert log.ends[request_id].position == len(asked.prompt) + asked.max_new_tokens
    assert len(log.prompts) == (9 if top else 0)
    assert not engine._results


def test_a_kept_prompt_is_dropped_with_the_last_that_waits_for_it(model: gecko.Gecko) -> None:
    prompt = text(40)
    engine = Engine(model, rows=1)
    ids = [engine.submit(request(prompt, 50, seed=seed)) for seed in range(3)]
    engine.step()
    assert len(engine._results) == 1
    for request_id in ids[1:]:
        engine.cancel(request_id)
    engine.step()
    assert not engine._results


def test_equal_prompts_after_other_states_are_read_each(model: gecko.Gecko) -> None:
    books = [gecko.generate(model, text(length), max_new_tokens=0).state for length in (33, 5)]
    asked = [request(text(50), state=state) for state in (None, *books)]
    engine = Engine(model, rows=3)
    ids, log = run(engine, *asked)
    assert engine.prompt_tokens_read == 150
    assert [log.ids(request_id) for request_id in ids] == [alone(model, one).tokens[0] for one in asked]
