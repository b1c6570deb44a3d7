"""Structured output over HTTP, with OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving.conftest import StartServer
from serving.sites import GREEDY, OK, Site, check_error

from gecko.serving.options import Limits

CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0}


class City(BaseModel):
    """Schema whose texts are short, so that the small model ends them."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=9)
    size: int = Field(ge=0, le=99)
    capital: bool


def test_chat_parses_to_a_model(site: Site) -> None:
    answer = site.openai.chat.completions.parse(response_format=City, max_tokens=200, n=3, seed=1, **CHAT)
    assert all(choice.finish_reason == "stop" and choice.message.parsed is not None for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_form_of_constraint(site: Site, path: str) -> None:
    asked = {**CHAT, "max_tokens": 300} if "chat" in path else {"prompt": "abc", "max_tokens": 300}

    def write(**more: Any) -> str:
        answer = site.post(path, json={**asked, **more})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["text"] if "text" in choice else choice["message"]["content"]

    schema = City.model_json_schema()
    formatted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    for more in (
        {"response_format": formatted}, {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
    ):  # fmt: skip
        City.model_validate_json(write(**more))
    brace = {"logit_bias": {"125": 100}}
    assert json.loads(write(response_format={"type": "json_object"}, **brace)) == {}
    assert json.loads(write(structured_outputs={"json_object": True}, **brace)) == {}
    assert re.fullmatch(r"[0-9]{3}-é", write(structured_outputs={"regex": r"[0-9]{3}-é"}))
    assert write(structured_outputs={"choice": ["yes!", "no (never)"]}) in ("yes!", "no (never)")


def test_a_stream_joins_to_the_whole_and_says_where_it_is_cut(site: Site) -> None:
    outputs = {"structured_outputs": {"regex": "[a-z]{5}[0-9]{40}"}}
    whole = site.openai.completions.create(prompt="abc", max_tokens=30, extra_body=outputs, **GREEDY).choices[0]
    assert re.fullmatch("[a-z]{5}[0-9]{25}", whole.text)
    chunks = list(
        site.openai.completions.create(prompt="abc", max_tokens=30, extra_body=outputs, stream=True, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert (chunks[-1].choices[0].finish_reason, whole.finish_reason) == ("length", "length")


def test_requests_beside_a_constrained_one_are_as_if_alone(site: Site) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 60, **GREEDY}
    free = site.openai.completions.create(**asked).choices[0].text
    bound = {"structured_outputs": {"regex": "(abc)+"}}
    with site.openai.completions.create(**{**asked, "max_tokens": 2000}, stream=True, extra_body=bound) as stream:
        next(iter(stream))
        assert site.openai.completions.create(**asked).choices[0].text == free
    site.wait_until_idle()


def test_a_constraint_holds_for_the_stop_strings_of_the_chat(site: Site) -> None:
    """The plain format ends an answer where the user would speak; a constrained one ends where it is complete."""
    outputs = {"structured_outputs": {"choice": ["a\n\nUser: b"]}}
    answer = site.openai.chat.completions.create(extra_body=outputs, max_tokens=50, **CHAT)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("a\n\nUser: b", "stop")


def test_hostile_constraints_are_refused_and_no_other_request_waits(start: StartServer) -> None:
    site = start(limits=Limits(rows=4, queue=40))
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
    assert httpx2.get(f"{site.url}/health").status_code == 200
