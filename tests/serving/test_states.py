"""States of conversations, saved and deleted over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving.conftest import StartServer
from serving.sites import GREEDY, Site, check_error, greedy

import gecko
from gecko.serving.limits import ApiError
from gecko.serving.stores import SavedStates


def begun(site: Site) -> tuple[str, str]:
    """Return the id of a response, and the conversation up to the next turn."""
    answer = site.openai.responses.create(input="Hello", max_output_tokens=20, **GREEDY)
    return answer.id, f"User: Hello\n\nAssistant:{answer.output_text}\n\n"


@pytest.fixture
def writable(start: StartServer, tmp_path: Path) -> Site:
    return start(states=tmp_path, states_bytes=1 << 20)


def test_a_saved_conversation_continues_as_if_read_anew(writable: Site, model: gecko.Gecko) -> None:
    """By every route, and also after the response is gone."""
    response, text = begun(writable)
    saved = writable.post("/v1/states", json={"name": "hello", "response_id": response})
    assert (saved.status_code, saved.json()["id"]) == (201, "hello")
    assert saved.json()["position"] == len(text.encode()) + 1
    writable.openai.responses.delete(response)
    expected = greedy(model, text + "User: More\n\nAssistant:", 20)
    asked: dict[str, Any] = {"extra_body": {"state": "hello"}, **GREEDY}
    more = writable.openai.responses.create(input="More", max_output_tokens=20, **asked)
    assert more.output_text == expected
    messages: Any = [{"role": "user", "content": "More"}]
    chat = writable.openai.chat.completions.create(messages=messages, max_tokens=20, **asked)
    assert chat.choices[0].message.content == expected
    last = writable.openai.responses.create(input="End", previous_response_id=more.id, max_output_tokens=20, **GREEDY)
    text += f"User: More\n\nAssistant:{expected}\n\nUser: End\n\nAssistant:"
    assert last.output_text == greedy(model, text, 20)


def test_states_are_listed_and_deleted(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    for name in ("b", "a"):
        assert writable.post("/v1/states", json={"name": name, "response_id": response}).status_code == 201
    listed = httpx2.get(f"{writable.url}/v1/states").json()["data"]
    assert [(one["id"], one["bytes"]) for one in listed] == [
        (name, (tmp_path / f"{name}.state").stat().st_size) for name in ("a", "b")
    ]
    assert httpx2.get(f"{writable.url}/v1/states/a").json()["position"] > 10
    assert httpx2.delete(f"{writable.url}/v1/states/a").json()["deleted"]
    for call in (httpx2.get, httpx2.delete):
        check_error(call(f"{writable.url}/v1/states/a"), 404, "'a'")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["b.state"]


def test_names_stay_inside_of_the_folder(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    for name in ("../a", "/etc/a", "..", ".a", "", "a/b", "a\0", "é", "a" * 101, "-a"):
        check_error(writable.post("/v1/states", json={"name": name, "response_id": response}), 400, "name")
    for name in ("..%2Fa", "%2Fetc%2Fpasswd", "%00"):
        for call in (httpx2.get, httpx2.delete):
            assert call(f"{writable.url}/v1/states/{name}").status_code == 404
    assert list(tmp_path.iterdir()) == []


def test_bad_requests_change_nothing(writable: Site, tmp_path: Path) -> None:
    response, _ = begun(writable)
    (tmp_path / "mine.state").write_text("mine")
    for body, status, told in (
        ({"name": "mine", "response_id": response}, 409, "mine"),
        ({"name": "a", "response_id": "resp_gone"}, 404, "resp_gone"),
        ({"name": "a"}, 400, "response_id"),
        ({"response_id": response}, 400, "name"),
        ({"name": 5, "response_id": response}, 400, "name"),
        ({"name": "a", "response_id": response, "path": "/etc"}, 400, "path"),
    ):
        check_error(writable.post("/v1/states", json=body), status, told)
    check_error(httpx2.get(f"{writable.url}/v1/states/mine"), 400, "")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.state", "mine")]
    writable.wait_until_idle()


def test_states_are_read_only_unless_there_is_a_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    model.empty_state().save(tmp_path / "book.state")
    for options in ({"states": tmp_path}, {"states_bytes": 1 << 20}):
        site = start(**options)
        response, _ = begun(site)
        check_error(site.post("/v1/states", json={"name": "a", "response_id": response}), 403, "--states-disk")
        check_error(httpx2.delete(f"{site.url}/v1/states/book"), 403, "--states-disk")
    assert [path.name for path in tmp_path.iterdir()] == ["book.state"]


def test_all_files_together_stay_below_the_limit(start: StartServer, tmp_path: Path, model: gecko.Gecko) -> None:
    """Also if many clients save at once, and with files that no client saved."""
    model.empty_state().save(tmp_path / "book.state")
    size = (tmp_path / "book.state").stat().st_size
    limit = int(3.9 * size) + 20_000
    site = start(states=tmp_path, states_bytes=limit)
    response, _ = begun(site)

    def save(number: int) -> int:
        return site.post("/v1/states", json={"name": f"s{number}", "response_id": response}).status_code

    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(save, range(8)))
    assert set(codes) == {201, 400}
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + codes.count(201)
    assert sum(path.stat().st_size for path in files) <= limit
    check_error(site.post("/v1/states", json={"name": "z", "response_id": response}), 400, "Delete some")
    assert httpx2.delete(f"{site.url}/v1/states/book").status_code == 200
    assert save(9) == 201


def test_one_name_is_saved_once(tmp_path: Path, model: gecko.Gecko) -> None:
    states = SavedStates(tmp_path, 1 << 20)

    def save(_: int) -> str | None:
        try:
            return states.save("a", model.empty_state())["id"]
        except ApiError as error:
            return error.code

    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(save, range(8)))
    assert sorted(map(str, ends)) == ["a"] + ["state_exists"] * 7
