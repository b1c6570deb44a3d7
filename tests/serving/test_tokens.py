"""``/tokenize`` and ``/detokenize`` answer in vLLM's form, with the ids that a generation reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving.conftest import StartServer
from serving.sites import Site, check_error, document, serving
from serving.waiting import until

import gecko
from gecko.data import Tokenizer
from gecko.runtime.process import __version__
from gecko.serving.options import Limits

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def tokenize(site: Site, **asked: Any) -> dict[str, Any]:
    response = site.post("/tokenize", json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


@pytest.mark.parametrize("text", ["", "abc", "é\n🎉 \0", "a" * 40_000])
def test_ids_of_a_text(site: Site, text: str) -> None:
    ids = document(text)
    assert tokenize(site, prompt=text) == {
        "count": len(ids),
        "max_model_len": 50_000,
        "tokens": ids,
        "token_strs": None,
    }
    bare = tokenize(site, prompt=text, add_special_tokens=False, model="small", messages=None)
    assert (bare["count"], bare["tokens"]) == (len(ids) - 1, ids[1:])
    for given in (ids, ids[1:]):
        answer = site.post("/detokenize", json={"tokens": given, "model": "small"})
        assert (answer.status_code, answer.json()) == (200, {"prompt": text})


def test_names_of_tokens(model: gecko.Gecko, spaced: Tokenizer, tmp_path: Path) -> None:
    with serving(model, spaced, tmp_path) as site:
        found = tokenize(site, prompt="the athe", return_token_strs=True)
        assert site.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the athe"}
    assert found["tokens"][0] == 0 and len(found["tokens"]) == found["count"]
    assert "".join(found["token_strs"][1:]) == " the athe"


def test_ids_of_a_conversation_are_those_that_are_read(site: Site) -> None:
    found = tokenize(site, messages=MESSAGES, add_generation_prompt=True, continue_final_message=False, tools=None)
    assert found["tokens"] == document("System: Be short.\n\nUser: Hi\n\nAssistant:")
    asked = {"messages": MESSAGES, "max_tokens": 1}
    assert site.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == found["count"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "a prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "a prompt or messages"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "surrogate"),
    ("/tokenize", {"prompt": "a" * 50_001}, "50,000"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [5, -1]}, "0..263"),
    ("/detokenize", {"tokens": [264]}, "0..263"),
    ("/detokenize", {"tokens": [10**30]}, "0..263"),
    ("/detokenize", {"tokens": [1] * 65_537}, "65,536"),
]


@pytest.mark.parametrize(("path", "asked", "told"), BAD)
def test_bad_requests_are_refused(site: Site, path: str, asked: dict[str, Any], told: str) -> None:
    content, headers = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    check_error(site.post(path, content=content, headers=headers), 400, told)


def test_other_models_and_bodies(site: Site) -> None:
    for path, good in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        check_error(site.post(path, json={**good, "model": "large"}), 404, "'small'")
        check_error(site.post(path, content=b"{", headers={"Content-Type": "application/json"}), 400, "JSON")
        check_error(site.post(path, json={"prompt": "a" * 300_000}), 413, "200,000")
        assert site.post(path, json=good).status_code == 200
    until(lambda: site.service.memory.taken == 0)


def test_an_answer_that_is_too_large_for_the_memory_is_refused(start: StartServer) -> None:
    site = start(limits=Limits(body_bytes=20_000, memory_bytes=40_000))
    check_error(site.post("/tokenize", json={"prompt": "z" * 15_000}), 400, "bytes of memory")
    until(lambda: site.service.memory.taken == 0)


def test_the_key_is_needed(start: StartServer) -> None:
    site = start(api_key="secret")
    for path, good in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        check_error(site.post(path, json=good), 401, "API key")
        assert site.post(path, json=good, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_version(site: Site) -> None:
    assert httpx2.get(f"{site.url}/version").json() == {"version": __version__}
