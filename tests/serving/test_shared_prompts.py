"""A prompt that several requests share is read once, and does not change their results."""

from __future__ import annotations

import pytest
from serving.texts import Log, alone, request, run, text

import gecko
from gecko.inference import Sampling
from gecko.inference.request import Finished
from gecko.inference.scheduler import Engine


@pytest.mark.parametrize("after", [0, 21])
def test_choices_of_one_prompt_read_it_once(model: gecko.Gecko, after: int) -> None:
    """One request is cancelled meanwhile, one wants no new tokens, and one arrives when half of the prompt is read."""
    state = gecko.generate(model, text(after), max_new_tokens=0).state if after else None
    numbers = enumerate((5, 9, 0, 7, 7))
    choices = [request(text(90), new, Sampling(0.9), seed=seed, state=state) for seed, new in numbers]
    engine, log = Engine(model, rows=5, piece=16), Log()
    ids = [engine.submit(asked) for asked in choices[:4]]
    for _ in range(3):
        log.take(engine.step())
    engine.cancel(ids[0])
    ids.append(engine.submit(choices[4]))
    while not engine.idle:
        log.take(engine.step())
    assert (engine.prompt_tokens_read, engine.prefix_tokens_reused) == (90, 3 * 90)
    assert log.ends[ids[0]].reason == "cancelled"
    for request_id, asked in list(zip(ids, choices, strict=True))[1:]:
        assert log.ids(request_id) == alone(model, asked).tokens[0]
        assert log.ends[request_id] == Finished(request_id, "length", None, after + 90 + asked.max_new_tokens)


@pytest.mark.parametrize("top", [None, 2])
def test_choices_that_wait_for_a_place_read_nothing(model: gecko.Gecko, top: int | None) -> None:
    """Nine choices take their turns in two places, between other prompts; all of the kept state is then free."""
    prompt = text(90)
    choices = [request(prompt, 4 + seed % 3, Sampling(0.9), seed=seed, prompt_logprobs=top) for seed in range(9)]
    others = [request(text(30, seed), 5) for seed in range(4)]
    engine = Engine(model, rows=2, piece=16)
    ids, log = run(engine, *choices, *others)
    assert (engine.prompt_tokens_read, engine.prefix_tokens_reused) == (90 + 4 * 30, 8 * 90)
    for request_id, asked in zip(ids, [*choices, *others], strict=True):
        assert log.ids(request_id) == alone(model, asked).tokens[0]
        assert log.ends[request_id].position == len(asked.prompt) + asked.max_new_tokens
    assert len(log.prompts) == (9 if top else 0)
    assert not engine._results


def test_a_kept_prompt_is_dropped_with_the_last_that_waits_for_it(model: gecko.Gecko) -> None:
    prompt = text(40)
    engine = Engine(model, rows=1)
    ids = [engine.submit(request(prompt, 50, seed=seed)) for seed in range(3)]
    engine.step()
    assert len(engine._results) == 1
    for request_id in ids[1:]:
        engine.cancel(request_id)
    engine.step()
    assert not engine._results


def test_equal_prompts_after_other_states_are_read_each(model: gecko.Gecko) -> None:
    books = [gecko.generate(model, text(length), max_new_tokens=0).state for length in (33, 5)]
    asked = [request(text(50), state=state) for state in (None, *books)]
    engine = Engine(model, rows=3)
    ids, log = run(engine, *asked)
    assert engine.prompt_tokens_read == 150
    assert [log.ids(request_id) for request_id in ids] == [alone(model, one).tokens[0] for one in asked]
