"""``echo`` with ``logprobs``: the log-probabilities of prompts are the model's, in OpenAI's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving.conftest import StartServer
from serving.sites import OK, Site, alone, check_error, distributions, document, serving

import gecko
from gecko.data import Tokenizer
from gecko.serving.options import Limits

TEXTS = ["abc", "xyz ü, and more", "a" * 90]


def echoed(site: Site, **asked: Any) -> list[dict[str, Any]]:
    """Return the choices, and assert that those of a stream join to the same."""
    asked = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 0, **asked}
    choices = site.post(json=asked).json()["choices"]
    stream = site.openai.completions.create(model="small", stream=True, **asked)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        (part,) = chunk.model_dump()["choices"]
        known = joined.setdefault(part["index"], {**part, "text": "", "logprobs": {name: [] for name in LISTS}})
        known["text"] += part["text"]
        for name in LISTS:
            known["logprobs"][name] += (part["logprobs"] or {}).get(name, [])
        known.update(finish_reason=part["finish_reason"], position=part["position"])
    assert [joined[index] for index in range(len(choices))] == choices
    return choices


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("new", [0, 1, 7])
def test_the_prompt_has_the_models_log_probabilities(site: Site, model: gecko.Gecko, new: int) -> None:
    """Every prompt of a batch, whatever the others are; and after it the tokens of the answer."""
    prompts = [document(text) for text in TEXTS]
    for choice, ids, text in zip(echoed(site, prompt=prompts, max_tokens=new), prompts, TEXTS, strict=True):
        written = alone(model, ids, new, temperature=0)
        assert choice["text"] == text + written
        assert (choice["finish_reason"], choice["position"]) == ("length", len(ids) + new)
        told, every = choice["logprobs"], [*ids, *written.encode()]
        chances = distributions(model, every[:-1] if new else every)
        assert [len(told[name]) for name in LISTS] == [len(every)] * 4
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        own = chances[range(len(every) - 1), every[1:]]
        assert told["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
        for row, top, value in zip(chances, told["top_logprobs"][1:], told["token_logprobs"][1:], strict=False):
            assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
            assert value <= max(top.values())
        whole = (text + written).encode()
        for token, offset in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
            assert token.startswith("token_id:") or (text + written)[offset] == token
        assert bytes(every[1:]) == whole


def test_the_most_likely_token_is_equal_to_the_best_alternative(site: Site, model: gecko.Gecko) -> None:
    """By which clients tell greedy continuations."""
    ids = document("abc") + list(alone(model, document("abc"), 9, temperature=0).encode())
    told = echoed(site, prompt=ids)[0]["logprobs"]
    pairs = list(zip(told["token_logprobs"], told["top_logprobs"], strict=True))[1:]
    greedy = [own == max(top.values()) for own, top in pairs]
    assert greedy[-9:] == [True] * 9
    assert greedy == (distributions(model, ids[:-1]).argmax(-1) == torch.tensor(ids[1:])).tolist()


def test_texts_ids_and_choices_get_the_same(site: Site) -> None:
    (one,) = echoed(site, prompt="xyz")
    assert echoed(site, prompt=document("xyz"), n=3) == [{**one, "index": index} for index in range(3)]
    assert echoed(site, prompt=["abc", "xyz"])[1] == {**one, "index": 1}


def test_known_beginnings_and_long_prompts(start: StartServer, model: gecko.Gecko) -> None:
    """The whole prompt has log-probabilities, although the prefix cache knows it and its pieces are many."""
    site = start(prefix_cache_bytes=1 << 20)
    ids = document("many words, " * 800)
    site.post(json={**OK, "prompt": ids})
    own = distributions(model, ids)[range(len(ids) - 1), ids[1:]]
    for _ in range(2):
        found = site.post(json={"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}).json()["choices"][0]
        assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
        assert found["logprobs"]["top_logprobs"] == [None] + [{}] * (len(ids) - 1)


def test_the_token_that_stops_has_an_entry_and_no_text(site: Site, model: gecko.Gecko) -> None:
    """Clients that score prompts drop the last entry, as the one after the prompt."""
    (choice,) = echoed(site, prompt="abc", max_tokens=1, logit_bias={"256": 100})
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert len(choice["logprobs"]["tokens"]) == 5
    expected = distributions(model, document("abc"))[-1, 256]
    assert choice["logprobs"]["tokens"][-1] == "token_id:256"
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(float(expected), abs=1e-4)
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "logit_bias": {"256": 100}}
    spoken = site.post("/v1/chat/completions", json={**asked, "max_tokens": 3}).json()["choices"][0]
    assert (spoken["message"]["content"], spoken["logprobs"]) == ("", {"content": []})


def test_after_a_state_the_first_token_has_none(start: StartServer, model: gecko.Gecko, tmp_path: Path) -> None:
    site = start(states=tmp_path)
    gecko.generate(model, document("once"), max_new_tokens=0).state.save(tmp_path / "book.state")
    (choice,) = site.post(
        json={"prompt": " upon", "state": "book", "echo": True, "logprobs": 1, "max_tokens": 0}
    ).json()["choices"]
    own = distributions(model, document("once upon"))[range(4, 9), list(b" upon")][1:]
    assert choice["text"] == " upon" and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)


def test_pieces_of_words_keep_their_place(model: gecko.Gecko, spaced: Tokenizer, tmp_path: Path) -> None:
    with serving(model, spaced, tmp_path) as site:
        asked = {"prompt": "the the", "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {"5": 100}}
        choice = site.post(json=asked).json()["choices"][0]
    assert choice["text"] == "the the the"
    assert choice["logprobs"]["tokens"] == ["token_id:0", " the", " the", " the"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 7]


def test_nothing_to_write_needs_something_to_repeat(site: Site) -> None:
    check_error(site.post(json={**OK, "max_tokens": 0}), 400, "at least 1 without echo")
    whole = site.post(json={**OK, "max_tokens": 0, "echo": True}).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["logprobs"]) == ("abc", None)
    assert whole["usage"]["completion_tokens"] == 0
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    check_error(site.post("/v1/chat/completions", json=chat), 400, "max_tokens")


def test_a_prompt_that_was_not_read_in_time_is_no_answer(start: StartServer) -> None:
    """The first prompt has its tokens; the second one's log-probabilities are missing."""
    site = start(limits=Limits(rows=1, queue=5, seconds=0.7, new_tokens=100_000))
    asked = {"prompt": ["abc", "xyz"], "echo": True, "logprobs": 0, "max_tokens": 100_000}
    check_error(site.post(json=asked), 504, "time limit")
