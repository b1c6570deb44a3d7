"""Calls of functions over HTTP, with OpenAI's client and templates of every kind."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving.conftest import StartServer
from serving.sites import Site, check_error
from serving.templates import TEMPLATES

import gecko
from gecko.data.turns import Function, Turn
from gecko.inference.text import StreamDecoder

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: Any = [{"role": "user", "content": "Hi"}]


class Place(BaseModel):
    """Part of the arguments."""

    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=99)


class Weather(BaseModel):
    """Tell the weather."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=5)
    places: list[Place] = Field(max_length=2)


class Now(BaseModel):
    """Tell the time."""

    model_config = ConfigDict(extra="forbid")

    utc: bool


MODELS: dict[str, type[BaseModel]] = {"weather": Weather, "now": Now}
SCHEMAS: dict[str, Any] = {
    "weather": Weather.model_json_schema(), "now": Now.model_json_schema(),
    "odd": {
        "description": "// %json } \\ \" # \n", "required": ["$ref"], "additionalProperties": False,
        "properties": {"$ref": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"enum": ["https://x", "%ignore"]}},
    },
    "nothing": None, "refused": {"not": {}},
    "choice": {"properties": {"a": {"enum": ["x", 'y"}', None]}}, "required": ["a"], "additionalProperties": False},
    "either": {
        "type": "object", "required": ["v"], "additionalProperties": False,
        "properties": {"v": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]}},
    },
}  # fmt: skip

FITS: dict[str, Callable[[Any], Any]] = {
    "weather": Weather.model_validate, "now": Now.model_validate, "nothing": lambda found: isinstance(found, dict),
    "odd": lambda found: found in ({"$ref": "https://x"}, {"$ref": "%ignore"}),
    "choice": lambda found: found in ({"a": "x"}, {"a": 'y"}'}, {"a": None}),
    "either": lambda found: found.keys() == {"v"} and found["v"] in (None, *range(10)),
}  # fmt: skip


UNREAD = TEMPLATES["qwen"].replace("tool_call.arguments | tojson", "tool_call.arguments | tojson | tojson")
"""Template whose form of calls is not read."""


def tool(name: str) -> dict[str, Any]:
    schema = SCHEMAS[name]
    return {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}


TOOLS: list[Any] = [tool("weather"), tool("now")]
FLAT: list[Any] = [{"type": "function", **one["function"]} for one in TOOLS]
NAMED: Any = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": '{"utc": true}'}}
HISTORY: Any = [
    *ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"},
]  # fmt: skip


@pytest.fixture(scope="module", params=TEMPLATES)
def tooled(request: pytest.FixtureRequest, shared: StartServer) -> Site:
    return shared(TEMPLATES[request.param])


@pytest.fixture(scope="module")
def qwen(shared: StartServer) -> Site:
    return shared(TEMPLATES["qwen"])


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets the model write a text, then letters; ``¤`` in a request's ``stop`` ends them."""

    class Scripted(StreamDecoder):
        script: str = ""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            chance, self.rest = random.Random(0), self.script
            self.next = lambda: chance.randrange(1, 9)

        def push(self, ids: Any) -> str:
            size = self.next()
            text, self.rest = self.rest[:size], self.rest[size:]
            return text or "¤"

    monkeypatch.setattr("gecko.inference.text.StreamDecoder", Scripted)
    return lambda text: setattr(Scripted, "script", text)


def ask(site: Site, **asked: Any) -> Any:
    base = {"model": "small", "messages": ASK, "tools": TOOLS, "max_tokens": 300, "seed": 1}
    return site.openai.chat.completions.create(**{**base, **asked})


def joined(chunks: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """Return the text, the calls and the reason of the end of a stream."""
    text, calls, reason = "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        assert reason is None, "nothing follows the end"
        assert not (choice.delta.content and calls), "no text follows a call"
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            assert (part.id is not None) == (part.index == len(calls))
            if part.id is not None:
                assert part.type == "function"
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            calls[part.index]["arguments"] += part.function.arguments
        reason = choice.finish_reason
    return text, calls, reason


def test_an_enforced_call_fits_its_schema(tooled: Site) -> None:
    for seed, choice in enumerate(["required", NAMED] * 2):
        asked: dict[str, Any] = {"tool_choice": choice, "seed": seed, "temperature": seed}
        answer = ask(tooled, **asked).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert choice == "required" or call.function.name == "now"
        MODELS[call.function.name].model_validate_json(call.function.arguments)
        text, (streamed,), reason = joined(ask(tooled, stream=True, **asked))
        assert (text, reason) == ("", "tool_calls")
        assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)


