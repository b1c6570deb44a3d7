"""A table of requests and answers, for fields and headers that clients of other servers send, and raw connections."""

import json
from typing import Any

import httpx2
import pytest
from serving.sites import JSON, OK, Site, alone, document, head_of

import gecko

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETION: {**OK, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0},
    RESPONSE: {"input": "Hi", "max_output_tokens": 3, "temperature": 0},
}
TOOL = {"type": "function", "function": {"name": "f"}}
EVERY: list[dict[str, Any]] = [
    {"top_k": 0}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1}, {"min_p": 0}, {"repetition_penalty": 1}, {"stop": []},
    {"tools": [], "tool_choice": "auto"}, {"logit_bias": {}},
    {"frequency_penalty": 0}, {"presence_penalty": 0}, {"min_tokens": 0}, {"stop_token_ids": []},
    {"ignore_eos": False}, {"stop": None}, {"seed": 0}, {"seed": (1 << 64) - 1}, {"user": "me"}, {"metadata": {}},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "me"},
    {"store": False}, {"service_tier": "auto"}, {"parallel_tool_calls": True}, {"structured_outputs": None},
]  # fmt: skip
COMPLETIONS_AND_CHATS: list[dict[str, Any]] = [
    {"n": 1}, {"modalities": ["text"]}, {"functions": [{"name": "f"}], "function_call": "none"},
    {"cache_control": {"type": "ephemeral"}}, {"reasoning_effort": "none"}, {"verbosity": "medium"}, {"best_of": 1},
    {"suffix": None}, {"stream_options": {"include_usage": False}}, {"stream_options": None},
    {"response_format": {"type": "text"}}, {"return_token_ids": False}, {"skip_special_tokens": True},
    {"include_stop_str_in_output": False}, {"use_beam_search": False}, {"length_penalty": 1.0}, {"bad_words": []},
    {"add_special_tokens": True}, {"allowed_token_ids": None}, {"prompt_logprobs": None}, {"priority": 0},
    {"detokenize": True}, {"include_reasoning": True},
]  # fmt: skip
CACHED = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    *[(path, fields) for path in GOOD for fields in EVERY],
    *[(path, fields) for path in (COMPLETION, CHAT) for fields in COMPLETIONS_AND_CHATS],
    *[(path, {"tools": [TOOL], "tool_choice": "none"}) for path in (COMPLETION, CHAT)],
    (RESPONSE, {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}),
    (COMPLETION, {"echo": False}),
    (CHAT, {"top_logprobs": 0}),
    (CHAT, {"top_logprobs": 0, "logprobs": False}),
    (CHAT, {"messages": [CACHED]}),
    (CHAT, {"messages": [{**GOOD[CHAT]["messages"][0], "cache_control": {"type": "ephemeral"}}]}),
    (CHAT, {"chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False}),
    (RESPONSE, {"top_logprobs": 0}),
    (RESPONSE, {"reasoning": {"effort": "none"}}),
    (RESPONSE, {"reasoning": {"effort": None, "summary": None}, "text": {"format": None}}),
    (RESPONSE, {"include": [], "truncation": "disabled", "background": False}),
]


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer of any kind."""
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", GOOD)
def test_neutral_values_change_nothing(site: Site, path: str) -> None:
    plain = text_of(site.post(path, json=GOOD[path]).json())
    for fields in (fields for at, fields in NEUTRAL if at == path):
        answer = site.post(path, json={**GOOD[path], **fields})
        assert (answer.status_code, answer.status_code == 200 and text_of(answer.json())) == (200, plain), answer.text


def test_every_prompt_of_a_list_gets_the_seed(site: Site, model: gecko.Gecko) -> None:
    drawing: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 20}
    asked = {"prompt": ["abc", "abc", "xy"], "n": 2, "seed": 5, "max_tokens": 20, **drawing}
    found = [choice["text"] for choice in site.post(json=asked).json()["choices"]]
    drawn = [alone(model, document(prompt), 20, seed=s, **drawing) for prompt in ("abc", "xy") for s in (5, 6)]
    assert found == [*drawn[:2], *drawn[:2], *drawn[2:]]
    highest = {**OK, "seed": (1 << 64) - 1, "temperature": 0.9}
    expected = alone(model, document("abc"), 3, seed=(1 << 64) - 1, temperature=0.9)
    assert text_of(site.post(json=highest).json()) == expected
    del asked["seed"]
    assert len({choice["text"] for choice in site.post(json=asked).json()["choices"]}) == 6


HEADERS: list[tuple[str, str, dict[str, str], int]] = [
    ("HEAD", "/health", {}, 200), ("HEAD", "/version", {}, 200), ("HEAD", "/v1/models", {}, 200),
    ("GET", "/health", {}, 200), ("HEAD", COMPLETION, {}, 405), ("GET", "/nothing", {}, 404),
    ("POST", COMPLETION, {}, 400), ("GET", "/health", {"Host": "evil.example"}, 403),
]  # fmt: skip


def test_every_response_has_the_id_of_its_request(site: Site) -> None:
    for method, path, headers, status in HEADERS:
        for given, taken in (("abc-1", True), ("a b", False), ("x" * 200, False), (None, False)):
            sent = headers if given is None else {**headers, "X-Request-Id": given}
            answer = site.client.request(method, path, headers=sent)
            assert answer.status_code == status
            found = answer.headers.get_list("x-request-id")
            assert found == [given] if taken else len(found) == 1 and len(found[0]) == 32
            assert method != "HEAD" or (answer.content == b"" and int(answer.headers["content-length"]) > 0)


def test_an_allowed_page_may_ask_and_others_may_not(keyed: Site) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (
        ("https://app.example", True), ("http://app.example:3000", True), ("https://app.example.evil", False),
        ("https://appxexample", False), ("null", False),
    ):  # fmt: skip
        preflight = keyed.client.request("OPTIONS", CHAT, headers={**asks, "Origin": origin})
        assert not allowed or "authorization" in preflight.headers["access-control-allow-headers"]
        key = {"Authorization": "Bearer secret", "Origin": origin}
        answer = keyed.post(CHAT, json=GOOD[CHAT], headers=key)
        refused = keyed.post(CHAT, json=GOOD[CHAT], headers={"Origin": origin})
        statuses = [one.status_code for one in (preflight, answer, refused)]
        assert statuses == ([200, 200, 401] if allowed else [400, 403, 403])
        for one in (preflight, answer, refused):
            assert one.headers.get("access-control-allow-origin") == (origin if allowed else None)


# ---- Streams and raw connections


def chunks(answer: httpx2.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def test_a_stream_has_no_character_that_ends_a_line(site: Site) -> None:
    """Some clients split lines as Python does."""
    for path in GOOD:
        text = {"structured_outputs": {"choice": ["a\u2028b\u2029c\x85é"]}}
        length = "max_output_tokens" if path == RESPONSE else "max_tokens"
        streamed = site.post(path, json={**GOOD[path], **text, length: 20, "stream": True})
        assert streamed.text.splitlines() == streamed.text.split("\n")[: len(streamed.text.splitlines())]
        assert streamed.text.isascii()
        assert text_of(site.post(path, json={**GOOD[path], **text, length: 20}).json()) == "a\u2028b\u2029c\x85é"


def test_a_lone_surrogate_comes_back_as_it_was_sent(site: Site) -> None:
    for stream in (False, True):
        body = json.dumps({**GOOD[RESPONSE], "metadata": {"a\ud800": "\udc00"}, "stream": stream})
        answer = site.post(RESPONSE, content=body, headers=JSON)
        assert answer.status_code == 200
        whole = chunks(answer)[-1]["response"] if stream else json.loads(answer.text)
        assert (whole["status"], whole["metadata"]) == ("incomplete", {"a\ud800": "\udc00"})
        assert json.loads(site.get(f"{RESPONSE}/{whole['id']}").text)["metadata"] == whole["metadata"]


@pytest.mark.parametrize(("stream", "times"), [(False, 1), (True, 3)])
def test_a_client_that_has_said_everything_gets_its_answers(
    site: Site, slow_steps: None, stream: bool, times: int
) -> None:
    body = json.dumps({**OK, "max_tokens": 20, "stream": stream}).encode()
    found = site.talk((head_of(f"Content-Length: {len(body)}") + body) * times, ends=True)
    assert found.count(b"HTTP/1.1 200 OK") == times
    assert found.count(b'"finish_reason":"length"') == times


def test_bodies_of_tiny_chunks_are_refused(keyed: Site) -> None:
    for length, size, status in (
        (900, 1, 200), (100_000, 512, 200), (150_000, 100_000, 200), (20_000, 1, 400), (150_000, 20, 400),
    ):  # fmt: skip
        body = json.dumps({**OK, "prompt": "a" * length, "max_tokens": 1}).encode()
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        for key, expected in (("secret", status), ("wrong", 401)) if size == 512 else (("secret", status),):
            headers = f"Transfer-Encoding: chunked\r\nConnection: close\r\nAuthorization: Bearer {key}"
            found = keyed.talk(head_of(headers) + chunked)
            assert found.startswith(b"HTTP/1.1 %d" % expected), found
            assert expected != 400 or b"256 bytes and more" in found
    assert keyed.get("/health").status_code == 200
