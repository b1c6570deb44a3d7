"""Invalid requests are refused with a reason, and do not affect other requests."""

import json
from dataclasses import fields
from typing import Any

import openai
import pytest
from serving.sites import JSON, OK, Site, check_error, head_of

from gecko.serving.chat_requests import ChatRequest
from gecko.serving.fields import is_required
from gecko.serving.limits import ApiError
from gecko.serving.protocol import CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": [None, [], [[]], ["a", 1], [1.5], [True], [[[1]]], {"text": "a"}],
    "max_tokens": [0, -5, "5", 5.5, True],
    "n": [0, 129],
    "temperature": [-1, "hot", float("nan"), float("inf")],
    "top_p": [-0.5, 1.5],
    "top_k": [-2],
    "min_p": [-0.5],
    "repetition_penalty": [0, 1e-308, 1e308],
    "seed": ["x", -1, 1 << 64, 10**400, True, 1.0, 1e400],
    "logit_bias": [{"1": 5, "01": -100}, {"１": 5}, {"a": 1}, {"1": 101}, {"1": "x"}, [1]],
    "stop": ["", ["a", ""], 5, ["a"] * 17, "a" * 1001],
    "stop_token_ids": [5, [1.5], ["a"], [264], [10**40], [1] * 129],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5, "much"],
    "logprobs": [21, True],
    "modalities": [["text", "audio"]],
    **{name: [value] for name, value in (
        ("stream", 1), ("suffix", "the end"), ("best_of", 3), ("min_tokens", -1), ("ignore_eos", 1), ("state", 5),
        ("tool_choice", "required"), ("reasoning_effort", "high"), ("qqq", 1),
    )},
}  # fmt: skip
"""Values that are refused with the name of their field."""

ONLY_ENDS = {str(token): -100 for token in range(264) if token not in (97, 256)}
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, name) for name, values in BAD_VALUES.items() for value in values],
    *[({"prompt": prompt}, "0..263") for prompt in ([-1], [264], [10**30], [[1], [2, 264]])],
    ({"prompt": "\ud800"}, "surrogate"),
    ({"prompt": "a" * 50_001}, "50,000"),
    ({"prompt": ["a"] * 100, "n": 2}, "prompts × n"),
    ({"prompt": ["a"] * 100}, "44"),
    ({"max_tokens": 4097}, "4096"),
    ({"seed": (1 << 64) - 2, "n": 3}, "seed + n"),
    ({"logit_bias": dict.fromkeys(map(str, range(264)), -100)}, "logit_bias must leave a token"),
    ({"structured_outputs": {"choice": ["ab"]}, "logit_bias": {"97": -100}}, "no token"),
    *[({"structured_outputs": {"regex": "ab"}, "stop_token_ids": [stop], "top_p": 0.9}, "stop") for stop in (97, 98)],
    ({"min_tokens": 1, "stop_token_ids": [97], "logit_bias": ONLY_ENDS}, "stop_tokens and logit_bias"),
    ({"logit_bias": {"264": 1}}, "264"),
    ({"stream_options": {"include_usage": "yes"}}, "include_usage"),
    ({"stream_options": {"include_usgae": True}}, "stream_options.include_usgae: unknown field"),
    ({"stream_options": {"include_usgae": 0}}, "stream_options.include_usgae: unknown field"),
    ({"min_tokens": 4}, "min_tokens must be at most max_tokens, 3; got 4"),
    ({"max_tokens": None, "min_tokens": 17}, "min_tokens"),
    ({"stop_token_ids": [3, -1]}, "stop_token_ids: token ids must be in 0..263; got -1"),
    ({"prompt": "a" * 40_000, "echo": True, "logprobs": 1, "n": 2}, "65,536 ids"),
    ({"prompt": "a" * 30_000, "echo": True, "logprobs": 20}, "bytes of memory"),
    ({"return_token_ids": True}, "return_token_ids is not supported: /tokenize"),
    ({"return_prompt_ids": True}, "return_prompt_ids: unknown field"),
    ({"temprature": 0.5}, "temperature"),
    ({"q" * 100_000: 1}, "unknown field"),
    ({"q\ud800": 1}, r"q\ud800"),
    ({"guided_regex": "a"}, "structured_outputs"),
    ({"structured_outputs": {}}, "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "at least one character"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex: "),
    ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs must"),
    ({"state": "book"}, "book"),
    ({"state": "../book"}, "../book"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5] * 20_000}, "messages"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages.0.nmae"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages.0.name"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 5000}, "4096"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"prompt": "abc"}, "prompt"),
]