@pytest.mark.parametrize("name", FITS)
def test_every_schema_of_a_list_is_enforced(site: Site, name: str) -> None:
    named: Any = {"type": "function", "function": {"name": name}}
    asked: dict[str, Any] = {"tools": [tool(each) for each in FITS], "tool_choice": named, "logit_bias": {"125": 5}}
    for seed in range(3):  # objects may end
        answer = ask(site, seed=seed, temperature=seed, **asked).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == name
        assert FITS[name](json.loads(call.function.arguments))


SAID = {
    "qwen": 'I look.\n<tool_call>\n{"name": "now", "arguments": {"utc": true}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "}"}}\n</tool_call>',
    "llama": '{"name": "now", "parameters": {"utc": true}}; {"name": "weather", "parameters": {"city": "}"}}',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {"utc": true}}, '
    '{"arguments": {"city": "}"}, "name": "weather"}]',
}  # fmt: skip


@pytest.mark.parametrize("form", SAID)
def test_calls_in_the_text_are_read(tooled: Site, says: Any, form: str) -> None:
    says(SAID[form])
    for several in (True, False):
        asked: dict[str, Any] = {"stop": "¤", "parallel_tool_calls": several}
        answer = ask(tooled, **asked).choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
        assert calls == [("now", {"utc": True}), ("weather", {"city": "}"})][: 1 + several]
        assert answer.message.content == ("I look." if form == "qwen" else None)
        assert answer.finish_reason == "tool_calls"
        text, streamed, reason = joined(ask(tooled, stream=True, **asked))
        assert (text or None, reason) == (answer.message.content, "tool_calls")
        whole = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
        assert [(call["name"], call["arguments"]) for call in streamed] == whole


def test_without_a_choice_there_is_no_call(qwen: Site, says: Any) -> None:
    for text in SAID.values():
        says(text)
        for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
            answer = ask(qwen, stop="¤", **more).choices[0]
            assert (answer.message.content, answer.message.tool_calls) == (text, None)
            assert answer.finish_reason == "stop"


def test_what_is_no_call_is_text(qwen: Site, says: Any) -> None:
    for text in ("Hello", '{"answer": 5}', "<tool_call> no", "a <tool_cal", '{"name": "rm", "arguments": {}}'):
        says(text)
        answer = ask(qwen, stop="¤").choices[0]
        assert (answer.message.content, answer.finish_reason) == (text, "stop")
        assert joined(ask(qwen, stop="¤", stream=True)) == (text, [], "stop")


def test_a_call_that_is_cut(site: Site) -> None:
    answer = ask(site, tool_choice=NAMED, max_tokens=35).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("length", "now")
    assert re.fullmatch(r'\{\s*("u?t?c?)?', call.function.arguments)
    answer = ask(site, tool_choice=NAMED, max_tokens=5).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("length", "", None)


def test_special_tokens_of_calls_do_not_end_an_answer(shared: StartServer) -> None:
    """They are text there, and end an answer that cannot call functions."""
    site = shared(TEMPLATES["mistral"])
    bias = {"logit_bias": {"262": 100}, "max_tokens": 3}
    answer = ask(site, **bias).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("[TOOL_CALLS]" * 3, "length")
    answer = ask(site, tool_choice="none", **bias).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("", "stop")


def test_the_prompt_has_the_tools_and_the_history(tooled: Site) -> None:
    def count(**more: Any) -> int:
        return tooled.client.post("/tokenize", json={"messages": ASK, **more}).json()["count"]

    answer = ask(tooled, max_tokens=1)
    assert answer.usage.prompt_tokens == count(tools=TOOLS) > count() + 100
    assert ask(tooled, max_tokens=1, tool_choice="none").usage.prompt_tokens == count()
    assert len(ask(tooled, messages=HISTORY, max_tokens=5).choices[0].message.content) == 5
    first = ask(tooled, tool_choice=NAMED).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in first.tool_calls]
    again = ask(tooled, messages=[*ASK, first, *results], max_tokens=5).choices[0]
    assert len(again.message.content) == 5


def respond(site: Site, **asked: Any) -> Any:
    base: dict[str, Any] = {"model": "small", "input": "Hi", "tools": FLAT, "max_output_tokens": 300}
    return site.openai.responses.create(**{**base, **asked})


