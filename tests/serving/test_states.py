"""States of conversations and of prompts, over HTTP and in the cache."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.conftest import StartServer
from serving.sites import GREEDY, OK, Site, check_error, document, greedy
from serving.texts import Log, alone, request, run, text
from torch import Tensor

import gecko
from gecko.inference import Sampling
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Finished, Request
from gecko.inference.scheduler import Engine
from gecko.serving.limits import ApiError
from gecko.serving.stores import SavedStates
from gecko.state import GeckoState

# ---- States of conversations, saved and deleted over HTTP.


def begun(site: Site) -> tuple[str, str]:
    """Return the id of a response, and the conversation up to the next turn."""
    answer = site.openai.responses.create(input="Hello", max_output_tokens=20, **GREEDY)
    return answer.id, f"User: Hello\n\nAssistant:{answer.output_text}\n\n"


def save(site: Site, name: str, response: str) -> httpx2.Response:
    return site.post("/v1/states", json={"name": name, "response_id": response})


@pytest.fixture
def writable(start: StartServer, tmp_path: Path) -> Site:
    return start(states=tmp_path, states_bytes=1 << 20)


def test_a_saved_conversation_continues_as_if_read_anew(writable: Site, model: gecko.Gecko, tmp_path: Path) -> None:
    """By every route, and also after the response is gone."""
    response, text = begun(writable)
    saved = save(writable, "hello", response)
    assert (saved.status_code, saved.json()["id"]) == (201, "hello")
    assert saved.json()["position"] == len(text.encode()) + 1
    save(writable, "a", response)
    writable.openai.responses.delete(response)
    asked: dict[str, Any] = {"extra_body": {"state": "hello"}, **GREEDY}
    for prompt in ("User:", list(b"User:")):
        answer = writable.openai.completions.create(prompt=prompt, max_tokens=12, **asked).choices[0]
        assert (answer.text, answer.position) == (greedy(model, f"{text}User:", 12), len(text.encode()) + 1 + 5 + 12)
    check_error(writable.post(json={**OK, "state": "hello", "prompt": ""}), 400, "tokens")
    expected = greedy(model, text + "User: More\n\nAssistant:", 20)
    more = writable.openai.responses.create(input="More", max_output_tokens=20, **asked)
    assert more.output_text == expected
    messages: Any = [{"role": "user", "content": "More"}]
    chat = writable.openai.chat.completions.create(messages=messages, max_tokens=20, **asked)
    assert chat.choices[0].message.content == expected
    last = writable.openai.responses.create(input="End", previous_response_id=more.id, max_output_tokens=20, **GREEDY)
    text += f"User: More\n\nAssistant:{expected}\n\nUser: End\n\nAssistant:"
    assert last.output_text == greedy(model, text, 20)
    # They are listed, and deleted.
    listed = writable.get("/v1/states").json()["data"]
    sizes = {name: (tmp_path / f"{name}.state").stat().st_size for name in ("a", "hello")}
    assert [(one["id"], one["bytes"]) for one in listed] == list(sizes.items())
    assert writable.get("/v1/states/a").json()["position"] > 10
    assert writable.openai.models.retrieve("small").states == ["a", "hello"]
    assert writable.client.delete("/v1/states/a").json()["deleted"]
    for call in (writable.get, writable.client.delete):
        check_error(call(f"{writable.url}/v1/states/a"), 404, "'a'")
    assert [path.name for path in tmp_path.iterdir()] == ["hello.state"]


def test_bad_requests_change_nothing(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    (tmp_path / "mine.state").write_text("mine")
    (tmp_path / "folder.state").mkdir()
    (tmp_path / "dangling.state").symlink_to(tmp_path / "gone")
    outside = ("../a", "/etc/a", "..", ".a", "", "a/b", "a\0", "é", "a" * 101, "-a")
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"name": "mine", "response_id": response}, 409, "mine"),
        ({"name": "a", "response_id": "resp_gone"}, 404, "resp_gone"),
        ({"name": "a"}, 400, "response_id"),
        ({"response_id": response}, 400, "name"),
        ({"name": 5, "response_id": response}, 400, "name"),
        ({"name": "a", "response_id": response, "path": "/etc"}, 400, "path"),
        *[({"name": name, "response_id": response}, 400, "name must have") for name in outside],
    ]
    for body, status, told in bad:
        check_error(writable.post("/v1/states", json=body), status, told)
    for name in ("..%2Fa", "%2Fetc%2Fpasswd", "%00", "folder", "dangling"):
        for call in (writable.get, writable.client.delete):
            assert call(f"{writable.url}/v1/states/{name}").status_code == 404
    check_error(writable.get("/v1/states/mine"), 400, "")
    assert writable.openai.models.retrieve("small").states == ["mine"]
    assert len(list(tmp_path.iterdir())) == 3 and (tmp_path / "mine.state").read_text() == "mine"


def test_states_that_cannot_be_used(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    (folder := tmp_path / "states").mkdir()
    site, state = start(states=folder), gecko.generate(model, document("abc"), max_new_tokens=0).state
    state.save(tmp_path / "outside.state")
    content = bytearray((tmp_path / "outside.state").read_bytes())
    content[-5] ^= 1
    (folder / "damaged.state").write_bytes(content)
    (folder / "short.state").write_bytes(content[:100])
    (folder / "text.state").write_text("once upon a time")
    (folder / "empty.state").write_bytes(b"")
    gecko.Gecko(gecko.GeckoConfig.preset("tiny")).empty_state().save(folder / "other-config.state")
    gecko.Gecko(model.config).empty_state().save(folder / "other-weights.state")
    state.rows([0, 0]).save(folder / "two-rows.state")
    for path in sorted(folder.glob("*.state")):
        response = site.post(json={**OK, "state": path.stem})
        check_error(response, 400, "")
        assert str(tmp_path) not in response.text
    for name in ("../outside", str(tmp_path / "outside"), "..", "", "a/../../outside", "gone", "x" * 5000):
        check_error(site.post(json={**OK, "state": name}), 404, "there is no state")
    assert site.post(json=OK).status_code == 200


def test_a_replaced_state_is_read_anew_whatever_its_date(model: gecko.Gecko, tmp_path: Path) -> None:
    """All states of a model have the same size, and a copy may keep the modification time of the original."""
    states = SavedStates(tmp_path)
    for prompt in ("one", "another"):
        gecko.generate(model, document(prompt), max_new_tokens=0).state.save(tmp_path / "book.state")
        os.utime(tmp_path / "book.state", (1e9, 1e9))
        assert states.load("book").position == [len(document(prompt))]


def test_states_are_read_only_unless_there_is_a_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    model.empty_state().save(tmp_path / "book.state")
    for options in ({"states": tmp_path}, {"states_bytes": 1 << 20}):
        site = start(**options)
        check_error(save(site, "a", begun(site)[0]), 403, "--states-disk")
        check_error(site.client.delete("/v1/states/book"), 403, "--states-disk")
    assert [path.name for path in tmp_path.iterdir()] == ["book.state"]


def test_all_files_together_stay_below_the_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    """Also if many clients save at once, and with files that no client saved."""
    model.empty_state().save(tmp_path / "book.state")
    size = (tmp_path / "book.state").stat().st_size
    limit = int(3.9 * size) + 20_000
    site = start(states=tmp_path, states_bytes=limit)
    response, _ = begun(site)
    with ThreadPoolExecutor(8) as threads:
        codes = [answer.status_code for answer in threads.map(lambda n: save(site, f"s{n}", response), range(8))]
    assert set(codes) == {201, 400}
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + codes.count(201)
    assert sum(path.stat().st_size for path in files) <= limit
    check_error(save(site, "z", response), 400, "Delete some")
    assert site.client.delete("/v1/states/book").status_code == 200
    assert save(site, "s9", response).status_code == 201


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


A, B = drawn_tokens(100), [drawn_tokens(50, seed) for seed in range(5)]
BOOK = drawn_tokens(1000)
SHORT = [drawn_tokens(CHUNK + 1, seed) for seed in (1, 2, 3)]
READ: dict[str, tuple[int, list[tuple[list[Tensor], int]]]] = {
    "the longest known beginning": (20, [
        ([A], 0), ([A], 100), ([A, B[1]], 100), ([A, B[1]], 150), ([A, B[1][:20], B[2]], 100),
        ([A, B[1][:20], B[3]], 120), ([A[:99]], 96),
    ]),
    "a state without logits leaves one token to read": (20, [
        ([A[:96], B[1][:5]], 0), ([A[:96], B[2][:5]], 96), ([A[:96]], 0), ([A[:96]], 96),
    ]),
    "what two prompts share is known to the third": (9, [
        ([B[0], B[1][:40]], 0), ([B[0], B[2][:40]], 0), ([B[0], B[3][:40]], 48),
    ]),
    "a long text with another end is known up to its last whole piece": (9, [
        ([BOOK, B[1][:4]], 0), ([BOOK[:-2], B[2][:9]], 992),
    ]),
    "least recently used states go first": (2, [
        ([SHORT[0]], 0), ([SHORT[1]], 0), ([SHORT[0]], 9), ([SHORT[2]], 0), ([SHORT[2]], 9), ([SHORT[0]], 9),
        ([SHORT[1]], 0),
    ]),
}  # fmt: skip
"""Prompts that are read after one another, with the number of tokens that a cache of some states knows."""


@pytest.mark.parametrize("case", READ)
def test_what_is_kept(model: gecko.Gecko, case: str) -> None:
    states, prompts = READ[case]
    notes = Notes(model, states)
    assert [notes.read(torch.cat(parts)) for parts, _ in prompts] == [known for _, known in prompts]


def test_a_beginning_is_known_by_all_of_its_tokens(model: gecko.Gecko) -> None:
    notes = Notes(model, 9)
    notes.read(A)
    for place in (0, 50, 95):
        other = A.clone()
        other[place] += 1
        assert notes.read(other) <= place


def test_a_state_larger_than_the_budget_is_not_kept(model: gecko.Gecko) -> None:
    cache = PrefixCache(model.empty_state().num_bytes - 1)
    cache.keep((b"key", b""), model.empty_state())
    assert cache.bytes == 0
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(0)


def test_what_is_kept_holds_on_to_no_larger_tensors(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=1, prefix_cache=PrefixCache(1 << 24), piece=16)
    texts_of(engine, [drawn_tokens(90)])
    (entry, *_) = engine._cache._entries.values()
    for name, tensor in entry.state.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def texts_of(engine: Engine, prompts: list[Tensor], sampling: Sampling | None = None) -> list[list[Any]]:
    ids, log = run(engine, *[Request(prompt, 6, sampling or Sampling(0.9), 5, logprobs=0) for prompt in prompts])
    return [[(event.token, event.logprob) for event in log.tokens[request_id]] for request_id in ids]


SHARED = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(0, 20)), min_size=1, max_size=8)


@settings(max_examples=6)
@given(prompts=SHARED, rows=st.integers(1, 3), piece=st.sampled_from([5, 16, None]), states=st.integers(1, 8))
def test_a_hit_changes_no_token(
    model: gecko.Gecko, prompts: list[tuple[int, int, int]], rows: int, piece: int | None, states: int
) -> None:
    texts = [torch.cat([drawn_tokens(length, seed), drawn_tokens(more, 9)]) for seed, length, more in prompts]
    cache = PrefixCache(states * model.empty_state().num_bytes)
    cached, plain = Engine(model, rows=rows, piece=piece, prefix_cache=cache), Engine(model, rows=rows, piece=piece)
    # The penalty also depends on the tokens that were not read again.
    for sampling in (Sampling(0.9), Sampling(0.9, repetition_penalty=1.3)):
        for found, expected in zip(texts_of(cached, texts, sampling), texts_of(plain, texts, sampling), strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [chance for _, chance in found] == pytest.approx([chance for _, chance in expected], abs=1e-4)
    total = 2 * sum(len(prompt) for prompt in texts)
    for engine in (cached, plain):
        assert engine.prompt_tokens_read + engine.prefix_tokens_reused == total
    assert cache.hits + cache.misses <= 2 * len(texts)


def test_other_states_and_weights_know_nothing(model: gecko.Gecko) -> None:
    changed = gecko.Gecko(model.config)
    engine = Engine(changed, rows=1, prefix_cache=PrefixCache(1 << 24))
    texts_of(engine, [drawn_tokens(50)])
    book = gecko.generate(changed, drawn_tokens(30, 3), max_new_tokens=0).state
    run(engine, Request(drawn_tokens(50), 1, Sampling(0.0), 0, state=book))
    with torch.no_grad():
        changed.head.weight.add_(1)
    texts_of(engine, [drawn_tokens(50)])
    assert engine.prefix_tokens_reused == 0


# ---- A prompt that several requests share is read once, and does not change their results.


def test_choices_of_one_prompt_read_it_once(model: gecko.Gecko) -> None:
    """One request is cancelled meanwhile, one wants no new tokens, and one arrives when half of the prompt is read."""
    state = gecko.generate(model, text(21), max_new_tokens=0).state
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
        assert log.ends[request_id] == Finished(request_id, "length", None, 21 + 90 + asked.max_new_tokens)


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
