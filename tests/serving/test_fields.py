"""Fields of a request beyond sampling: each does what it says alone, in a stream, in chat, and for every choice."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving.sites import GREEDY, OK, Site, alone, document

import gecko

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
