"""The server, tested with OpenAI's client."""

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving.conftest import StartServer
from serving.sites import GREEDY, OK, Site, alone, check_error, document, greedy, serving
from serving.waiting import until

import gecko
from gecko.data import Tokenizer
from gecko.serving.chat_requests import ChatRequest, DetokenizeRequest, ResponseRequest, TokenizeRequest
from gecko.serving.fields import is_required
from gecko.serving.options import Limits
from gecko.serving.protocol import CompletionRequest, SaveState
from gecko.serving.stores import SavedStates


def test_a_completion_is_what_generate_writes(site: Site, model: gecko.Gecko) -> None:
    answer = site.openai.completions.create(prompt="abc", max_tokens=30, **GREEDY)
    assert answer.choices[0].text == greedy(model, "abc", 30)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "small", "length")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 30, 34)
    assert usage.state_bytes == model.empty_state().num_bytes
    assert answer.choices[0].position == 34


def test_every_form_of_a_prompt(site: Site, model: gecko.Gecko) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = site.openai.completions.create(prompt=prompt, max_tokens=9, **GREEDY, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    one, two = (greedy(model, text, 9) for text in ("abc", "xyz ü"))
    assert texts("abc") == texts(["abc"]) == texts(document("abc")) == texts([document("abc")]) == [one]
    assert texts(["abc", "xyz ü"]) == texts([document("abc"), document("xyz ü")]) == [one, two]
    assert texts(["abc", "xyz ü"], n=2) == [one, one, two, two]
    assert texts("") == [alone(model, [256], 9, temperature=0)]
    assert texts([256, 256]) == [alone(model, [256, 256], 9, temperature=0)]
    assert texts(["abc", "xyz ü"], echo=True) == ["abc" + one, "xyz ü" + two]
    assert texts(document("abc"), echo=True) == ["abc" + one]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([4], " the"), ([0, 4], " the"), ([4, 0], " the"), ("the", " the"), ([0], "the"), ([0, 0], "the"), ("", "the")],
)
def test_a_word_keeps_its_space_where_text_stands_before_it(
    model: gecko.Gecko, spaced: Tokenizer, tmp_path: Path, prompt: Any, expected: str
) -> None:
    """The result equals that of decoding prompt and new text together."""
    with serving(model, spaced, tmp_path) as site:
        choice = site.post(json={"prompt": prompt, "max_tokens": 1, "logit_bias": {"5": 100}}).json()["choices"][0]
    assert choice["text"] == expected


def test_choices_are_drawn_with_seeds_of_their_own(site: Site, model: gecko.Gecko) -> None:
    asked = {"prompt": "abc", "max_tokens": 20, "model": "small", "seed": 5, "temperature": 0.9, "top_p": 0.9}
    answer = site.openai.completions.create(n=3, extra_body={"top_k": 20}, **asked)
    expected = [alone(model, document("abc"), 20, seed=5 + i, temperature=0.9, top_p=0.9, top_k=20) for i in range(3)]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 3


def test_sampling_fields_reach_the_model(site: Site) -> None:
    def write(**options: Any) -> str:
        return site.openai.completions.create(prompt="abc", max_tokens=20, **{**GREEDY, **options}).choices[0].text

    assert write(logit_bias={"81": 100}) == "Q" * 20
    assert write(temperature=1.0, seed=1, extra_body={"top_k": 1}) == write()
    assert write(temperature=1.0, seed=1, extra_body={"min_p": 1.0}) == write()
    assert write(temperature=1.0, seed=1) == write(temperature=1.0, seed=1) != write(temperature=1.0, seed=2)
    assert len(set(write(extra_body={"repetition_penalty": 100.0}))) > len(set(write()))
    assert write(presence_penalty=0, frequency_penalty=0.0, best_of=1, suffix="", user="me") == write()


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 2**63}, {"top_k": 10**400}, {"temperature": 5e-324}, {"temperature": 10**400}, {"top_p": 5e-324},
        {"seed": 10**400}, {"repetition_penalty": 10**400}, {"repetition_penalty": 0.01, "logit_bias": {"97": 100}},
    ],
    ids=range(8),
)  # fmt: skip
def test_no_number_of_one_client_ends_anothers_request(site: Site, extreme: dict[str, Any]) -> None:
    with site.openai.completions.create(prompt="abc", max_tokens=60, stream=True, **GREEDY) as stream:
        next(iter(stream))
        asked = {"prompt": "abc", "max_tokens": 3, "temperature": 1.0, **extreme}
        assert site.post(json=asked).status_code in (200, 400)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert httpx2.get(f"{site.url}/health").status_code == 200


