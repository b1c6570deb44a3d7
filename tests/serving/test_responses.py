"""``/v1/responses`` with OpenAI's client: a conversation continues from its state, and nothing is read twice."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving.conftest import StartServer
from serving.sites import GREEDY, City, Site, check_error, greedy
from serving.templates import IGNORANT, SPECIALS

import gecko
from gecko.serving.limits import ApiError
from gecko.serving.stores import ResponseStore, StoredResponse


def read_tokens(site: Site) -> float:
    site.wait_until_idle()
    return site.numbers()["gecko_prompt_tokens_total"]


def say(site: Site, text: Any, tokens: int = 20, **asked: Any) -> Any:
    return site.openai.responses.create(**{**GREEDY, "input": text, "max_output_tokens": tokens, **asked})


def test_a_response(site: Site, model: gecko.Gecko) -> None:
    answer = say(site, "Hello", instructions="Be short.", metadata={"a": "b"})
    expected = greedy(model, "System: Be short.\n\nUser: Hello\n\nAssistant:", 20)
    assert answer.output_text == expected
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", "small")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.instructions, answer.max_output_tokens) == ({"a": "b"}, "Be short.", 20)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (43, 20, 63)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = say(site, parts, instructions="Be short.")
    assert (again.output_text, again.id != answer.id) == (expected, True)


@pytest.mark.parametrize("cached", [0, 1 << 20])
def test_a_conversation_continues_as_if_read_anew(shared: StartServer, model: gecko.Gecko, cached: int) -> None:
    """Turn by turn, from any response, and only the new turn is read."""
    site, text, previous = shared(prefix_cache_bytes=cached), "", None
    for turn in ("Tell me " + "a long story " * 30, "And then?", "The end?"):
        text += f"User: {turn.strip()}\n\nAssistant:"
        before = read_tokens(site)
        answer = say(site, turn, 25, previous_response_id=previous)
        grown = read_tokens(site) - before
        assert answer.output_text == greedy(model, text, 25)
        assert answer.usage.input_tokens == len(text.encode()) + 1
        if previous is not None:
            # The last token of the answer, the end of its turn, and the new turn.
            assert grown == 1 + 2 + len(f"User: {turn}\n\nAssistant:")
            assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens - grown
        text += answer.output_text + "\n\n"
        previous = answer.id


def test_a_response_may_be_continued_many_times_at_once(site: Site) -> None:
    first = say(site, "Hello")

    def go_on(number: int) -> str:
        return say(site, f"Go on {number % 3}", previous_response_id=first.id).output_text

    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(go_on, range(12)))
    assert together == [go_on(number) for number in range(3)] * 4


def test_a_stream_has_the_events_of_the_client(site: Site) -> None:
    whole = say(site, "Hello")
    events = list(say(site, "Hello", stream=True))
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
    assert text == whole.output_text == events[-1].response.output_text
    one, two = (say(site, "More", 9, previous_response_id=found.id) for found in (whole, events[-1].response))
    assert one.output_text == two.output_text


def test_structured_output(site: Site) -> None:
    asked: Any = {"text_format": City, "temperature": 1.0, "model": "small"}
    answer = site.openai.responses.parse(input="Hello", **asked)
    assert isinstance(answer.output_parsed, City)
    assert answer.status == "completed"
    with site.openai.responses.stream(input="Hello", previous_response_id=answer.id, **asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    for form, told in (
        ({"type": "json_schema", "name": "x"}, "text.format"), ({"type": "json_object", "schema": {}}, "text.format"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "strin"}}, "strin"),
    ):  # fmt: skip
        response = site.post("/v1/responses", json={"input": "a", "text": {"format": form}})
        check_error(response, 400, told)
    assert response.json()["error"]["param"] == "text.format.schema"


def test_stored_responses_are_found_and_deleted(site: Site) -> None:
    answer = say(site, "Hello", 5)
    assert site.openai.responses.retrieve(answer.id) == answer
    site.openai.responses.delete(answer.id)
    for call in (site.openai.responses.retrieve, site.openai.responses.delete):
        with pytest.raises(openai.NotFoundError, match=answer.id):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        say(site, "More", previous_response_id=answer.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    unstored = say(site, "Hello", 5, store=False)
    check_error(site.get(f"/v1/responses/{unstored.id}"), 404, "not found")


def test_the_least_recently_used_response_makes_room(start: StartServer, model: gecko.Gecko) -> None:
    site = start(response_bytes=2 * model.empty_state().num_bytes + 8000)
    first, second = (say(site, "a", 3).id for _ in range(2))
    say(site, "b", 3, previous_response_id=first, store=False)
    third = say(site, "a", 3).id
    found = [site.get(f"/v1/responses/{one}").status_code for one in (first, second, third)]
    assert found == [200, 404, 200]


def test_the_store_counts_what_it_holds(model: gecko.Gecko) -> None:
    one = StoredResponse(b"{}", model.empty_state(), [1])
    store = ResponseStore(one.num_bytes)
    for name in ("a", "a", "b"):
        store.put(name, one)
        assert store.get(name) is one
        if name == "a":
            store.delete(name)
    store.put("c", StoredResponse(b"{ }", model.empty_state(), [1]))
    store.put("d", StoredResponse(b"{}", model.empty_state(), [1], frozenset({"f"})))
    assert store.get("c") is None and store.get("d") is None, "they are larger than the store"
    store.put("d", one)
    assert (store.get("b"), store.get("d")) == (None, one)
    with pytest.raises(ApiError, match="not found"):
        store.delete("b")


@pytest.mark.parametrize("further", [0, 18])
def test_an_answer_that_ended_at_a_stop_string_continues_without_it(
    shared: StartServer, model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch, further: int
) -> None:
    """The engine has read the stop string, or is ahead of it; only the answer is read again, not what was before it."""
    long = "Hello " * 40
    whole = greedy(model, f"User: {long.strip()}\n\nAssistant:", 40)
    stop = whole[20:22]
    expected = whole.partition(stop)[0]
    site = shared(prefix_cache_bytes=0)
    monkeypatch.setattr(site.service.model.chat.__class__, "stops", (stop,))
    first = say(site, long, len(expected) + len(stop) + further)
    assert (first.output_text, first.status) == (expected, "completed")
    before = read_tokens(site)
    second = say(site, "More", 10, previous_response_id=first.id)
    text = f"User: {long.strip()}\n\nAssistant:{first.output_text}\n\nUser: More\n\nAssistant:"
    assert second.output_text == greedy(model, text, 10).partition(stop)[0]
    assert read_tokens(site) - before == len(first.output_text) + len("\n\nUser: More\n\nAssistant:")


def test_a_template_closes_the_turn_of_the_answer(shared: StartServer, model: gecko.Gecko) -> None:
    templated = shared(IGNORANT)
    first = say(templated, "Hello", 12)
    second = say(templated, "More", 12, instructions="Be short.", previous_response_id=first.id)
    text = (
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{first.output_text}<|im_end|>\n"
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    # This template writes no document start.
    parts = re.split(r"(<\|im_\w+\|>)", text)
    ids = [index for part in parts for index in ([SPECIALS[part]] if part in SPECIALS else part.encode())]
    expected = gecko.generate(model, ids, max_new_tokens=12, temperature=0).tokens[0]
    assert second.output_text == bytes(expected).decode()
    assert second.usage.input_tokens == len(ids)


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
        check_error(site.get(f"/v1/responses/{name}"), 404, "")
    assert site.post("/v1/responses", json={"input": "a", "max_output_tokens": 3}).status_code == 200
    site.wait_until_idle()
