"""Continuous batching: every text gets what it would get alone, whatever else runs."""

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.texts import Log, alone, request, run, text
from torch import Tensor

import gecko
from gecko.inference import Sampling, scheduler
from gecko.inference.pieces import PiecePace
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Finished, PromptRead, QueueFullError, Request, Token
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


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, Request, int | None]]:
    """Draw requests, each with the step at which it arrives and the step at which it is cancelled, or None."""
    found = []
    for index in range(draw(st.integers(1, 8))):
        again = bool(found) and draw(st.booleans())
        asked = request(
            found[-1][1].prompt.clone() if again else text(draw(st.integers(1, 70)), index),
            draw(st.integers(0, 14)), draw(SAMPLINGS), seed=draw(st.integers(0, 99)),
            stop_tokens=frozenset(range(draw(st.integers(0, 9)), 264, 10)),
            logprobs=draw(st.sampled_from([None, 0, 3])), prompt_logprobs=(None, 2, 0)[index % 3],
        )  # fmt: skip
        found.append((draw(st.integers(0, 12)), asked, draw(st.none() | st.none() | st.integers(0, 25))))
    return found


@settings(max_examples=40)
@given(arriving=arrivals(), rows=st.integers(1, 4), piece=st.none() | st.integers(1, MAX_PIECE), cached=st.booleans())
def test_every_text_is_as_if_alone(
    model: gecko.Gecko, arriving: list[tuple[int, Request, int | None]], rows: int, piece: int | None, cached: bool
) -> None:
    engine = Engine(model, rows=rows, piece=piece, prefix_cache=PrefixCache(1 << 20) if cached else None)
    log, ids = Log(), dict[int, int]()
    for step in range(10_000):
        for index, (begin, asked, end) in enumerate(arriving):
            if begin == step:
                ids[index] = engine.submit(asked)
            if end == step and index in ids:
                engine.cancel(ids[index])
        log.take(engine.step())
        assert engine.active <= rows
        assert engine.active + engine.queued == len(ids) - len(log.ends)
        if len(ids) == len(arriving) and engine.idle:
            break
    assert (engine.active, engine.queued) == (0, 0)
    assert engine.tokens_made == sum(map(len, log.tokens.values()))
    for index, (_, asked, _) in enumerate(arriving):
        as_alone(model, asked, log, ids[index])


def as_alone(model: gecko.Gecko, asked: Request, log: Log, request_id: int) -> None:
    expected, end, tokens = alone(model, asked), log.ends[request_id], log.ids(request_id)
    if end.reason == "cancelled":
        assert tokens == expected.tokens[0][: len(tokens)]
        assert end.position <= len(asked.prompt) + len(tokens)
        return
    assert tokens == expected.tokens[0]
    stop = end.stop_token
    reason, position = expected.finish_reasons[0], expected.state.position[0]
    assert end == Finished(request_id, reason, None, position, stop)
    assert (stop is not None) == (reason == "stop" and asked.logprobs is not None)
    assert stop is None or stop.token in asked.stop_tokens
    ending = [] if stop is None else [stop]
    has_the_models_log_probabilities(model, asked, [*log.tokens.get(request_id, []), *ending])
    has_those_of_its_prompt(model, asked, log.prompts.get(request_id))


