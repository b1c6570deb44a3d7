"""Libraries that call functions work with the server as they do with OpenAI's: their default ways to do so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving.sites import Site, serving
from serving.templates import IGNORANT, QWEN

import gecko
from gecko.data import Tokenizer


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=9)
    size: int = Field(ge=0, le=99)


@pytest.fixture(scope="module", params=[QWEN, IGNORANT], ids=["qwen", "ignorant"])
def tooled(
    request: pytest.FixtureRequest, model: gecko.Gecko, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("template")
    (folder / "chat_template.jinja").write_text(request.param)
    with serving(model, tokenizer, folder) as site:
        yield site
        site.wait_until_idle()


def test_openai_s_functions_are_parsed(tooled: Site) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {
        "model": "small", "messages": messages, "max_tokens": 200, "tools": [openai.pydantic_function_tool(City)],
    }  # fmt: skip
    parse = tooled.openai.beta.chat.completions.parse
    (call,) = parse(tool_choice="required", **asked).choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, City)
    with tooled.openai.chat.completions.stream(tool_choice="required", **asked) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [isinstance(event.parsed_arguments, City) for event in events] == [True]
    assert parse(response_format=City, **{**asked, "tools": openai.NOT_GIVEN}).choices[0].message.parsed


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(tooled: Site, responses: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="small", base_url=f"{tooled.url}/v1", api_key="x", max_tokens=200, use_responses_api=responses
    )  # fmt: skip
    for choice in ("City", "any", "required"):
        bound = chat.bind_tools([City], tool_choice=choice)
        (call,) = bound.invoke("Hi").tool_calls
        assert City.model_validate(call["args"])
        whole = None
        for chunk in bound.stream("Hi"):
            whole = chunk if whole is None else whole + chunk
        assert [City.model_validate(one["args"]) for one in whole.tool_calls]
    answer = chat.bind_tools([City], tool_choice="any").invoke("Hi")
    result = ToolMessage("ok", tool_call_id=answer.tool_calls[0]["id"])
    bound = chat.bind_tools([City])
    for choice in (bound, chat.bind_tools([City], tool_choice="none"), chat):
        assert choice.invoke([HumanMessage("Hi"), answer, result]).text
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke("Hi"), City)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_s_default_output(tooled: Site, kind: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{tooled.url}/v1", api_key="x")
    agent = Agent(getattr(models, kind)("small", provider=provider), output_type=City)
    assert isinstance(agent.run_sync("Hi", model_settings={"max_tokens": 200}).output, City)


def test_instructor_s_default_mode(tooled: Site) -> None:
    instructor = pytest.importorskip("instructor", reason="its dependencies exclude newer versions of openai's")
    client = instructor.from_openai(tooled.openai)
    found = client.chat.completions.create(
        model="small", response_model=City, messages=[{"role": "user", "content": "Hi"}], max_tokens=200
    )
    assert isinstance(found, City)


def test_what_instructor_sends(tooled: Site) -> None:
    """Its default mode names the function, with a schema of pydantic."""
    function = {"name": "City", "description": "A city.", "parameters": City.model_json_schema()}
    answer = tooled.openai.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Hi"}], max_tokens=200,
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "City"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert City.model_validate_json(call.function.arguments)  # type: ignore[union-attr]
