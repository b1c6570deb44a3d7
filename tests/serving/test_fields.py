"""Fields of a request, and structured output."""

import json
import re
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving.conftest import StartServer
from serving.sites import GREEDY, OK, Site, alone, check_error, document

import gecko
from gecko.serving.options import Limits

# ---- Fields of a request beyond sampling: each does what it says alone, in a stream, in chat, and for every choice.

QUESTION: Any = [{"role": "user", "content": "Hi"}]
END = 256
"""The end token of the bytes tokenizer."""


def answers(site: Site, **asked: Any) -> list[tuple[str, str]]:
    """Return text and finish reason of every choice, whole, and assert that a stream and a chat agree."""
    options = {"extra_body": asked.pop("extra_body", {}), **GREEDY, **asked}
    whole = site.openai.completions.create(prompt="abc", **options)
    found = [(choice.text, choice.finish_reason) for choice in whole.choices]
    texts, reasons = [""] * len(found), [""] * len(found)
    for chunk in site.openai.completions.create(prompt="abc", stream=True, **options):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert list(zip(texts, reasons, strict=True)) == found
    return found


def chat(site: Site, **asked: Any) -> openai.types.chat.chat_completion.Choice:
    return site.openai.chat.completions.create(messages=QUESTION, **{**GREEDY, **asked}).choices[0]


def test_penalties_are_those_of_generate(site: Site, model: gecko.Gecko) -> None:
    free = alone(model, document("abc"), 30, temperature=0)
    for penalties in ({"presence_penalty": 2.0}, {"frequency_penalty": 1.5}, {"frequency_penalty": -1, "seed": 3}):
        expected = alone(model, document("abc"), 30, temperature=0, **{k: v for k, v in penalties.items() if "p" in k})
        assert answers(site, max_tokens=30, n=2, **penalties) == [(expected, "length")] * 2
        assert expected != free or penalties.get("frequency_penalty") == -1
    prompt = list(b"User: Hi\n\nAssistant:")
    expected = alone(model, [END, *prompt], 30, temperature=0, presence_penalty=1.0)
    assert chat(site, max_tokens=30, presence_penalty=1.0).message.content == expected
    drawn = site.post(json={**OK, "max_tokens": 30, "seed": 5, "frequency_penalty": 0.8}).json()["choices"][0]["text"]
    assert drawn == alone(model, document("abc"), 30, seed=5, frequency_penalty=0.8)


@pytest.mark.parametrize("ends", [{"logit_bias": {"256": 100}}, {"extra_body": {"stop_token_ids": [97, 256, 98]}}])
def test_no_end_before_the_least_number_of_tokens(site: Site, ends: dict[str, Any]) -> None:
    """The bias makes the end of the document the most likely token; of the letters, some end the answer."""
    ((free, reason),) = answers(site, max_tokens=20, **ends)
    if "logit_bias" in ends:
        assert (free, reason) == ("", "stop")
    for least in (1, 7, 20):
        more = {**ends, "extra_body": {"min_tokens": least, **ends.get("extra_body", {})}}
        for text, reason in answers(site, max_tokens=20, n=2, **more):
            assert len(text) >= least
            assert reason == ("length" if len(text) == 20 else "stop")
            if "logit_bias" in ends:
                assert len(text) == least
            else:
                assert not set(text) & set("ab")


def test_stop_strings_wait_for_the_least_number_of_tokens(site: Site, model: gecko.Gecko) -> None:
    whole = alone(model, document("abc"), 40, temperature=0)
    stop = whole[3:5]
    later = whole.find(stop, 10)
    expected = (whole, "length") if later < 0 else (whole[:later], "stop")
    assert answers(site, max_tokens=40, stop=stop) == [(whole[: whole.find(stop)], "stop")]
    assert answers(site, max_tokens=40, stop=stop, extra_body={"min_tokens": 10}) == [expected]


def test_ignored_ends_are_read_like_other_tokens(site: Site, model: gecko.Gecko) -> None:
    biased: Any = {"logit_bias": {"256": 100}, "max_tokens": 6}
    body = {"ignore_eos": True}
    assert answers(site, extra_body=body, **biased) == [("", "length")]
    answer = site.openai.completions.create(prompt="abc", extra_body=body, **GREEDY, **biased)
    assert (answer.usage.completion_tokens, answer.choices[0].position) == (6, 10)
    assert chat(site, extra_body=body, **biased).finish_reason == "length"
    assert answers(site, extra_body={"ignore_eos": True, "stop_token_ids": [256]}, **biased) == [("", "stop")]


def test_ids_that_stop_are_not_part_of_the_text(site: Site, model: gecko.Gecko) -> None:
    whole = alone(model, document("abc"), 30, temperature=0)
    stop = ord(whole[12])
    expected = whole[: whole.find(whole[12])]
    assert answers(site, max_tokens=30, n=2, extra_body={"stop_token_ids": [stop, 0]}) == [(expected, "stop")] * 2
    prompt = [END, *b"User: Hi\n\nAssistant:"]
    spoken = alone(model, prompt, 30, temperature=0)
    choice = chat(site, max_tokens=30, extra_body={"stop_token_ids": [ord(spoken[9])]})
    assert (choice.message.content, choice.finish_reason) == (spoken[: spoken.find(spoken[9])], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_read_their_prompt_once(site: Site, stream: bool) -> None:
    """Also if there are more choices than rows; the prompt is new to the prefix cache."""
    site.wait_until_idle()
    before = site.numbers()["gecko_prompt_tokens_total"]
    prompt = f"a prompt of its own, {stream}, " * 9
    asked = {"prompt": prompt, "n": 11, "max_tokens": 3, "stream": stream}
    response = site.post(json=asked)
    assert response.status_code == 200
    assert site.numbers()["gecko_prompt_tokens_total"] - before == len(document(prompt))


# ---- Structured output over HTTP, with OpenAI's client.

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