def test_an_error_may_quote_what_is_no_unicode() -> None:
    error = ApiError(400, "got \ud800", param="\ud800")
    assert json.loads(error.response().body)["error"] == {
        "message": r"got \ud800", "type": "invalid_request_error", "param": r"\ud800", "code": None
    }  # fmt: skip


NAMED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n",
    "max_tokens", "min_tokens", "stop_token_ids", "stop", "seed", "stream", "ignore_eos", "suffix", "best_of",
    "tool_choice", "modalities", "reasoning_effort", "guided_regex", "messages",
)  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_with_a_reason(site: Site, stream: bool) -> None:
    for path, good, bad in (("/v1/completions", OK, BAD_COMPLETIONS), ("/v1/chat/completions", CHAT, BAD_CHATS)):
        for change, told in bad:
            content = json.dumps({"stream": stream, **good, **change}).encode()
            response = site.post(path, content=content, headers=JSON)
            status = 404 if "state" in change and isinstance(change["state"], str) else 400
            check_error(response, status, told)
            if len(change) == 1 and (name := next(iter(change))) in NAMED:
                assert response.json()["error"]["param"].split(".")[0] == name
        assert site.post(path, json=good).status_code == 200


def test_null_is_as_good_as_nothing(site: Site) -> None:
    """In every optional field: some clients send all fields."""
    optional = {field.name for field in fields(CompletionRequest) if not is_required(field)}
    chat = {field.name for field in fields(ChatRequest) if not is_required(field)}
    whole = site.post(json={**OK, **dict.fromkeys(optional - OK.keys())})
    assert (whole.status_code, len(whole.json()["choices"])) == (200, 1), whole.text
    assert site.post("/v1/chat/completions", json={**CHAT, **dict.fromkeys(chat - CHAT.keys())}).status_code == 200
    others = dict.fromkeys(["tools", "response_format", "reasoning_effort", "temprature", "anything"])
    for path, good in (("/v1/completions", OK), ("/v1/chat/completions", CHAT)):
        assert site.post(path, json={**good, **others}).status_code == 200
        check_error(site.post(path, json={**good, **others, "qqq": 1}), 400, "qqq: unknown field")
    streamed = site.post(json={**OK, "stream": True, "stream_options": {"include_usage": None}})
    assert (streamed.status_code, "usage" in streamed.text) == (200, False), streamed.text


MALFORMED = [
    b"", b"{", b'{"prompt": "abc"', b"nonsense", b"[]", b'"abc"', b"null", b"1", b"\xff\xfe", b'{"prompt": "\xff"}',
    b"[" * 100_000, b'{"prompt":' * 10_000, b"9" * 10_000, b'{"prompt": [' + b"9" * 5_000 + b"]}",
]  # fmt: skip


def test_malformed_bodies_get_400(site: Site) -> None:
    for content in MALFORMED:
        for path in ("/v1/completions", "/v1/chat/completions"):
            check_error(site.post(path, content=content, headers=JSON), 400, "")


def test_forms_that_a_browser_may_send_from_anywhere_are_refused(site: Site) -> None:
    check_error(site.post(content=json.dumps(OK), headers={"Content-Type": "text/plain"}), 400, "application/json")


def test_other_addresses_and_methods(site: Site) -> None:
    check_error(site.post("/v1/complete", json=OK), 404, "/v1/complete")
    check_error(site.get("/v1/completions"), 405, "GET")


def test_bodies_that_are_too_large_get_413(site: Site) -> None:
    check_error(site.post(json={"prompt": "a" * 300_000}), 413, "200,000")
    check_error(site.post(content=(b"a" * 1000 for _ in range(300))), 413, "200,000")
    assert site.post(json=OK).status_code == 200


def test_bodies_that_never_end_get_408(hasty: Site) -> None:
    with hasty.connect() as connection:
        connection.sendall(head_of("Authorization: Bearer secret\r\nContent-Length: 100") + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_the_key(keyed: Site) -> None:
    asked = {"/v1/completions": OK, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
    for path, good in asked.items():
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert keyed.post(path, json=good, headers={"Authorization": f"{scheme} secret"}).status_code == 200
    for key in (None, "Bearer wrong", "Bearer Secret", "secret", "Bearer é"):
        headers = {} if key is None else {"Authorization": key.encode("latin-1")}
        for path in (*asked, "/v1/models", "/v1/nothing"):
            check_error(keyed.post(path, json=asked.get(path, OK), headers=headers), 401, "API key")
    for path in ("/", "/health", "/metrics", "/version"):
        assert keyed.get(path).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        keyed.openai.models.list()