def test_responses_with_calls(tooled: Site, model: gecko.Gecko) -> None:
    first = respond(tooled, tool_choice="required")
    (call,) = first.output
    assert (call.type, call.status, first.status) == ("function_call", "completed", "completed")
    MODELS[call.name].model_validate_json(call.arguments)
    assert (first.tool_choice, first.parallel_tool_calls) == ("required", True)
    assert [found.name for found in first.tools] == ["weather", "now"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    then = respond(tooled, input=[result], previous_response_id=first.id, max_output_tokens=5, temperature=0)
    # The state has read what the model wrote, and what closes a call.
    chat = tooled.service.model.chat
    opening, field, closing = chat.call_form
    written = f'{opening}{{"name": "{call.name}", "{field}": {call.arguments}}}{closing}'
    functions = [Function(**one["function"]) for one in TOOLS]
    turns = chat.continuation([Turn("tool", "noon", call_id=call.call_id, name=call.name)])
    ids = [*chat.encode([Turn("user", "Hi")], functions), *chat.encode_answer(written), *turns.closing, *turns.turns]
    assert then.output_text == bytes(gecko.generate(model, ids, max_new_tokens=5, temperature=0).tokens[0]).decode()
    assert then.usage.input_tokens == len(ids)
    whole: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    assert len(respond(tooled, input=whole, max_output_tokens=5).output_text) == 5


def test_a_stream_of_responses_with_calls(qwen: Site, says: Any) -> None:
    """The conversation goes on after the calls that the model wrote."""
    says(SAID["qwen"])
    stop: Any = {"extra_body": {"stop": "¤"}}
    events = list(respond(qwen, stream=True, **stop))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    item = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", *item * 2,
        "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == first.output
    for index, one in enumerate(first.output[1:], start=1):
        parts = [e for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == index]
        assert {part.item_id for part in parts} == {one.id}
        assert "".join(part.delta for part in parts) == one.arguments
    assert [one.name for one in first.output[1:]] == ["now", "weather"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in first.output[1:]
    ]
    says("Done")
    then = respond(qwen, input=results, previous_response_id=first.id, **stop)
    assert then.output_text == "Done"
    last = respond(qwen, input="More", tools=openai.NOT_GIVEN, previous_response_id=then.id, **stop)
    assert last.output_text == "Done"


def test_what_looks_like_a_special_token_of_calls_is_text(shared: StartServer, says: Any) -> None:
    """Without functions; there, the form of calls does not matter either."""
    says("[TOOL_CALLS]")
    for template in (TEMPLATES["mistral"], UNREAD):
        site, none = shared(template), openai.NOT_GIVEN
        first, plain = (respond(site, tools=none, extra_body={"stop": stop}) for stop in ("¤", "["))
        follow: Any = {"input": "a", "tools": none, "max_output_tokens": 1}
        one, two = (respond(site, previous_response_id=found.id, **follow) for found in (first, plain))
        assert (first.output_text, plain.output_text) == ("[TOOL_CALLS]", "")
        assert one.usage.input_tokens - two.usage.input_tokens == len("[TOOL_CALLS]")


def of(**function: Any) -> dict[str, Any]:
    """Return the tools of a request that have one function."""
    return {"tools": [{"type": "function", "function": function}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    (of(name="a b"), "tools.0.function.name"),
    (of(name="<|im_end|>"), "tools.0.function.name"),
    (of(name='f"'), "tools.0.function.name"),
    (of(name="a" * 65), "tools.0.function.name"),
    (of(name="f", parameters={"type": "string"}), "of an object"),
    (of(name="f", parameters=[]), "of an object"),
    (of(name="f", nmae=1), "tools.0.function.nmae"),
    ({"tools": [TOOLS[0]] * 2}, "different names"),
    ({"tools": [tool("now") for _ in range(129)]}, "at most 128"),
    (of(name="f", description="é" * 50_000), "262,144"),
    ({"tools": "now"}, "tools"),
    ({"tool_choice": "any"}, "tool_choice must be none, auto, required"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": ["now"]}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "which are weather, now; got 'rm'"),
    ({"tools": [], "tool_choice": "required"}, "which are none; got required"),
    ({"tools": None, "tool_choice": NAMED}, "which are none; got 'now'"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format must be left out beside tools"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be left out beside tools"),
    ({"functions": [{"name": "f"}]}, "functions is not supported: use tools"),
    ({"tools": [tool("refused")], "tool_choice": "required"}, "tools: "),
]  # fmt: skip
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "tool", "content": "x"}], "messages.0 must have tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": "b"}], "messages.0.tool_call_id must be the id"),
    ([*HISTORY[:2], {"role": "tool", "content": "x", "tool_call_id": "b"}], "messages.2.tool_call_id must be the id"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages.0 must have tool_calls"),
    ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages.0 must have tool_call_id"),
    ([{"role": "assistant", "tool_calls": [1]}], "messages.0.tool_calls.0"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages.0.tool_calls"),
    ([{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}], "messages.0.tool_calls.0.type"),
    *[
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "now", "arguments": arguments}}]}],
            "messages.0.tool_calls.0.function.arguments must be",
        )
        for arguments in ("{", "[1]", "5", "", '{"a": ' + "[" * 40 + "]" * 40 + "}", "[" * 10_000, "9" * 10_000)
    ],
]  # fmt: skip