def test_stop_strings(site: Site) -> None:
    whole = site.openai.completions.create(prompt="abc", max_tokens=40, **GREEDY).choices[0].text
    stop = whole[20:23]
    for stops in (stop, ["@@", stop]):
        choice = site.openai.completions.create(prompt="abc", max_tokens=40, stop=stops, **GREEDY).choices[0]
        assert (choice.text, choice.finish_reason) == (whole.partition(stop)[0], "stop")


def test_log_probabilities(site: Site, model: gecko.Gecko) -> None:
    answer = site.openai.completions.create(prompt="abc", max_tokens=5, logprobs=3, **GREEDY)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None and told.token_logprobs is not None and told.top_logprobs is not None
    assert "".join(told.tokens) == answer.choices[0].text
    assert told.text_offset == [0, 1, 2, 3, 4]
    for token, value, top_logprobs in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert len(top_logprobs) == 3
        assert top_logprobs[token] == value == max(top_logprobs.values())
    ids = [256, *b"abc", *answer.choices[0].text.encode()]
    logits, _ = model(gecko.models.gecko.torch.tensor([ids[:-1]]))
    expected = logits[0, 3:].log_softmax(-1).amax(-1).tolist()
    assert told.token_logprobs == pytest.approx(expected, abs=1e-5)
    none = site.openai.completions.create(prompt="abc", max_tokens=5, **GREEDY)
    assert none.choices[0].logprobs is None


