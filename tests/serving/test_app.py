"""The server, tested with OpenAI's client: what it answers is what the model writes."""

import re
from dataclasses import fields
from typing import Any

from serving.conftest import StartServer
from serving.sites import GREEDY, Site, alone, check_error, document, greedy

import gecko
from gecko.data import Tokenizer
from gecko.runtime.process import __version__
from gecko.serving.chat_requests import ChatRequest, DetokenizeRequest, ResponseRequest, TokenizeRequest
from gecko.serving.fields import is_required
from gecko.serving.options import Limits
from gecko.serving.protocol import CompletionRequest, SaveState


def test_every_form_of_a_prompt(site: Site, model: gecko.Gecko) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = site.openai.completions.create(prompt=prompt, max_tokens=9, **GREEDY, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "small", "length")
        return [choice.text for choice in answer.choices]

    one, two = (greedy(model, text, 9) for text in ("abc", "xyz ü"))
    assert texts("abc") == texts(["abc"]) == texts(document("abc")) == texts([document("abc")]) == [one]
    assert texts(["abc", "xyz ü"]) == texts([document("abc"), document("xyz ü")]) == [one, two]
    assert texts(["abc", "xyz ü"], n=2) == [one, one, two, two]
    assert texts("") == [alone(model, [256], 9, temperature=0)]
    assert texts([256, 256]) == [alone(model, [256, 256], 9, temperature=0)]
    assert texts(["abc", "xyz ü"], echo=True) == ["abc" + one, "xyz ü" + two]
    assert texts(document("abc"), echo=True) == ["abc" + one]


def test_a_word_keeps_its_space_where_text_stands_before_it(shared: StartServer, spaced: Tokenizer) -> None:
    """The result equals that of decoding prompt and new text together."""
    words = shared(tokenizer=spaced)
    for prompt, expected in (
        ([4], " the"), ([0, 4], " the"), ([4, 0], " the"), ("the", " the"), ([0], "the"), ([0, 0], "the"), ("", "the"),
    ):  # fmt: skip
        asked = {"prompt": prompt, "max_tokens": 1, "logit_bias": {"5": 100}}
        assert words.post(json=asked).json()["choices"][0]["text"] == expected, prompt


def test_no_number_of_one_client_ends_anothers_request(site: Site) -> None:
    with site.openai.completions.create(prompt="abc", max_tokens=400, stream=True, **GREEDY) as stream:
        next(iter(stream))
        for extreme in (
            {"top_k": 2**63}, {"top_k": 10**400}, {"temperature": 5e-324}, {"temperature": 10**400}, {"top_p": 5e-324},
            {"seed": 10**400}, {"repetition_penalty": 10**400},
            {"repetition_penalty": 0.01, "logit_bias": {"97": 100}},
        ):  # fmt: skip
            asked = {"prompt": "abc", "max_tokens": 3, "temperature": 1.0, **extreme}
            assert site.post(json=asked).status_code in (200, 400)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert site.get("/health").json() == {"status": "ok"}


def test_a_stream_joins_to_the_whole(site: Site, model: gecko.Gecko) -> None:
    asked = {"prompt": ["abc", "xyz"], "max_tokens": 25, "logprobs": 1, **GREEDY}
    whole = site.openai.completions.create(**asked)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (8, 50, 58)
    assert whole.usage.state_bytes == model.empty_state().num_bytes
    chunks = list(site.openai.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
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


def test_chat(site: Site, model: gecko.Gecko) -> None:
    """An answer may be sent back: OpenAI's client writes it with empty fields."""
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "me"},
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
    said: Any = {**choice.message.model_dump(), "annotations": []}
    assert {"refusal", "tool_calls", "function_call", "audio"} < said.keys()
    options: Any = {"include_usage": True, "include_obfuscation": False}
    again = {"messages": [*messages, said, messages[1]], "max_completion_tokens": 3, **GREEDY}
    *chunks, last = site.openai.chat.completions.create(stream=True, stream_options=options, **again)
    assert last.usage.completion_tokens == 3


def test_models_health_and_page(site: Site, model: gecko.Gecko) -> None:
    (found,) = site.openai.models.list()
    assert (found.id, found.object, found.state_bytes) == ("small", "model", model.empty_state().num_bytes)
    assert not found.chat_template
    assert site.openai.models.retrieve("small") == found
    check_error(site.get("/v1/models/large"), 404, "'small'")
    assert site.get("/version").json() == {"version": __version__}
    page = site.get("/")
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
    answer = site.get("/openapi.json")
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
    site.openai.completions.create(prompt="uvw", max_tokens=7, **GREEDY)
    assert site.numbers()["gecko_prefix_cache_hits_total"] > after["gecko_prefix_cache_hits_total"]


def test_a_request_that_takes_too_long_ends_with_what_there_is(start: StartServer) -> None:
    site = start(limits=Limits(rows=1, queue=5, seconds=0.5, new_tokens=100_000))
    running = site.openai.completions.create(prompt="abc", max_tokens=100_000, **GREEDY)
    assert running.choices[0].finish_reason == "length"
    assert 0 < running.usage.completion_tokens < 100_000
    # The first prompt has its tokens; the second one's log-probabilities are missing.
    asked = {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 0, "max_tokens": 100_000}
    check_error(site.post(json=asked), 504, "time limit")
    site.wait_until_idle()
    assert site.numbers()['gecko_continuations_total{reason="time"}'] == 1


def test_no_token_within_the_time_is_504(start: StartServer) -> None:
    site = start(limits=Limits(rows=1, queue=5, seconds=1e-4))
    for stream in (False, True):
        answer = site.post(json={"prompt": "a" * 5000, "stream": stream})
        check_error(answer, 504, "time limit")
        assert answer.json()["error"]["code"] == "timeout"
    site.wait_until_idle()
