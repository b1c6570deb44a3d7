"""Fields of a request, and structured output."""

import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from serving.conftest import StartServer
from serving.sites import GREEDY, OK, City, Site, alone, check_error, document

import gecko

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI: Any = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "abc", "max_tokens": 30, "n": 2},
    CHAT: {"messages": HI, "max_tokens": 30, "n": 2},
    RESPONSE: {"input": "Hi", "max_output_tokens": 30},
}


def answers(site: Site, path: str, **asked: Any) -> list[tuple[str, str]]:
    """Return text and reason of the end of every choice, and assert that they are those of a stream."""
    body = {**ASKED[path], "temperature": 0, **asked}
    whole, stream = (site.post(path, json={**body, "stream": streamed}) for streamed in (False, True))
    assert whole.status_code == 200, whole.text
    found = whole.json()
    events = [json.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
    if path == RESPONSE:
        written = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
        assert written == found["output"][0]["content"][0]["text"]
        assert events[-1]["response"]["status"] == found["status"]
        return [(written, "length" if found["status"] == "incomplete" else "stop")]
    ends = []
    for choice in found["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        texts = [part["text"] if path == COMPLETION else part["delta"].get("content", "") for part in parts]
        assert "".join(texts) == (choice["text"] if path == COMPLETION else choice["message"]["content"])
        assert texts[-1] == "" and parts[-1]["logprobs"] is None, "clients drop the text of the last chunk"
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        ends.append(("".join(texts), choice["finish_reason"]))
    return ends


ENDS = {"logit_bias": {"256": 100}}
"""The end of the document is the most likely token."""
Case = Callable[[str, Callable[..., str]], tuple[dict[str, Any], str, str]]
FIELDS: list[Case] = [
    lambda text, write: ({}, text, "length"),
    lambda text, write: ({"presence_penalty": 2.0}, write(presence_penalty=2.0), "length"),
    lambda text, write: ({"frequency_penalty": 1.5, "seed": 3}, write(frequency_penalty=1.5), "length"),
    lambda text, write: ({"frequency_penalty": -1}, write(frequency_penalty=-1), "length"),
    lambda text, write: ({"repetition_penalty": 9}, write(repetition_penalty=9), "length"),
    lambda text, write: ({"temperature": 1, "top_k": 1}, text, "length"),
    lambda text, write: ({"temperature": 1, "min_p": 1}, text, "length"),
    lambda text, write: ({"temperature": 2, "top_p": 0}, text, "length"),
    lambda text, write: ({"logit_bias": {"81": 100}}, "Q" * 30, "length"),
    lambda text, write: ({"logit_bias": {"226": 100}}, "\ufffd" * 30, "length"),
    lambda text, write: ({"stop": text[20:23]}, text.partition(text[20:23])[0], "stop"),
    lambda text, write: ({"stop": ["@@", text[9]]}, text.partition(text[9])[0], "stop"),
    lambda text, write: ({"stop": text[-2:] + "?"}, text, "length"),
    lambda text, write: ({"stop": text[3:5], "min_tokens": 30}, text, "length"),
    lambda text, write: ({"stop_token_ids": [ord(text[12]), 0]}, text.partition(text[12])[0], "stop"),
    lambda text, write: (ENDS, "", "stop"),
    lambda text, write: ({**ENDS, "min_tokens": 7}, text[:7], "stop"),
    lambda text, write: ({**ENDS, "min_tokens": 30}, text, "length"),
    lambda text, write: ({**ENDS, "ignore_eos": True}, "", "length"),
    lambda text, write: ({**ENDS, "ignore_eos": True, "stop_token_ids": [256]}, "", "stop"),
]
"""Fields, what the model then writes in place of its text, and why it ends."""


@pytest.mark.parametrize("path", ASKED)
def test_every_field_does_what_it_says(site: Site, model: gecko.Gecko, path: str) -> None:
    """In a whole answer, in a stream and for every choice."""
    ids = document("abc" if path == COMPLETION else "User: Hi\n\nAssistant:")

    def write(**options: Any) -> str:
        return alone(model, ids, 30, temperature=0, **options)

    free = write()
    for case in FIELDS:
        fields, text, reason = case(free, write)
        assert answers(site, path, **fields) == [(text, reason)] * ASKED[path].get("n", 1), fields


def test_choices_read_their_prompt_once(site: Site) -> None:
    """Also if there are more choices than rows; the prompt is new to the prefix cache."""
    for stream in (False, True):
        site.wait_until_idle()
        before = site.numbers()["gecko_prompt_tokens_total"]
        prompt = list(f"a prompt of its own, {stream}, ".encode() * 9)
        assert site.post(json={"prompt": prompt, "n": 11, "max_tokens": 3, "stream": stream}).status_code == 200
        assert site.numbers()["gecko_prompt_tokens_total"] - before == len(prompt)


# ---- Structured output over HTTP, with OpenAI's client.


def test_chat_parses_to_a_model(site: Site) -> None:
    answer = site.openai.chat.completions.parse(
        model="small", messages=HI, response_format=City, max_tokens=200, n=3, seed=1, temperature=1.0
    )
    assert all(choice.finish_reason == "stop" and choice.message.parsed is not None for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) == 3


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_every_form_of_constraint(site: Site, path: str) -> None:
    def write(**more: Any) -> str:
        ((text, reason),) = answers(site, path, **{"max_tokens": 300, "n": 1, "temperature": 1, "seed": 1, **more})
        assert reason == "stop"
        return text

    schema = City.model_json_schema()
    formatted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    for more in (
        {"response_format": formatted}, {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):  # fmt: skip
        City.model_validate_json(write(**more))
    brace = {"logit_bias": {"125": 100}}
    assert json.loads(write(response_format={"type": "json_object"}, **brace)) == {}
    assert json.loads(write(structured_outputs={"json_object": True}, **brace)) == {}
    assert re.fullmatch(r"[0-9]{3}-é", write(structured_outputs={"regex": r"[0-9]{3}-é"}))
    assert write(structured_outputs={"choice": ["yes!", "no (never)"]}) in ("yes!", "no (never)")
    # The plain format ends an answer where the user would speak; a constrained one ends where it is complete.
    assert write(structured_outputs={"choice": ["a\n\nUser: b"]}) == "a\n\nUser: b"
    cut = answers(site, path, structured_outputs={"regex": "[a-z]{5}[0-9]{40}"})
    assert all(re.fullmatch("[a-z]{5}[0-9]{25}", text) and reason == "length" for text, reason in cut)


def test_requests_beside_a_constrained_one_are_as_if_alone(site: Site) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 60, **GREEDY}
    free = site.openai.completions.create(**asked).choices[0].text
    bound = {"structured_outputs": {"regex": "(abc)+"}}
    with site.openai.completions.create(**{**asked, "max_tokens": 2000}, stream=True, extra_body=bound) as stream:
        next(iter(stream))
        assert site.openai.completions.create(**asked).choices[0].text == free
    site.wait_until_idle()


def test_hostile_constraints_are_refused_and_no_other_request_waits(shared: StartServer) -> None:
    site = shared(prefix_cache_bytes=0)
    wide = {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(6)]}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"items": deep}
    many = {"enum": [f"{index * 7919}" for index in range(90_000)]}
    for schema, told in ((wide, "too"), (deep, "nested"), (many, "262,144"), ({"$ref": "#"}, "no token")):
        check_error(site.post(json={**OK, "structured_outputs": {"json": schema}}), 400, told)
    regex = {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}b"}}
    response = site.post(json={**OK, "max_tokens": 500, "logit_bias": {"97": 100}, **regex})
    check_error(response, 400, "constraint")
    with pytest.raises(openai.APIError, match="constraint"):
        list(site.openai.completions.create(
            prompt="a", max_tokens=500, stream=True, logit_bias={"97": 100}, extra_body=regex, **GREEDY
        ))  # fmt: skip
    assert site.post(json=OK).status_code == 200
    site.wait_until_idle()


def test_a_server_without_the_library_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    check_error(site.post(json={**OK, "structured_outputs": {"regex": "a"}}), 400, "gecko-lm[serve]")
    assert site.get("/health").status_code == 200