def test_a_stream_joins_to_the_whole(site: Site, model: gecko.Gecko) -> None:
    asked = {"prompt": ["abc", "xyz"], "max_tokens": 25, "logprobs": 1, **GREEDY}
    whole = site.openai.completions.create(**asked)
    chunks = list(site.openai.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == whole.choices[index].text
        tokens = [token for choice in mine if choice.logprobs for token in choice.logprobs.tokens]
        assert tokens == whole.choices[index].logprobs.tokens
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].position == 29
        assert len(mine) > 20
    chunks = list(site.openai.completions.create(stream=True, **asked))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    chunks = list(site.openai.completions.create(prompt="abc", echo=True, stream=True, max_tokens=5, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc" + greedy(model, "abc", 5)


def test_chat(site: Site, model: gecko.Gecko) -> None:
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    expected = greedy(model, "System: Be short.\n\nUser: Hello\n\nAssistant:", 20)
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, **GREEDY}
    answer = site.openai.chat.completions.create(**asked)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    told = choice.logprobs.content
    assert "".join(token.token for token in told) == expected
    assert all(len(token.top_logprobs) == 2 and bytes(token.bytes).decode() == token.token for token in told)
    chunks = list(site.openai.chat.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"
    short = site.openai.chat.completions.create(messages=messages, max_completion_tokens=3, **GREEDY)
    assert short.choices[0].message.content == expected[:3]


def test_an_answer_may_be_sent_back(site: Site) -> None:
    """OpenAI's client writes it with empty fields."""
    question: Any = {"role": "user", "content": "Hi", "name": "me"}
    first = site.openai.chat.completions.create(messages=[question], max_tokens=3, **GREEDY).choices[0].message
    said: Any = {**first.model_dump(), "annotations": []}
    assert {"refusal", "tool_calls", "function_call", "audio"} < said.keys()
    options: Any = {"include_usage": True, "include_obfuscation": False}
    asked: dict[str, Any] = {"messages": [question, said, question], "max_tokens": 3, **GREEDY}
    assert list(site.openai.chat.completions.create(stream=True, stream_options=options, **asked))[-1].usage


def test_the_answer_ends_where_the_user_would_speak(site: Site) -> None:
    bias = {"10": 100}  # line breaks only
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": bias, **GREEDY}
    assert site.openai.chat.completions.create(max_tokens=5, **asked).choices[0].message.content == "\n" * 5


def test_models(site: Site, model: gecko.Gecko) -> None:
    (found,) = site.openai.models.list()
    assert (found.id, found.object, found.state_bytes) == ("small", "model", model.empty_state().num_bytes)
    assert not found.chat_template
    assert site.openai.models.retrieve("small") == found
    with pytest.raises(openai.NotFoundError):
        site.openai.models.retrieve("large")


def test_health_and_page(site: Site) -> None:
    assert httpx2.get(f"{site.url}/health").json() == {"status": "ok"}
    page = httpx2.get(site.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


BODIES: dict[str, Any] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponseRequest,
    "/v1/states": SaveState, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
OTHERS = {
    "/v1/responses/{response_id}": {"get", "delete"}, "/v1/states/{name}": {"get", "delete"}, "/v1/models": {"get"},
    "/v1/models/{name}": {"get"}, "/health": {"get"}, "/version": {"get"}, "/metrics": {"get"},
}  # fmt: skip


def test_the_document_describes_all_routes_and_fields(site: Site) -> None:
    answer = httpx2.get(f"{site.url}/openapi.json")
    document = answer.json()
    schemas, posts = document["components"]["schemas"], {path: {"post"} for path in BODIES}
    expected = {**posts, "/v1/states": {"get", "post"}, **OTHERS}
    assert {path: set(methods) for path, methods in document["paths"].items()} == expected
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) == schemas.keys()
    for path, kind in BODIES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert content == {"$ref": f"#/components/schemas/{kind.__name__}"}
        described = schemas[kind.__name__]
        assert described["properties"].keys() == {field.name for field in fields(kind)}
        assert described["required"] == [field.name for field in fields(kind) if is_required(field)]
    completion = schemas["CompletionRequest"]["properties"]
    number = {"type": "integer", "minimum": 1, "maximum": 128, "title": "N", "default": 1}
    assert completion["n"] == number
    assert completion["stop"]["anyOf"] == [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    assert "before which" in completion["min_tokens"]["description"]


def test_metrics_count(site: Site) -> None:
    site.wait_until_idle()
    before = site.numbers()
    site.openai.completions.create(prompt="uvw", max_tokens=7, **GREEDY)
    site.post(content=b"{")
    after = site.numbers()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("gecko_prompt_tokens_total") + grown("gecko_prefix_tokens_reused_total") == 4
    assert grown("gecko_prompt_tokens_total") >= 3, "no other test sent this text"
    assert grown("gecko_generated_tokens_total") == 7
    assert grown('gecko_continuations_total{reason="length"}') == 1
    assert grown('gecko_responses_total{status="400"}') == 1
    assert grown("gecko_time_to_first_token_seconds_count") == 1
    assert grown("gecko_time_between_tokens_seconds_count") == 6


def test_a_known_beginning_is_not_read_again(site: Site) -> None:
    prompt = "a long beginning that many questions share, " * 20
    first = site.openai.completions.create(prompt=prompt + "one", max_tokens=9, **GREEDY)
    before = site.numbers()["gecko_prefix_tokens_reused_total"]
    again = site.openai.completions.create(prompt=prompt + "one", max_tokens=9, **GREEDY)
    assert again.choices[0].text == first.choices[0].text
    assert site.numbers()["gecko_prefix_tokens_reused_total"] - before > 500


def test_the_model_must_be_the_one_that_is_there(site: Site) -> None:
    with pytest.raises(openai.NotFoundError, match="'small'") as caught:
        site.openai.completions.create(model="large", prompt="abc")
    assert caught.value.code == "model_not_found"


def test_a_request_that_takes_too_long_ends_with_what_there_is(start: StartServer) -> None:
    site = start(limits=Limits(rows=1, queue=5, seconds=0.5, new_tokens=100_000))
    running = site.openai.completions.create(prompt="abc", max_tokens=100_000, **GREEDY)
    assert running.choices[0].finish_reason == "length"
    assert 0 < running.usage.completion_tokens < 100_000
    site.wait_until_idle()
    assert site.numbers()['gecko_continuations_total{reason="time"}'] == 1


def test_no_token_within_the_time_is_504(start: StartServer) -> None:
    site = start(limits=Limits(rows=1, queue=5, seconds=1e-4))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            site.openai.completions.create(prompt="a" * 5000, stream=stream, **GREEDY)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
    site.wait_until_idle()


def test_saved_states(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    site = start(states=tmp_path)
    book = gecko.generate(model, document("once upon a time " * 30), max_new_tokens=0).state
    book.save(tmp_path / "book.state")
    (found,) = site.openai.models.list()
    assert found.states == ["book"]
    for prompt in (" and", list(b" and")):
        answer = site.openai.completions.create(prompt=prompt, max_tokens=12, extra_body={"state": "book"}, **GREEDY)
        assert answer.choices[0].text == alone(model, list(b" and"), 12, temperature=0, state=book)
        assert answer.choices[0].position == book.position[0] + 4 + 12
    question: Any = [{"role": "user", "content": "Who?"}]
    chat = site.openai.chat.completions.create(messages=question, max_tokens=12, extra_body={"state": "book"}, **GREEDY)
    expected = alone(model, list(b"User: Who?\n\nAssistant:"), 12, temperature=0, state=book)
    assert chat.choices[0].message.content == expected
    check_error(site.post(json={**OK, "state": "book", "prompt": ""}), 400, "tokens")
    gecko.generate(model, document("another"), max_new_tokens=0).state.save(tmp_path / "book.state")
    replaced = site.openai.completions.create(prompt=" and", max_tokens=12, extra_body={"state": "book"}, **GREEDY)
    assert replaced.choices[0].text == greedy(model, "another and", 12)


def test_a_replaced_state_is_read_anew_whatever_its_date(model: gecko.Gecko, tmp_path: Path) -> None:
    """All states of a model have the same size, and a copy may keep the modification time of the original."""
    states = SavedStates(tmp_path)
    for prompt in ("one", "another"):
        gecko.generate(model, document(prompt), max_new_tokens=0).state.save(tmp_path / "book.state")
        os.utime(tmp_path / "book.state", (1e9, 1e9))
        assert states.load("book").position == [len(document(prompt))]


def test_states_outside_of_the_folder_are_out_of_reach(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    site = start(states=tmp_path / "states")
    gecko.generate(model, document("secret"), max_new_tokens=0).state.save(tmp_path / "outside.state")
    for name in ("../outside", str(tmp_path / "outside"), "..", "", "a/../../outside"):
        check_error(site.post(json={**OK, "state": name}), 404, "there is no state")


def test_states_that_cannot_be_used(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    site = start(states=tmp_path)
    state = gecko.generate(model, document("abc"), max_new_tokens=0).state
    state.save(tmp_path / "damaged.state")
    content = bytearray((tmp_path / "damaged.state").read_bytes())
    content[-5] ^= 1
    (tmp_path / "damaged.state").write_bytes(content)
    (tmp_path / "short.state").write_bytes(content[:100])
    (tmp_path / "text.state").write_text("once upon a time")
    (tmp_path / "empty.state").write_bytes(b"")
    gecko.Gecko(gecko.GeckoConfig.preset("tiny")).empty_state().save(tmp_path / "other-config.state")
    gecko.Gecko(model.config).empty_state().save(tmp_path / "other-weights.state")
    state.rows([0, 0]).save(tmp_path / "two-rows.state")
    for path in sorted(tmp_path.glob("*.state")):
        response = site.post(json={**OK, "state": path.stem})
        check_error(response, 400, "")
        assert str(tmp_path) not in response.text
    check_error(site.post(json={**OK, "state": "gone"}), 404, "gone")
    check_error(site.post(json={**OK, "state": "x" * 5000}), 404, "xxx")
    assert site.post(json=OK).status_code == 200


def test_texts_are_cut_where_characters_end(site: Site, tokenizer: Tokenizer) -> None:
    """Bytes of an incomplete character become one U+FFFD, at the end."""
    asked = {"prompt": "abc", "max_tokens": 1, "logit_bias": {"226": 100}, "logprobs": 1, **GREEDY}
    chunk, _ = site.openai.completions.create(stream=True, **asked)
    assert chunk.choices[0].text == "\ufffd"
    assert chunk.choices[0].logprobs.tokens == ["token_id:226"]


def test_the_server_stays_well(site: Site) -> None:
    """Runs last: the requests of the tests above have left no trace."""
    site.wait_until_idle()
    assert httpx2.get(f"{site.url}/health").status_code == 200
    until(lambda: site.numbers()["gecko_rows_active"] == 0)