def test_bad_tools_are_refused_with_a_reason(site: Site) -> None:
    cases = [*BAD, *[({"messages": messages}, told) for messages, told in BAD_MESSAGES]]
    for change, told in cases:
        for stream in (False, True):
            body = {"messages": ASK, "tools": TOOLS, "max_tokens": 3, "stream": stream, **change}
            check_error(site.post(CHAT, json=body), 400, told)
    assert site.post(CHAT, json={"messages": HISTORY, "tools": TOOLS, "max_tokens": 3}).status_code == 200
    check_error(site.post(json={"prompt": "a", "tools": TOOLS}), 400, "tools is not supported: use /v1/chat")


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"input": [{"type": "function_call_output", "call_id": "b", "output": "x"}]}, "input.0.tool_call_id"),
    ({"input": [{"type": "function_call", "call_id": "b", "name": "f", "arguments": "{"}]}, "input.0.arguments"),
    ({"input": [{"type": "reasoning"}]}, "input.0 must be an item of type message or function_call or"),
    ({"input": [{"type": ["x"]}]}, "input.0 must be an item"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format must be left out"),
]  # fmt: skip


def test_bad_tools_of_responses_are_refused_with_a_reason(site: Site) -> None:
    for change, told in BAD_RESPONSES:
        body = {"input": "a", "tools": FLAT, "max_output_tokens": 3, **change}
        check_error(site.post(RESPONSES, json=body), 400, told)
    first = respond(site, tools=FLAT[:1], max_output_tokens=3)
    body = {"input": "a", "tools": FLAT, "previous_response_id": first.id}
    check_error(site.post(RESPONSES, json=body), 400, "tools must be those that the first request")
    result = {"type": "function_call_output", "call_id": "b", "output": "x"}
    check_error(site.post(RESPONSES, json={**body, "tools": [], "input": [result]}), 400, "must be the id of a call")


def test_hostile_tools_do_not_delay_others(site: Site) -> None:
    """Each answer comes soon, whatever it is."""
    deep: dict[str, Any] = {"type": "string"}
    for level in range(20):
        pair = {"type": "object", "properties": {"a": deep, "b": deep}, "required": ["a"]}
        deep = pair if level < 9 else {"items": deep}
    wide = {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(6)]}
    cyclic = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    enum = {"enum": [f"{j}" for j in range(90)]}
    many = {"tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": enum}} for i in range(128)]}
    for tools in (*(of(name="f", parameters=schema) for schema in (deep, wide, cyclic)), many):
        for choice in ("auto", "required"):
            body = {"messages": ASK, **tools, "tool_choice": choice, "max_tokens": 9}
            assert site.post(CHAT, json=body).status_code in (200, 400)
            assert site.get("/health", timeout=2).status_code == 200
    site.wait_until_idle()


def test_templates_that_hinder_are_told(shared: StartServer) -> None:
    qwen = TEMPLATES["qwen"]
    for template, told in (
        (UNREAD, "must write a call"),
        (qwen.replace("{{- tool | tojson }}", "{{- tool | tojson }}{% for i in range(9999999) %}{% endfor %}"), ""),
        ("{{ raise_exception('no tools') if tools and tools[0].function.name == 'now' }}" + qwen, "no tools"),
    ):
        site = shared(template)
        response = site.post(CHAT, json={"messages": ASK, "tools": [tool("now")], "max_tokens": 3})
        if told:
            check_error(response, 400, told)
        assert site.get("/health", timeout=2).status_code == 200
