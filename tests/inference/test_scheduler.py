"""Continuous batching: every text gets what it would get alone, whatever else runs."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.texts import Log, alone, request, run, text
from torch import Tensor

import gecko
from gecko.inference import Sampling, scheduler
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Finished, KeptStates, PromptRead, QueueFullError, Request, Token
from gecko.inference.sampling import Sampler
from gecko.inference.scheduler import AGEING, Engine

MAX_PIECE = 24

SAMPLINGS = st.sampled_from(
    [
        Sampling(0.0), Sampling(0.9), Sampling(0.0, repetition_penalty=1.5), Sampling(1.0, top_k=20, top_p=0.8),
        Sampling(0.8, min_p=0.02, repetition_penalty=1.2, logit_bias={3: 4.0, 260: -100.0}), Sampling(1.2, top_p=0.9),
        Sampling(0.0, presence_penalty=1.0), Sampling(0.9, frequency_penalty=0.7, presence_penalty=-1.5),
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def books(model: gecko.Gecko) -> list[gecko.GeckoState | None]:
    return [None, None, *(gecko.generate(model, text(length), max_new_tokens=0).state for length in (33, 5))]


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, Request, int, int | None]]:
    """Draw requests, each with the step at which it arrives, the number of the book that it continues, and the step at
    which it is cancelled, or None."""
    found: list[tuple[int, Request, int, int | None]] = []
    for index in range(draw(st.integers(1, 8))):
        again = bool(found) and draw(st.booleans())
        asked = request(
            found[-1][1].prompt.clone() if again else text(draw(st.integers(1, 70)), index),
            draw(st.integers(0, 14)), draw(SAMPLINGS), seed=draw(st.integers(0, 99)),
            stop_tokens=frozenset(range(draw(st.integers(0, 9)), 264, 10)),
            logprobs=draw(st.sampled_from([None, 0, 3])), prompt_logprobs=(None, 2, 0)[index % 3],
        )  # fmt: skip
        end = draw(st.none() | st.none() | st.integers(0, 25))
        found.append((draw(st.integers(0, 12)), asked, draw(st.integers(0, 3)), end))
    return found


@settings(max_examples=20)
@given(arriving=arrivals(), rows=st.integers(1, 4), piece=st.none() | st.integers(1, MAX_PIECE), cached=st.booleans())
def test_every_text_is_as_if_alone(
    model: gecko.Gecko, books: list[gecko.GeckoState | None], arriving: list[tuple[int, Request, int, int | None]],
    rows: int, piece: int | None, cached: bool,
) -> None:  # fmt: skip
    engine = Engine(model, rows=rows, piece=piece, prefix_cache=PrefixCache(1 << 20) if cached else None)
    log, ids = Log(), dict[int, int]()
    before = [None if book is None else book.map(torch.clone) for book in books]
    requests = [replace(asked, state=books[book]) for _, asked, book, _ in arriving]
    for step in range(10_000):
        for index, (begin, _, _, end) in enumerate(arriving):
            if begin == step:
                ids[index] = engine.submit(requests[index])
            if end == step and index in ids:
                engine.cancel(ids[index])
        log.take(engine.step())
        assert engine.active <= rows
        assert engine.active + engine.queued == len(ids) - len(log.ends)
        if len(ids) == len(arriving) and engine.idle:
            break
    assert (engine.active, engine.queued) == (0, 0)
    assert engine.tokens_made == sum(map(len, log.tokens.values()))
    for index, asked in enumerate(requests):
        as_alone(model, asked, log, ids[index])
    for book, old in zip(books[2:], before[2:], strict=True):
        assert all(map(torch.equal, book.tensors().values(), old.tensors().values()))


def finish(engine: Engine, log: Log) -> None:
    while not engine.idle:
        log.take(engine.step())


def as_alone(model: gecko.Gecko, asked: Request, log: Log, request_id: int) -> None:
    expected, end, tokens = alone(model, asked), log.ends[request_id], log.ids(request_id)
    if end.reason == "cancelled":
        assert tokens == expected.tokens[0][: len(tokens)]
        assert end.position <= asked.start_position + len(asked.prompt) + len(tokens)
        return
    assert tokens == expected.tokens[0]
    stop = end.stop_token
    reason, position = expected.finish_reasons[0], expected.state.position[0]
    assert end == Finished(request_id, reason, None, position, stop)
    assert (stop is not None) == (reason == "stop" and asked.logprobs is not None)
    assert stop is None or stop.token in asked.stop_tokens
    has_the_models_log_probabilities(model, asked, [*log.tokens.get(request_id, []), *filter(None, [stop])])
    has_those_of_its_prompt(model, asked, log.prompts.get(request_id))


def chances_of(model: gecko.Gecko, asked: Request, more: list[int]) -> Tensor:
    """Return the log-probabilities after every token of the prompt and of what follows."""
    with torch.no_grad():
        logits, _ = model(torch.cat([asked.prompt, torch.tensor(more).long()]).unsqueeze(0), state=asked.state)
    return logits[0].double().log_softmax(-1)


def has_those_of_its_prompt(model: gecko.Gecko, asked: Request, event: PromptRead | None) -> None:
    """Without a prefix cache that took them away: the whole prompt, also after a state."""
    number = asked.prompt_logprobs
    assert (event is None) == (number is None)
    if event is None or number is None:
        return
    chances, close = chances_of(model, asked, [])[:-1], {"atol": 1e-4, "rtol": 0}
    assert torch.equal(event.scores.tokens, asked.prompt)
    torch.testing.assert_close(event.scores.logprobs, chances.gather(1, asked.prompt[1:, None])[:, 0], **close)
    for top in (event.scores.top_logprobs, chances.gather(1, event.scores.top_ids)):
        torch.testing.assert_close(top, chances.topk(number).values, **close)


def has_the_models_log_probabilities(model: gecko.Gecko, asked: Request, events: list[Token]) -> None:
    number = asked.logprobs
    if number is None:
        assert all((event.logprob, event.top_logprobs) == (None, ()) for event in events)
        return
    chances = chances_of(model, asked, [event.token for event in events])[len(asked.prompt) - 1 : -1]
    for event, row in zip(events, chances, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-4)
        expected = pytest.approx(row.topk(number).values.tolist(), abs=1e-4)
        assert [value for _, value in event.top_logprobs] == expected
        assert [float(row[token]) for token, _ in event.top_logprobs] == expected


def test_rows_in_use_may_be_asked_for_while_another_thread_steps(model: gecko.Gecko) -> None:
    """Metrics do so. The prompts change their order in the middle of the count."""
    engine = Engine(model)

    class Reader:
        requests = property(lambda self: engine._prefills.rotate() or [0])

    engine._prefills.extend([Reader(), Reader()])
    assert engine.active == 2


def test_weights_that_change_before_a_prompt_is_read_end_that_text(model: gecko.Gecko) -> None:
    """A state belongs to the weights that made it; a text without a state can use the new weights."""
    model = copy.deepcopy(model)
    state = gecko.generate(model, text(20), max_new_tokens=0).state
    engine, log = Engine(model), Log()
    ids = [engine.submit(request(state=state)), engine.submit(request())]
    with torch.no_grad():
        model.embedding.weight.mul_(1.5)
    finish(engine, log)
    assert [log.ends[request_id].reason for request_id in ids] == ["error", "length"]
    assert "ValueError" in str(log.ends[ids[0]].error)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_shortest_prompt_is_read_first(model: gecko.Gecko, rows: int) -> None:
    """In the queue, or of those that have a place."""
    lengths = (90, 50, 70, 20, 10)
    ids, log = run(Engine(model, rows=rows, piece=16), *(request(text(length), 1) for length in lengths))
    assert [lengths[ids.index(one)] for one in log.ends] == sorted(lengths)


def test_a_long_prompt_does_not_stall_the_others(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    engine = Engine(model, rows=4, piece=16)
    running = engine.submit(request(new=1000))
    engine.step()
    for index in range(3):
        engine.submit(request(text(100, index), 2))
    for _ in range(30):
        calls.clear()
        assert sum(event.request_id == running for event in engine.step()) == 1, "a token in every step"
        assert len(calls) <= 1 and sum(length for _, length in calls) <= 16
    assert engine.active == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_prompt_is_not_overtaken_for_ever(model: gecko.Gecko, rows: int) -> None:
    """Although a short prompt arrives with every step."""
    engine = Engine(model, rows=rows, piece=16)
    length, log = 96, Log()
    long = engine.submit(request(text(length), 1))
    for step in range(3 * length // AGEING + 2 * length // 16):
        engine.submit(request(text(10, step), 1))
        log.take(engine.step())
    assert long in log.ends


@pytest.mark.parametrize(("speed", "piece"), [(1_000, 512), (30_000, 2048)])
def test_pieces_are_as_long_as_the_time_of_a_step_allows(
    model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch, speed: int, piece: int
) -> None:
    """They have ``piece_length`` tokens while nothing else runs."""
    engine = Engine(model, rows=2)
    tokens_read = 0
    hidden = model.hidden

    def watched(tokens: Tensor, **more: Any) -> Any:
        nonlocal tokens_read
        tokens_read += tokens.shape[1]
        return hidden(tokens, **more)

    monkeypatch.setattr(model, "hidden", watched)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: tokens_read / speed)
    read = []
    engine.submit(request(text(4100), 50))
    for _ in range(2):
        engine.step()
        read.append(engine.prompt_tokens_read)
    assert read == [4096, 4100]
    engine.submit(request(text(30_000)))
    for _ in range(6):
        engine.step()
        read.append(engine.prompt_tokens_read)
    assert read[-1] - read[-2] == piece


@pytest.mark.parametrize(("length", "first"), [(768, 768), (769, 512)])
def test_a_short_rest_is_read_with_the_last_piece(model: gecko.Gecko, length: int, first: int) -> None:
    engine = Engine(model, rows=2)
    engine.submit(request(text(5), 50))
    engine.step()
    engine.submit(request(text(length)))
    engine.step()
    assert engine.prompt_tokens_read == 5 + first


MOMENTS = {"queued": (0, 0), "reading": (1, 8), "first": (3, 21), "running": (5, 23), "after": (9, 24)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_cancelling_at_any_moment_frees_the_place(model: gecko.Gecko, moment: str) -> None:
    """After so many steps the text is at that position. To cancel it twice has no effect."""
    engine, log = Engine(model, rows=1, piece=8), Log()
    asked, (steps, position) = request(text(20), 4), MOMENTS[moment]
    victim = engine.submit(asked)
    for _ in range(steps):
        log.take(engine.step())
    engine.cancel(victim)
    engine.cancel(victim)
    assert (engine.active, engine.queued) == (0, 0)
    assert engine.idle == (moment == "after")
    heir = engine.submit(asked)
    finish(engine, log)
    reason = "length" if moment == "after" else "cancelled"
    assert log.ends[victim] == Finished(victim, reason, None, position)
    assert log.ids(heir) == alone(model, asked).tokens[0]


def test_an_engine_that_gave_up_everything_serves_on(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=2, piece=8)
    for length in (3, 50, 9, 9):
        engine.submit(request(text(length)))
    engine.step()
    engine.step()
    engine.cancel(3)
    engine.abandon()
    engine.cancel(5)
    assert (engine.active, engine.queued, engine.idle) == (0, 0, True)
    assert engine.step() == []
    good = request(text(20), 6, Sampling(0.9))
    ids, log = run(engine, good, good)
    assert log.ids(ids[0]) == log.ids(ids[1]) == alone(model, good).tokens[0]


def test_a_text_whose_settings_fail_ends_alone(model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings from which no sampler can be made end only their own text."""
    initialise = Sampler.__init__

    def fail(self: Sampler, samplings: list[Sampling], *more: Any) -> None:
        if any(sampling.top_k == 7 for sampling in samplings):
            raise OverflowError("planted")
        initialise(self, samplings, *more)

    good, bad = request(new=9), request(text(20), sampling=Sampling(1.0, top_k=7))
    expected = alone(model, good).tokens[0]
    monkeypatch.setattr(Sampler, "__init__", fail)
    ids, log = run(Engine(model, rows=3), good, bad, good, good)
    assert [log.ids(ids[index]) for index in (0, 2, 3)] == [expected] * 3
    assert log.ends[ids[1]] == Finished(ids[1], "error", "OverflowError: planted", 20)


