"""``/v1/responses`` with OpenAI's client: a conversation continues from its state, and nothing is read twice."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving.conftest import StartServer
from serving.sites import GREEDY, Site, check_error, greedy, serving

import gecko
from gecko.data import Tokenizer
from gecko.serving.stores import ResponseStore, StoredResponse

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Animal(BaseModel):
    """Schema with short texts."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=5)
    legs: int = Field(ge=0, le=9)


def read_tokens(site: Site) -> float:
    site.wait_until_idle()
    return site.numbers()["gecko_prompt_tokens_total"]


def test_a_response(site: Site, model: gecko.Gecko) -> None:
    answer = site.openai.responses.create(
        input="Hello", instructions="Be short.", max_output_tokens=20, metadata={"a": "b"}, **GREEDY
    )
    expected = greedy(model, "System: Be short.\n\nUser: Hello\n\nAssistant:", 20)
    assert answer.output_text == expected
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", "small")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.instructions, answer.max_output_tokens) == ({"a": "b"}, "Be short.", 20)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (43, 20, 63)
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = site.openai.responses.create(input=parts, instructions="Be short.", max_output_tokens=20, **GREEDY)
    assert (again.output_text, again.id != answer.id) == (expected, True)


@pytest.mark.parametrize("cached", [0, 1 << 20])
def test_a_conversation_continues_as_if_read_anew(
    model: gecko.Gecko, tokenizer: Tokenizer, tmp_path: Path, cached: int
) -> None:
    """Turn by turn, from any response, and only the new turn is read."""
    with serving(model, tokenizer, tmp_path, prefix_cache_bytes=cached) as site:
        text, previous = "", None
        for turn in ("Tell me " + "a long story " * 30, "And then?", "The end?"):
            text += f"User: {turn.strip()}\n\nAssistant:"
            before = read_tokens(site)
            answer = site.openai.responses.create(
                input=turn, previous_response_id=previous, max_output_tokens=25, **GREEDY
            )
            grown = read_tokens(site) - before
            assert answer.output_text == greedy(model, text, 25)
            assert answer.usage is not None and answer.usage.input_tokens == len(text.encode()) + 1
            if previous is not None:
                # The last token of the answer, the end of its turn, and the new turn.
                assert grown == 1 + 2 + len(f"User: {turn}\n\nAssistant:")
                assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens - grown
            text += answer.output_text + "\n\n"
            previous = answer.id


def test_a_response_may_be_continued_many_times_at_once(site: Site) -> None:
    first = site.openai.responses.create(input="Hello", max_output_tokens=20, **GREEDY)

    def go_on(number: int) -> str:
        asked: dict[str, Any] = {"input": f"Go on {number % 3}", "previous_response_id": first.id, **GREEDY}
        return site.openai.responses.create(max_output_tokens=20, **asked).output_text

    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(go_on, range(12)))
    assert together == [go_on(number) for number in range(3)] * 4


