"""Tokens over HTTP: ids, log-probabilities and pieces of text."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving.conftest import StartServer
from serving.sites import JSON, OK, Site, alone, check_error, distributions, document, until

import gecko
from gecko.data import Tokenizer, load_tokenizer
from gecko.inference.request import Request, Token
from gecko.inference.text import ChoiceText, Piece, TokenNames
from gecko.serving.options import Limits
from gecko.serving.replies import ChatReply, CompletionReply, Usage, encode_answer

# ---- ``/tokenize`` and ``/detokenize`` answer in vLLM's form, with the ids that a generation reads.

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def tokenize(site: Site, **asked: Any) -> dict[str, Any]:
    response = site.post("/tokenize", json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_ids_of_a_text(site: Site) -> None:
    for text in ("", "abc", "é\n🎉 \0", "a" * 40_000):
        ids = document(text)
        expected = {"count": len(ids), "max_model_len": 50_000, "tokens": ids, "token_strs": None}
        assert tokenize(site, prompt=text) == expected
        bare = tokenize(site, prompt=text, add_special_tokens=False, model="small", messages=None)
        assert (bare["count"], bare["tokens"]) == (len(ids) - 1, ids[1:])
        for sent in (ids, ids[1:]):
            answer = site.post("/detokenize", json={"tokens": sent, "model": "small"})
            assert (answer.status_code, answer.json()) == (200, {"prompt": text})


def test_words_and_parts_of_words_have_names_and_places(shared: StartServer, spaced: Tokenizer) -> None:
    """The space before a word is part of its name, also at the beginning of a text."""
    words = shared(tokenizer=spaced)
    found = tokenize(words, prompt="the athe", return_token_strs=True)
    assert words.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the athe"}
    assert found["tokens"][0] == 0 and len(found["tokens"]) == found["count"]
    assert "".join(found["token_strs"][1:]) == " the athe"
    asked = {"prompt": "the the", "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {"5": 100}}
    choice = words.post(json=asked).json()["choices"][0]
    assert choice["text"] == "the the the"
    assert choice["logprobs"]["tokens"] == ["token_id:0", " the", " the", " the"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 7]
    names = TokenNames(spaced)
    assert [names.name(token) for token in spaced.encode("athe").tolist()[-1:]] == ["the"]


def test_ids_of_a_conversation_are_those_that_are_read(site: Site) -> None:
    found = tokenize(site, messages=MESSAGES, add_generation_prompt=True, continue_final_message=False, tools=None)
    assert found["tokens"] == document("System: Be short.\n\nUser: Hi\n\nAssistant:")
    asked = {"messages": MESSAGES, "max_tokens": 1}
    assert site.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == found["count"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "a prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "a prompt or messages"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
    ("/tokenize", {"prompt": "a" * 50_001}, "50,000"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [5, -1]}, "0..263"),
    ("/detokenize", {"tokens": [264]}, "0..263"),
    ("/detokenize", {"tokens": [10**30]}, "0..263"),
    ("/detokenize", {"tokens": [1] * 65_537}, "65,536"),
]


def test_bad_requests_are_refused(site: Site) -> None:
    for path, asked, told in BAD:
        check_error(site.post(path, content=json.dumps(asked).encode(), headers=JSON), 400, told)
    for path, good in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        check_error(site.post(path, json={**good, "model": "large"}), 404, "'small'")
        check_error(site.post(path, content=b"{", headers=JSON), 400, "JSON")
        check_error(site.post(path, json={"prompt": "a" * 300_000}), 413, "200,000")
        assert site.post(path, json=good).status_code == 200
    until(lambda: site.service.memory.taken == 0)


def test_an_answer_that_is_too_large_for_the_memory_is_refused(start: StartServer) -> None:
    site = start(limits=Limits(body_bytes=20_000, memory_bytes=40_000))
    check_error(site.post("/tokenize", json={"prompt": "z" * 15_000}), 400, "bytes of memory")
    until(lambda: site.service.memory.taken == 0)


# ---- ``echo`` with ``logprobs``: the log-probabilities of prompts are the model's, in OpenAI's form.

TEXTS = ["abc", "xyz ü, and more", "a" * 90]


def echoed(site: Site, **asked: Any) -> list[dict[str, Any]]:
    """Return the choices, and assert that those of a stream join to the same."""
    asked = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 0, **asked}
    choices = site.post(json=asked).json()["choices"]
    stream = site.openai.completions.create(model="small", stream=True, **asked)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        (part,) = chunk.model_dump()["choices"]
        known = joined.setdefault(part["index"], {**part, "text": "", "logprobs": {name: [] for name in LISTS}})
        known["text"] += part["text"]
        for name in LISTS:
            known["logprobs"][name] += (part["logprobs"] or {}).get(name, [])
        known.update(finish_reason=part["finish_reason"], position=part["position"])
    assert [joined[index] for index in range(len(choices))] == choices
    return choices


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("new", [0, 1, 7])
def test_the_prompt_has_the_models_log_probabilities(site: Site, model: gecko.Gecko, new: int) -> None:
    """Every prompt of a batch, whatever the others are; and after it the tokens of the answer."""
    prompts = [document(text) for text in TEXTS]
    for choice, ids, text in zip(echoed(site, prompt=prompts, max_tokens=new), prompts, TEXTS, strict=True):
        written = alone(model, ids, new, temperature=0)
        assert choice["text"] == text + written
        assert (choice["finish_reason"], choice["position"]) == ("length", len(ids) + new)
        told, every = choice["logprobs"], [*ids, *written.encode()]
        chances = distributions(model, every[:-1] if new else every)
        assert [len(told[name]) for name in LISTS] == [len(every)] * 4
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        own = chances[range(len(every) - 1), every[1:]]
        assert told["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
        for row, top, value in zip(chances, told["top_logprobs"][1:], told["token_logprobs"][1:], strict=False):
            assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
            assert value <= max(top.values())
        # Clients tell greedy continuations by this.
        best = [max(top.values()) for top in told["top_logprobs"][1:]]
        greedy = [value == most for value, most in zip(told["token_logprobs"][1:], best, strict=True)]
        assert greedy == (chances[: len(best)].argmax(-1) == torch.tensor(every[1:])).tolist()
        whole = (text + written).encode()
        for token, offset in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
            assert token.startswith("token_id:") or (text + written)[offset] == token
        assert bytes(every[1:]) == whole


def test_texts_ids_and_choices_get_the_same(site: Site) -> None:
    (one,) = echoed(site, prompt="xyz")
    assert echoed(site, prompt=document("xyz"), n=3) == [{**one, "index": index} for index in range(3)]
    assert echoed(site, prompt=["abc", "xyz"])[1] == {**one, "index": 1}


def test_known_beginnings_and_long_prompts(site: Site, model: gecko.Gecko) -> None:
    """The whole prompt has log-probabilities, although the prefix cache knows it and its pieces are many."""
    ids = document("many words, " * 300)
    site.post(json={**OK, "prompt": ids})
    own = distributions(model, ids)[range(len(ids) - 1), ids[1:]]
    for _ in range(2):
        found = site.post(json={"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}).json()["choices"][0]
        assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
        assert found["logprobs"]["top_logprobs"] == [None] + [{}] * (len(ids) - 1)


def test_the_token_that_stops_has_an_entry_and_no_text(site: Site, model: gecko.Gecko) -> None:
    """Clients that score prompts drop the last entry, as the one after the prompt."""
    (choice,) = echoed(site, prompt="abc", max_tokens=1, logit_bias={"256": 100})
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert len(choice["logprobs"]["tokens"]) == 5
    expected = distributions(model, document("abc"))[-1, 256]
    assert choice["logprobs"]["tokens"][-1] == "token_id:256"
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(float(expected), abs=1e-4)
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "logit_bias": {"256": 100}}
    spoken = site.post("/v1/chat/completions", json={**asked, "max_tokens": 3}).json()["choices"][0]
    assert (spoken["message"]["content"], spoken["logprobs"]) == ("", {"content": []})


def test_after_a_state_the_first_token_has_none(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    site = start(states=tmp_path)
    gecko.generate(model, document("once"), max_new_tokens=0).state.save(tmp_path / "book.state")
    (choice,) = site.post(
        json={"prompt": " upon", "state": "book", "echo": True, "logprobs": 1, "max_tokens": 0}
    ).json()["choices"]
    own = distributions(model, document("once upon"))[range(4, 9), list(b" upon")][1:]
    assert choice["text"] == " upon" and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)


def test_nothing_to_write_needs_something_to_repeat(site: Site) -> None:
    check_error(site.post(json={**OK, "max_tokens": 0}), 400, "at least 1 without echo")
    whole = site.post(json={**OK, "max_tokens": 0, "echo": True}).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["logprobs"]) == ("abc", None)
    assert whole["usage"]["completion_tokens"] == 0
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    check_error(site.post("/v1/chat/completions", json=chat), 400, "max_tokens")


# ---- Tokens to pieces of text: for any division, the pieces join to the text before the stop string.

BYTES = load_tokenizer("bytes")
NAMES = TokenNames(BYTES)
ANY_TEXT = st.text(alphabet="aboé🎉 ", max_size=30)


def pieces_of(text: bytes, stops: list[str], *, logprobs: bool = False, least: int = 0, echo: str = "") -> list[Piece]:
    choice = ChoiceText(0, Request(torch.zeros(100), 100, min_new_tokens=least), BYTES, stops, echo=echo)
    pieces = []
    for number, byte in enumerate(text):
        told = (-float(number), ((byte, -float(number)),)) if logprobs else (None, ())
        if (piece := choice.push(Token(0, byte, *told))) is not None:
            pieces.append(piece)
        if choice.stopped:
            return pieces
    return [*pieces, choice.finish("length")]


@given(ANY_TEXT, st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3))
def test_pieces_join_to_the_text_before_the_stop(text: str, stops: list[str]) -> None:
    pieces = pieces_of(text.encode(), stops)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, minus = min(ends, default=(len(text), 0))
    assert "".join(piece.text for piece in pieces) == text[: end + minus]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop" if ends else "length"]
    assert all(piece.text for piece in pieces[:-1])
    assert pieces[-1].position == 100 + len(text[:end].encode())


@given(st.text(alphabet="ab", max_size=30), st.integers(0, 12))
def test_the_text_of_the_first_tokens_may_contain_a_stop_string(text: str, least: int) -> None:
    pieces = pieces_of(text.encode(), ["ab"], least=least, echo="é ab ")
    end = text.find("ab", least)
    assert "".join(piece.text for piece in pieces) == "é ab " + (text if end < 0 else text[:end])
    assert pieces[-1].finish_reason == ("length" if end < 0 else "stop")


@given(ANY_TEXT, st.sampled_from(["", "é b"]))
def test_every_token_is_told_once_and_in_place(text: str, echo: str) -> None:
    content = text.encode()
    tokens = [token for piece in pieces_of(content, ["zz"], logprobs=True, echo=echo) for token in piece.tokens]
    assert [token.logprob for token, _ in tokens] == [-float(number) for number in range(len(content))]
    for (token, offset), byte in zip(tokens, content, strict=True):
        assert NAMES.name(token.token) == (chr(byte) if byte < 128 else f"token_id:{byte}")
        assert byte >= 128 or (echo + text)[offset] == NAMES.text(token.token)


def test_log_probabilities_are_encoded_as_by_json() -> None:
    """Bytes of é have no text, and alternatives may be excluded, or end the document."""
    top = ((97, -0.5), (256, -2.0), (98, -math.inf))
    tokens = [(Token(0, byte, -math.inf, top), 0) for byte in 'ü"\0'.encode()]
    pieces = [Piece(index, 'ü"\0', (*tokens,) * 500**index, 4, "stop") for index in range(2)]
    for reply in (CompletionReply("small", NAMES), ChatReply("small", NAMES, scored=True)):
        for body in (*reply.events(pieces[0]), reply.whole(pieces, Usage(1, 2, 3))):
            assert encode_answer(body) == json.dumps(body, separators=(",", ":"), allow_nan=False)
    for told in body["choices"][0]["logprobs"]["content"][:2]:
        assert [(other["token"], other["bytes"]) for other in (told, *told["top_logprobs"][:2])] == [
            (told["token"], None), ("a", [97]), ("token_id:256", None)
        ]  # fmt: skip