def test_the_queue_has_an_end(model: gecko.Gecko) -> None:
    engine, log = Engine(model, rows=2, max_queued=3000), Log()
    ids = [engine.submit(request(new=1)) for _ in range(3000)]
    with pytest.raises(QueueFullError, match="3000 requests wait"):
        engine.submit(request())
    log.take(engine.step())
    engine.submit(request(new=1))
    for request_id in ids[20:]:
        engine.cancel(request_id)
    finish(engine, log)
    assert [end.reason for end in log.ends.values()].count("length") == 21 and len(log.ends) == 3001
    for name in ("rows", "max_queued", "piece"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
            Engine(model, **{name: 0})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_stop_token_comes_before_the_least_number_of_tokens(model: gecko.Gecko, temperature: float) -> None:
    """The tokens are those of a model that cannot draw them until then, and other rows draw them at any time."""
    stops = frozenset(range(0, 264, 3))
    never = Sampling(temperature, logit_bias=dict.fromkeys(stops, -1000.0))
    asked = [
        request(text(20), 30, Sampling(temperature), seed=seed, stop_tokens=stops, min_new_tokens=least, logprobs=1)
        for seed in range(3) for least in (0, 1, 12, 30)
    ]  # fmt: skip
    ids, log = run(Engine(model, rows=8), *asked)
    lengths = set()
    for request_id, one in zip(ids, asked, strict=True):
        before = one.min_new_tokens
        free = alone(model, request(text(20), before, never, seed=one.seed)).tokens[0]
        tokens, end = log.ids(request_id), log.ends[request_id]
        assert tokens[:before] == free
        assert not stops & set(tokens) and len(tokens) >= before
        assert end.reason == ("length" if len(tokens) == 30 else "stop")
        lengths.add(len(tokens) - before)
        has_the_models_log_probabilities(model, one, [*log.tokens.get(request_id, []), *filter(None, [end.stop_token])])
    assert 0 in lengths and len(lengths) > 1


def test_penalties_are_those_of_the_definition(model: gecko.Gecko) -> None:
    """Each step by hand, from the logits of the whole text; other rows have other penalties."""
    samplings = [Sampling(0.0), Sampling(0.0, presence_penalty=1.5), Sampling(0.0, frequency_penalty=0.4),
                 Sampling(0.0, presence_penalty=-0.5, frequency_penalty=2.0)]  # fmt: skip
    ids, log = run(Engine(model, rows=3), *(request(text(9), 25, sampling) for sampling in samplings))
    for request_id, sampling in zip(ids, samplings, strict=True):
        made: list[int] = []
        for _ in range(25):
            with torch.no_grad():
                logits = model(torch.cat([text(9), torch.tensor(made, dtype=torch.int64)])[None])[0][0, -1]
            for token in set(made):
                logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * made.count(token)
            made.append(int(logits.argmax()))
        assert log.ids(request_id) == made
    assert len({tuple(log.ids(request_id)) for request_id in ids}) == len(ids)


OTHER_STATE = "of another model"
BAD: list[tuple[Mapping[str, Any], type[Exception], str]] = [
    ({"prompt": torch.tensor([], dtype=torch.int64)}, ValueError, "at least one token"),
    ({"prompt": torch.tensor(3)}, TypeError, "1-D"),
    ({"prompt": torch.tensor([[3]])}, TypeError, "1-D"),
    ({"prompt": torch.tensor([1.5])}, TypeError, "integers"),
    ({"prompt": torch.tensor([True])}, TypeError, "integers"),
    ({"prompt": [1, 2]}, ValueError, "tensor"),
    ({"prompt": torch.tensor([1, 264])}, ValueError, r"0\.\.263; got 264"),
    ({"prompt": torch.tensor([-1])}, ValueError, r"0\.\.263; got -1"),
    ({"new": -1}, ValueError, "max_new_tokens"),
    ({"seed": 2**70}, ValueError, "seed"),
    ({"logprobs": -1}, ValueError, "logprobs"),
    ({"logprobs": 265}, ValueError, "logprobs"),
    ({"prompt_logprobs": 265}, ValueError, "prompt_logprobs"),
    ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
    ({"min_new_tokens": 6}, ValueError, r"min_new_tokens must be in 0\.\.5"),
    ({"min_new_tokens": 1, "stop_tokens": frozenset(range(300))}, ValueError, "the whole vocabulary"),
    ({"sampling": Sampling(logit_bias={264: 1.0})}, ValueError, r"0\.\.263; got 264"),
    ({"state": 3}, ValueError, "one row; got 3"),
    ({"state": OTHER_STATE}, ValueError, "other weights"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_requests_are_refused_and_touch_nobody(
    model: gecko.Gecko, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    change = dict(change)
    if "state" in change:
        other = gecko.Gecko(model.config)
        change["state"] = other.empty_state() if change["state"] == OTHER_STATE else model.empty_state(3)
    engine, asked, log = Engine(model, rows=2), request(new=6), Log()
    good = engine.submit(asked)
    log.take(engine.step())
    with pytest.raises(error, match=message):
        engine.submit(request(**change))
    finish(engine, log)
    assert log.ids(good) == alone(model, asked).tokens[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=3, repetition_penalty=1.2)])
def test_a_text_whose_numbers_are_not_finite_ends_alone(model: gecko.Gecko, value: float, sampling: Sampling) -> None:
    """The embedding of one token is broken: texts that read it get only non-finite logits."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.embedding.weight[255] = value
    forced = Sampling(0.0, logit_bias={255: 1000.0})
    never = Sampling(sampling.temperature, sampling.top_k, None, None, sampling.repetition_penalty, {255: -1000.0})
    prompts = [text(length).clamp(max=254) for length in (5, 12, 30)]
    good = [request(prompt, 12, never, seed=4) for prompt in prompts]
    expected = [alone(model, asked).tokens[0] for asked in good]
    # One breaks at its prompt, one after its first token; both are between other rows.
    bad = [request(torch.tensor([1, 255, 2]), 9, never), request(text(3).clamp(max=254), 9, forced)]
    scored = request(bad[0].prompt, 0, prompt_logprobs=1)
    engine = Engine(broken, rows=6, piece=16)
    ids, log = run(engine, good[0], bad[0], good[1], bad[1], good[2], scored)
    assert [log.ids(ids[index]) for index in (0, 2, 4)] == expected
    assert [log.ends[ids[index]].reason for index in (0, 2, 4)] == ["length"] * 3
    for index, tokens in ((1, []), (3, [255]), (5, [])):
        end = log.ends[ids[index]]
        assert (end.reason, log.ids(ids[index])) == ("error", tokens)
        assert end.error is not None and "finite" in end.error
    # Their rows then serve other requests without any trace.
    ids, log = run(engine, *good, *good)
    assert list(map(log.ids, ids)) == expected * 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_whose_scores_overflow_ends_alone(model: gecko.Gecko, temperature: float) -> None:
    """By a bias, and a penalty that enlarges it."""
    prompt, sampling = torch.tensor([3, 4]), Sampling(temperature, None, None, None, 0.01, {3: 1.7e308})
    good, bad = request(new=9, sampling=Sampling(temperature)), request(prompt, 9, sampling)
    ids, log = run(Engine(model, rows=3), good, bad, good)
    assert [log.ids(ids[index]) for index in (0, 2)] == [alone(model, good).tokens[0]] * 2
    assert (log.ends[ids[1]].reason, log.ids(ids[1])) == ("error", [])
    assert "finite scores" in str(log.ends[ids[1]].error)
    with pytest.raises(ValueError, match=r"row 0: .*finite scores"):
        alone(model, bad)


@pytest.mark.parametrize("window", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_dtypes_of_a_state_reach_no_other_text(
    model: gecko.Gecko, weights: torch.dtype, window: torch.dtype
) -> None:
    """Neither those that are read in one call with its prompt, nor those that decode after it. To widen numbers
    changes nothing at all: a copy of the model in float32 has the same name."""
    model = copy.deepcopy(model).to(weights)
    state = gecko.generate(model, text(20), max_new_tokens=0).state
    logs = []
    for book in (state, state.with_window(window, window)):
        engine = Engine(model)
        asked = request(text(4), 30, Sampling(0.9), seed=1, logprobs=2, state=book)
        kept = KeptStates()
        other = request(text(5), 30, Sampling(0.9), seed=2, logprobs=2, state=state, keep=kept)
        found = []
        for requests in ((asked,), (other,), (asked, other), (other,)):  # the slots of the first stay
            ids, log = run(engine, *requests)
            found += [log.tokens[one] for one in ids]
        logs.append([[(event.token, event.logprob, event.top_logprobs) for event in events] for events in found])
        assert kept.end is not None
        own = [tensor.dtype for tensor in model.empty_state().tensors().values()]
        assert [tensor.dtype for tensor in kept.end.state.tensors().values()] == own
    before, now = logs
    assert [now[place] == before[place] for place in (1, 3, 4)] == [True] * 3
    dtypes = {tensor.dtype for tensor in state.mixers[0].attention.tensors().values()}
    assert now == before or any(torch.promote_types(dtype, window) != window for dtype in dtypes)


def test_the_model_keeps_its_mode_and_pytorch_its_random_numbers(model: gecko.Gecko) -> None:
    """It is in evaluation mode only meanwhile."""
    before, modes, model = torch.get_rng_state(), [], copy.deepcopy(model).train()
    model.blocks[0].register_forward_pre_hook(lambda block, _: modes.append(block.training))
    run(Engine(model), request(sampling=Sampling(1.0)))
    gecko.generate(model, [1], max_new_tokens=3, seed=1)
    assert model.training and modes and not any(modes)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_does_not_grow_with_the_texts(model: gecko.Gecko) -> None:
    engine, places = Engine(model, rows=2), []
    for _ in range(2):
        run(engine, request(new=60), request(new=60))
        assert engine._batch.decoder._all is not None
        places.append([tensor.data_ptr() for tensor in engine._batch.decoder._all.tensors().values()])
    assert places[0] == places[1]
    assert not any((engine._batch.sequences, engine._prefills, engine._queue, engine._pending))