def has_those_of_its_prompt(model: gecko.Gecko, asked: Request, event: PromptRead | None) -> None:
    """Without a prefix cache that took them away: the whole prompt, also after a state."""
    number = asked.prompt_logprobs
    assert (event is None) == (number is None)
    if event is None or number is None:
        return
    with torch.no_grad():
        logits, _ = model(asked.prompt.unsqueeze(0), state=asked.state)
    chances = logits[0, :-1].double().log_softmax(-1)
    own = chances.gather(1, asked.prompt[1:, None])[:, 0]
    assert torch.equal(event.scores.tokens, asked.prompt)
    torch.testing.assert_close(event.scores.logprobs, own, atol=1e-4, rtol=0)
    torch.testing.assert_close(event.scores.top_logprobs, chances.topk(number).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(chances.gather(1, event.scores.top_ids), chances.topk(number).values, atol=1e-4, rtol=0)


def has_the_models_log_probabilities(model: gecko.Gecko, asked: Request, events: list[Token]) -> None:
    number = asked.logprobs
    if number is None:
        assert all((event.logprob, event.top_logprobs) == (None, ()) for event in events)
        return
    if not events:
        return
    read = torch.cat([asked.prompt, torch.tensor([event.token for event in events])])
    with torch.no_grad():
        logits, _ = model(read.unsqueeze(0))
    chances = logits[0, len(asked.prompt) - 1 : -1].double().log_softmax(-1)
    for event, row in zip(events, chances, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-4)
        assert len(event.top_logprobs) == number
        assert [value for _, value in event.top_logprobs] == pytest.approx(row.topk(number).values.tolist(), abs=1e-4)
        assert [float(row[token]) for token, _ in event.top_logprobs] == pytest.approx(
            row.topk(number).values.tolist(), abs=1e-4
        )


def test_rows_in_use_may_be_asked_for_while_another_thread_steps(model: gecko.Gecko) -> None:
    """Metrics do so. The prompts change their order in the middle of the count."""
    engine = Engine(model)

    class Reader:
        @property
        def requests(self) -> list[int]:
            engine._prefills.rotate()
            return [0]

    engine._prefills.extend([Reader(), Reader()])  # type: ignore[list-item]
    assert engine.active == 2


def test_weights_that_change_before_a_prompt_is_read_end_that_text(model: gecko.Gecko) -> None:
    """A state belongs to the weights that made it; a text without a state can use the new weights."""
    model = copy.deepcopy(model)
    state = gecko.generate(model, text(20), max_new_tokens=0).state
    engine = Engine(model)
    ids = [engine.submit(request(state=state)), engine.submit(request())]
    with torch.no_grad():
        model.embedding.weight.mul_(1.5)
    log = Log()
    while not engine.idle:
        log.take(engine.step())
    assert [log.ends[request_id].reason for request_id in ids] == ["error", "length"]
    assert "ValueError" in str(log.ends[ids[0]].error)


def test_a_text_goes_on_from_its_state(model: gecko.Gecko) -> None:
    books = [gecko.generate(model, text(length), max_new_tokens=0).state for length in (33, 5)]
    asked = [request(text(4, 1), 9, Sampling(0.9), seed=2, state=book) for book in books]
    before = [book.map(torch.clone) for book in books]
    ids, log = run(Engine(model, rows=3), *asked, *asked)
    for request_id, (one, length) in zip(ids, [(asked[0], 33), (asked[1], 5)] * 2, strict=True):
        assert log.ids(request_id) == alone(model, one).tokens[0]
        assert log.ends[request_id].position == length + 4 + 9
    for book, old in zip(books, before, strict=True):
        assert all(torch.equal(tensor, old.tensors()[name]) for name, tensor in book.tensors().items())


def test_a_long_prompt_does_not_stall_the_others(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    engine = Engine(model, rows=4, piece=16)
    running = engine.submit(request(new=1000))
    engine.step()
    for index in range(3):
        engine.submit(request(text(300, index), 2))
    for _ in range(80):
        calls.clear()
        events = engine.step()
        assert sum(event.request_id == running for event in events) == 1, "a token in every step"
        assert len(calls) <= 1
        assert sum(length for _, length in calls) <= 16
    assert engine.active == 1


def test_short_prompts_do_not_wait_for_a_long_one(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=3, piece=16)
    long, short = engine.submit(request(text(3000))), engine.submit(request(text(20), 1))
    log = Log()
    for _ in range(6):
        log.take(engine.step())
    assert log.ends[short].reason == "length"
    assert long not in log.ends


def test_the_shortest_prompt_in_the_queue_is_read_first(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=1, piece=16)
    lengths = (90, 50, 70, 20, 10)
    ids = [engine.submit(request(text(length), 1)) for length in lengths]
    log = Log()
    while not engine.idle:
        log.take(engine.step())
    finished = list(log.ends)
    assert [lengths[ids.index(one)] for one in finished] == sorted(lengths)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_prompt_is_not_overtaken_for_ever(model: gecko.Gecko, rows: int) -> None:
    """Although a short prompt arrives with every step."""
    engine = Engine(model, rows=rows, piece=16)
    length, log = 400, Log()
    long = engine.submit(request(text(length), 1))
    for step in range(3 * length // AGEING + 2 * length // 16):
        engine.submit(request(text(10, step), 1))
        log.take(engine.step())
        if long in log.ends:
            return
    pytest.fail("the long prompt did not end")


@pytest.mark.parametrize(("speed", "piece"), [(1_000, 512), (30_000, 2048), (1_000_000, 4096)])
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


def test_prompts_shorter_than_a_piece_do_not_change_the_pieces(model: gecko.Gecko) -> None:
    """A call of few tokens takes almost as long as one of many."""
    pace = PiecePace(model.config, 0.08)
    pace.record(2048, 0.05)
    pace.record(20, 0.02)
    assert pace.piece == 2048


@pytest.mark.parametrize("moment", ["queued", "reading", "first", "running", "twice", "after"])
def test_cancelling_at_any_moment_frees_the_place(model: gecko.Gecko, moment: str) -> None:
    engine, log = Engine(model, rows=1, piece=8), Log()
    asked = request(text(20), 4)
    victim = engine.submit(asked)
    steps = {"queued": 0, "reading": 1, "first": 3, "running": 5, "twice": 4, "after": 9}[moment]
    for _ in range(steps):
        log.take(engine.step())
    for _ in range(2 if moment == "twice" else 1):
        engine.cancel(victim)
    assert (engine.active, engine.queued) == (0, 0)
    assert engine.idle == (moment == "after")
    heir = engine.submit(asked)
    while not engine.idle:
        log.take(engine.step())
    position = {"queued": 0, "reading": 8, "first": 21, "running": 23, "twice": 22, "after": 24}[moment]
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
    engine = Engine(model, rows=1, max_queued=3)
    for _ in range(3):
        engine.submit(request())
    with pytest.raises(QueueFullError, match="3 requests wait"):
        engine.submit(request())
    engine.step()
    engine.submit(request())
    with pytest.raises(QueueFullError):
        engine.submit(request())
    assert engine.queued == 3


def test_ten_thousand_wait_and_can_be_cancelled(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=2, max_queued=10_000)
    ids = [engine.submit(request(new=1)) for _ in range(10_000)]
    for request_id in ids[20:]:
        engine.cancel(request_id)
    log = Log()
    while not engine.idle:
        log.take(engine.step())
    assert sum(end.reason == "length" for end in log.ends.values()) == 20
    assert len(log.ends) == 10_000


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_stop_token_comes_before_the_least_number_of_tokens(model: gecko.Gecko, temperature: float) -> None:
    """The tokens are those of a model that cannot draw them until then, and other rows draw them at any time."""
    stops = frozenset(range(0, 264, 3))
    never = Sampling(temperature, logit_bias=dict.fromkeys(stops, -1000.0))
    asked = [
        request(text(20), 30, Sampling(temperature), seed=seed, stop_tokens=stops, min_new_tokens=least, logprobs=1)
        for seed in range(4) for least in (0, 1, 12, 30)
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
        ending = [end.stop_token] if end.stop_token is not None else []
        has_the_models_log_probabilities(model, one, [*log.tokens.get(request_id, []), *ending])
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


def test_log_probabilities_of_a_prompt_that_is_not_finite_end_its_text(model: gecko.Gecko) -> None:
    broken = gecko.Gecko(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.head.weight[5] = math.nan
    (request_id,), log = run(Engine(broken), request(new=0, prompt_logprobs=1))
    assert log.ends[request_id].reason == "error" and "finite" in str(log.ends[request_id].error)


def test_no_new_tokens_only_read(model: gecko.Gecko) -> None:
    (request_id,), log = run(Engine(model, rows=1), request(text(30), 0))
    assert log.ends[request_id] == Finished(request_id, "length", None, 30)
    assert log.ids(request_id) == []


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
    while not engine.idle:
        log.take(engine.step())
    assert log.ids(good) == alone(model, asked).tokens[0]


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("max_queued", 0), ("piece", 0)])
def test_wrong_options_are_refused(model: gecko.Gecko, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        Engine(model, **{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=3), Sampling(1.0, repetition_penalty=1.2)])
def test_a_text_whose_numbers_are_not_finite_ends_alone(model: gecko.Gecko, value: float, sampling: Sampling) -> None:
    """The embedding of one token is broken: texts that read it get only non-finite logits."""
    broken = gecko.Gecko(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.embedding.weight[255] = value
    forced = Sampling(0.0, logit_bias={255: 1000.0})
    never = Sampling(sampling.temperature, sampling.top_k, None, None, sampling.repetition_penalty, {255: -1000.0})
    prompts = [text(length).clamp(max=254) for length in (5, 12, 30)]
    good = [request(prompt, 12, never, seed=4) for prompt in prompts]
    # One breaks at its prompt, one after its first token; both are between other rows.
    bad = [request(torch.tensor([1, 255, 2]), 9, never), request(text(3).clamp(max=254), 9, forced)]
    engine = Engine(broken, rows=5, piece=16)
    ids, log = run(engine, good[0], bad[0], good[1], bad[1], good[2])
    for index, asked in zip((0, 2, 4), good, strict=True):
        assert log.ids(ids[index]) == alone(model, asked).tokens[0]
        assert log.ends[ids[index]].reason == "length"
    for index, tokens in ((1, []), (3, [255])):
        end = log.ends[ids[index]]
        assert (end.reason, log.ids(ids[index])) == ("error", tokens)
        assert end.error is not None and "finite" in end.error
    # Their rows then serve other requests without any trace.
    ids, log = run(engine, *good, *good)
    for request_id, asked in zip(ids, good * 2, strict=True):
        assert log.ids(request_id) == alone(model, asked).tokens[0]


def test_a_prompt_that_cannot_be_read_ends_alone(model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = model.hidden

    def fail(tokens: Tensor, **more: Any) -> Any:
        if 7 in tokens:
            raise RuntimeError("planted")
        return hidden(tokens, **more)

    good, bad = request(text(10).clamp(min=8), 6), request(torch.tensor([8] * 20 + [7]))
    expected = alone(model, good).tokens[0]
    monkeypatch.setattr(model, "hidden", fail)
    ids, log = run(Engine(model, rows=2, piece=16), good, bad, good)
    assert log.ids(ids[0]) == log.ids(ids[2]) == expected
    assert log.ends[ids[1]] == Finished(ids[1], "error", "RuntimeError: planted", 16)


def test_the_model_keeps_its_mode_and_pytorch_its_random_numbers(model: gecko.Gecko) -> None:
    before = torch.get_rng_state()
    model.train()
    try:
        run(Engine(model), request(sampling=Sampling(1.0)))
        assert model.training
    finally:
        model.eval()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_of_an_idle_engine_does_nothing(model: gecko.Gecko) -> None:
    engine = Engine(model)
    assert engine.idle
    assert engine.step() == []
    engine.cancel(5)
    assert engine.idle


def test_memory_does_not_grow_with_the_texts(model: gecko.Gecko) -> None:
    engine = Engine(model, rows=2)

    def run() -> list[int]:
        for _ in range(2):
            engine.submit(request(new=300))
        while not engine.idle:
            engine.step()
        assert engine._batch.decoder._all is not None
        return [tensor.data_ptr() for tensor in engine._batch.decoder._all.tensors().values()]

    assert run() == run()
    assert (engine._batch.sequences, engine._prefills, engine._queue, engine._pending) == ([], deque(), {}, [])
