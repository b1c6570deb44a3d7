"""Many clients, clients that disconnect, and a server that stops: no place is lost, and no client waits in vain.

Libraries that call functions work with the server as they do with OpenAI's.
"""

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving.conftest import StartServer
from serving.sites import OK, PATIENCE, City, Site, check_error, head_of, until
from serving.templates import IGNORANT, QWEN
from starlette.types import ASGIApp, Send

import gecko
from gecko.data import Tokenizer
from gecko.serving.app import create_app
from gecko.serving.options import Limits, Options
from gecko.serving.server import build_service

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 4000, "temperature": 0}


def rows(site: Site) -> float:
    return site.numbers()["gecko_rows_active"]


@contextmanager
def asking(site: Site, **asked: Any) -> Iterator[None]:
    """Keep a client waiting for its response within the block; at the end of the block it disconnects."""
    body = json.dumps({**LONG, **asked}).encode()
    with site.connect() as connection:
        connection.sendall(head_of(f"Content-Length: {len(body)}") + body)
        yield
        time.sleep(0.1)  # a client that leaves at once after its request may still read the answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_goes_away_frees_its_rows_and_places(site: Site, stream: bool) -> None:
    """The server notices also while the client waits, although it sends nothing that could fail."""
    made = site.numbers()["gecko_generated_tokens_total"]
    with asking(site, n=4, stream=stream):
        until(lambda: rows(site) == 4)
        with asking(site, n=5, stream=stream):
            until(lambda: site.numbers()["gecko_queue_length"] == 5)
        until(lambda: site.numbers()["gecko_queue_length"] == 0)
        assert rows(site) == 4
    until(lambda: rows(site) == 0)
    assert site.numbers()["gecko_generated_tokens_total"] - made < 4 * 3000
    site.wait_until_idle()


def test_disconnects_at_random_moments_leave_nothing(site: Site) -> None:
    """Clients that stay get what they get alone."""
    chance = random.Random(0)
    expected = site.post(json={**LONG, "max_tokens": 60}).json()["choices"][0]["text"]

    async def visit(client: httpx2.AsyncClient, number: int) -> str | None:
        asked = {**LONG, "stream": number % 2 == 0, "max_tokens": 60 if number % 3 else 2000}
        asked["prompt"] = "abc" if number % 3 else "other " * chance.randrange(1, 300)
        patience = None if number % 3 else chance.uniform(0, 0.15)
        try:
            response = await asyncio.wait_for(client.post(f"{site.url}/v1/completions", json=asked), patience)
        except TimeoutError:
            return None
        assert response.status_code == 200
        return response.json()["choices"][0]["text"] if number % 2 else _streamed_text(response.text)

    async def visit_all() -> list[str | None]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=60, limits=limits) as client:
            return await asyncio.gather(*(visit(client, number) for number in range(40)))

    texts = asyncio.run(visit_all())
    assert {text for number, text in enumerate(texts) if number % 3} == {expected}
    site.wait_until_idle()


async def call(app: ASGIApp, send: Send, **asked: Any) -> None:
    """Send a request without a socket: ``send`` gets the response, and the client stays until it is complete."""
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": json.dumps({**LONG, **asked}).encode()})
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "query_string": b"",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "server": ("x", 80), "client": ("x", 1),
    }  # fmt: skip
    await app(scope, incoming.get, send)


def test_thousands_of_requests_at_once(model: gecko.Gecko, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As many as there are places are served; all others are refused for now."""
    limits = Limits(rows=8, queue=92)
    service = build_service(model, tokenizer, tmp_path, Options(limits=limits))
    app = create_app(service)

    async def ask() -> tuple[int, bytes | None, str | None]:
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        await call(app, send, max_tokens=2)
        code = json.loads(told[1]["body"]).get("error", {}).get("code")
        return told[0]["status"], dict(told[0]["headers"]).get(b"retry-after"), code

    async def ask_all() -> list[tuple[int, bytes | None, str | None]]:
        service.worker.start()
        answers = await asyncio.gather(*(ask() for _ in range(2_000)))
        assert service.admission.taken == 0
        assert (await ask())[0] == 200
        await service.worker.close()
        return answers

    answers = Counter(asyncio.run(ask_all()))
    assert answers.keys() == {(200, None, None), (429, b"2", "queue_full")}
    assert 100 <= answers[200, None, None] < 1000


def test_a_client_that_stops_reading_has_its_place_no_longer_than_others(
    model: gecko.Gecko, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays connected, and its full buffer accepts no more of the stream."""
    monkeypatch.setattr("gecko.serving.answer._SENDING_SECONDS", 0.1)
    service = build_service(model, tokenizer, tmp_path, Options(limits=Limits(rows=1, queue=0, seconds=0.5)))
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)
        if len(told) == 3:
            await asyncio.Event().wait()

    async def ask() -> None:
        service.worker.start()
        await asyncio.wait_for(call(create_app(service), send, stream=True), PATIENCE)
        assert service.admission.taken == 0
        await service.worker.close()

    asyncio.run(ask())
    assert told[-1]["more_body"], "a client must not take what it got for the whole"


def test_a_full_queue_of_the_engine_is_told_like_a_full_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.service.worker._engine, "_max_queued", 0)
    check_error(site.post(json=OK), 429, "wait already")
    site.wait_until_idle()


@pytest.mark.usefixtures("slow_steps")
def test_a_failing_step_ends_those_it_held_and_no_others(start: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    site = start(limits=Limits(rows=2))
    engine = site.service.worker._engine
    step = engine.step
    with site.openai.completions.create(model="small", stream=True, **LONG) as stream:
        next(iter(stream))

        def fail() -> None:
            monkeypatch.setattr(engine, "step", step)
            raise RuntimeError("a secret of the machine")

        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(openai.APIError, match="model failed") as caught:
            list(stream)
        assert "secret" not in str(caught.value)
    site.wait_until_idle()
    assert site.post(json={**LONG, "max_tokens": 5}).status_code == 200


@pytest.mark.usefixtures("slow_steps")
def test_running_requests_finish_and_new_ones_get_503(start: StartServer) -> None:
    site = start(grace_seconds=30.0)
    with site.openai.completions.create(model="small", stream=True, **{**LONG, "max_tokens": 200}) as stream:
        next(iter(stream))
        site.server.handle_exit(signal.SIGTERM, None)
        until(lambda: site.get("/health").status_code == 503)
        with pytest.raises(openai.InternalServerError) as caught:
            site.openai.completions.create(model="small", prompt="a")
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert caught.value.response.headers["retry-after"] == "2"
        assert list(stream)[-1].choices[0].finish_reason == "length"
    until(lambda: site.server.should_exit)


@pytest.mark.usefixtures("slow_steps")
def test_what_does_not_finish_in_time_is_told_so(start: StartServer) -> None:
    site = start(grace_seconds=0.2)
    begin = time.monotonic()
    with site.openai.completions.create(model="small", stream=True, **LONG) as stream:
        next(iter(stream))
        site.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="stopped before"):
            list(stream)
    until(lambda: site.server.should_exit)
    assert time.monotonic() - begin < 20


def _streamed_text(content: str) -> str:
    chunks = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(scope="module", params=[QWEN, IGNORANT], ids=["qwen", "ignorant"])
def tooled(request: pytest.FixtureRequest, shared: StartServer) -> Site:
    return shared(request.param)


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