def test_a_stream_has_the_events_of_the_client(site: Site) -> None:
    whole = site.openai.responses.create(input="Hello", max_output_tokens=20, **GREEDY)
    events = list(site.openai.responses.create(input="Hello", max_output_tokens=20, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 10
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == whole.output_text == last.response.output_text
    follow: dict[str, Any] = {"input": "More", "max_output_tokens": 9, **GREEDY}
    (one, two) = (
        site.openai.responses.create(previous_response_id=found, **follow) for found in (whole.id, last.response.id)
    )
    assert one.output_text == two.output_text


def test_structured_output(site: Site) -> None:
    answer = site.openai.responses.parse(input="Hello", text_format=Animal, temperature=1.0, model="small")
    assert isinstance(answer.output_parsed, Animal)
    assert answer.status == "completed"
    with site.openai.responses.stream(
        input="Hello", text_format=Animal, temperature=1.0, model="small", previous_response_id=answer.id
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Animal)
    again = site.openai.responses.parse(
        input="Another", text_format=Animal, temperature=1.0, model="small", previous_response_id=answer.id
    )
    assert isinstance(again.output_parsed, Animal)
    for form in ({"type": "json_schema", "name": "x"}, {"type": "json_object", "schema": {}}):
        check_error(site.post("/v1/responses", json={"input": "a", "text": {"format": form}}), 400, "text.format")
    wrong = {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}
    response = site.post("/v1/responses", json={"input": "a", "text": {"format": wrong}})
    check_error(response, 400, "strin")
    assert response.json()["error"]["param"] == "text.format.schema"


def test_stored_responses_are_found_and_deleted(site: Site) -> None:
    answer = site.openai.responses.create(input="Hello", max_output_tokens=5, **GREEDY)
    assert site.openai.responses.retrieve(answer.id) == answer
    site.openai.responses.delete(answer.id)
    for call in (site.openai.responses.retrieve, site.openai.responses.delete):
        with pytest.raises(openai.NotFoundError, match=answer.id):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        site.openai.responses.create(input="More", previous_response_id=answer.id, **GREEDY)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    unstored = site.openai.responses.create(input="Hello", max_output_tokens=5, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        site.openai.responses.retrieve(unstored.id)


def test_the_least_recently_used_response_makes_room(start: StartServer, model: gecko.Gecko) -> None:
    site = start(response_bytes=2 * model.empty_state().num_bytes + 8000)
    first, second = (site.openai.responses.create(input="a", max_output_tokens=3, **GREEDY).id for _ in range(2))
    site.openai.responses.create(input="b", previous_response_id=first, max_output_tokens=3, store=False, **GREEDY)
    third = site.openai.responses.create(input="a", max_output_tokens=3, **GREEDY).id
    found = [httpx2.get(f"{site.url}/v1/responses/{one}").status_code for one in (first, second, third)]
    assert found == [200, 404, 200]


def test_the_store_counts_what_it_holds(model: gecko.Gecko) -> None:
    one = StoredResponse(b"{}", model.empty_state(), [1])
    store = ResponseStore(one.num_bytes)
    for name in ("a", "a", "b"):
        store.delete(name)
        store.put(name, one)
    assert (store.get("a"), store.get("b")) == (None, one)
    assert store.delete("b") and not store.delete("b")
    store.put("c", StoredResponse(b"{ }", model.empty_state(), [1]))
    store.put("d", StoredResponse(b"{}", model.empty_state(), [1], frozenset({"f"})))
    assert store.get("c") is None and store.get("d") is None, "they are larger than the store"
    store.put("d", one)
    assert store.get("d") is one


@pytest.mark.parametrize("further", [0, 18])
def test_an_answer_that_ended_at_a_stop_string_continues_without_it(
    start: StartServer, model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch, further: int
) -> None:
    """The engine has read the stop string, or is ahead of it; only the answer is read again, not what was before it."""
    long = "Hello " * 40
    whole = greedy(model, f"User: {long.strip()}\n\nAssistant:", 40)
    stop = whole[20:22]
    expected = whole.partition(stop)[0]
    site = start()
    monkeypatch.setattr(site.service.model.chat.__class__, "stops", (stop,))
    tokens = len(expected) + len(stop) + further
    first = site.openai.responses.create(input=long, max_output_tokens=tokens, **GREEDY)
    assert (first.output_text, first.status) == (expected, "completed")
    before = read_tokens(site)
    second = site.openai.responses.create(input="More", previous_response_id=first.id, max_output_tokens=10, **GREEDY)
    text = f"User: {long.strip()}\n\nAssistant:{first.output_text}\n\nUser: More\n\nAssistant:"
    assert second.output_text == greedy(model, text, 10).partition(stop)[0]
    assert read_tokens(site) - before == len(first.output_text) + len("\n\nUser: More\n\nAssistant:")


@pytest.fixture(scope="module")
def templated(model: gecko.Gecko, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("template")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(model, tokenizer, folder) as site:
        yield site


def test_a_template_closes_the_turn_of_the_answer(templated: Site, model: gecko.Gecko) -> None:
    first = templated.openai.responses.create(input="Hello", max_output_tokens=12, **GREEDY)
    second = templated.openai.responses.create(
        input="More", instructions="Be short.", previous_response_id=first.id, max_output_tokens=12, **GREEDY
    )
    text = (
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{first.output_text}<|im_end|>\n"
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    # This template writes no document start.
    expected = gecko.generate(model, list(text.encode()), max_new_tokens=12, temperature=0).tokens[0]
    assert second.output_text == bytes(expected).decode()
    assert second.usage is not None and second.usage.input_tokens == len(text.encode())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"background": True}, "background"),
    ({"nonsense": 5}, "nonsense"),
    ({"previous_response_id": "resp_gone"}, "resp_gone"),
    ({"previous_response_id": "x" * 5000}, "not found"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"previous_response_id": "a", "state": "b"}, "both"),
    ({"model": "large"}, "small"),
]


def test_bad_requests_are_refused_with_a_reason(site: Site) -> None:
    for change, told in BAD:
        response = site.post("/v1/responses", json={"input": "a", "max_output_tokens": 3, **change})
        check_error(response, 404 if "model" in change else 400, told)
    for name in ("gone", "..%2F..%2Fetc", "x" * 500):
        check_error(httpx2.get(f"{site.url}/v1/responses/{name}"), 404, "")
    assert site.post("/v1/responses", json={"input": "a", "max_output_tokens": 3}).status_code == 200
    site.wait_until_idle()
