"""The process of the server: its connections and the engine's thread."""

import asyncio
import random
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from serving.waiting import PATIENCE

import gecko
from gecko.data import load_tokenizer
from gecko.inference import Sampling
from gecko.inference.request import Finished, Request, Token
from gecko.inference.scheduler import Engine
from gecko.inference.text import ChoiceText
from gecko.serving import server
from gecko.serving.answer import Answer, Worker, WorkerClosedError
from gecko.serving.connection import Turns
from gecko.serving.limits import Metrics
from gecko.serving.prepare import Prepared
from gecko.serving.replies import Reply, Usage

# ---- The engine's thread: no event or request is lost between it and the event loop, whichever of them ends first.


@dataclass
class Bench:
    engine: Engine
    metrics: Metrics
    worker: Worker

    async def submit(self, *texts: str, tokens: int = 20, seconds: float = 60) -> Answer:
        return await self.submit_all([request(text, tokens) for text in texts], seconds)

    async def submit_all(self, requests: list[Request], seconds: float = 60) -> Answer:
        choices = [ChoiceText(index, load_tokenizer("bytes"), [], 0) for index in range(len(requests))]
        prepared, begun = Prepared(requests, choices, Usage(0, 0, 0), 0, Reply()), time.monotonic()
        answer = Answer(prepared, self.worker.cancel, self.metrics, begun, begun + seconds, lambda: None)
        await self.worker.submit(requests, answer)
        return answer


def request(text: str, tokens: int = 20) -> Request:
    ids = torch.tensor([256, *text.encode()])
    return Request(ids, tokens, Sampling(0.0), 0, frozenset({256}), None, None)


@pytest.fixture
def bench(model: gecko.Gecko) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]:
    """Return a function that runs a coroutine with a started worker, and checks that the engine is empty afterwards."""

    def run(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def work_and_close() -> None:
            engine = Engine(model, rows=3, max_queued=50)
            metrics = Metrics(engine, None)
            worker = Worker(engine)
            worker.start()
            try:
                await asyncio.wait_for(work(Bench(engine, metrics, worker)), PATIENCE)
            finally:
                await worker.close()
            assert (engine.active, engine.queued) == (0, 0)
            assert worker._running == {}

        asyncio.run(work_and_close())

    return run


async def tokens_of(running: Answer, count: int) -> list[list[int]]:
    """Return the tokens of ``count`` requests, when all are finished."""
    made: dict[int, list[int]] = {}
    finished = 0
    while finished < count:
        event = await running.next()
        assert isinstance(event, Token | Finished)
        if isinstance(event, Token):
            made.setdefault(event.request_id, []).append(event.token)
        else:
            assert event.reason == "length"
            finished += 1
    return [made[request_id] for request_id in sorted(made)]


def alone(model: gecko.Gecko, text: str, tokens: int = 20) -> list[int]:
    return gecko.generate(model, [256, *text.encode()], max_new_tokens=tokens, temperature=0).tokens[0]


def test_requests_get_their_own_tokens(bench: Any, model: gecko.Gecko) -> None:
    async def work(bench: Bench) -> None:
        runnings = [await bench.submit(*(f"{first} {second}" for second in range(3))) for first in range(4)]
        for first, running in enumerate(runnings):
            assert await tokens_of(running, 3) == [alone(model, f"{first} {second}") for second in range(3)]
            running.close()

    bench(work)


def test_all_or_none_are_taken(bench: Any) -> None:
    async def work(bench: Bench) -> None:
        wrong = Request(torch.tensor([999]), 5, Sampling(0.0), 0, frozenset(), None, None)
        with pytest.raises(ValueError, match="999"):
            await bench.submit_all([request("a"), wrong, request("b")])
        running = await bench.submit("a")
        await tokens_of(running, 1)
        assert bench.engine.tokens_made == 20

    bench(work)


def test_cancelled_requests_send_nothing_more(bench: Any, model: gecko.Gecko) -> None:
    async def work(bench: Bench) -> None:
        running = await bench.submit("a", "b", tokens=3000)
        other = await bench.submit("c")
        event = await running.next()
        assert event is not None
        bench.worker.cancel([event.request_id])
        running.close()
        running.close()
        assert await tokens_of(other, 1) == [alone(model, "c")]

    bench(work)


def test_the_alarm_rings(bench: Any) -> None:
    async def work(bench: Bench) -> None:
        running = await bench.submit("a", tokens=3000, seconds=0.1)
        while await running.next() is not None:
            pass
        running.close()

    bench(work)


def test_who_leaves_before_being_taken_in_makes_room_for_who_comes_next(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of clients may do so during one long step."""

    async def work(bench: Bench) -> None:
        step, release = bench.engine.step, threading.Event()
        running = await bench.submit("a", tokens=3000)
        monkeypatch.setattr(bench.engine, "step", lambda: (release.wait(PATIENCE), step())[1])
        for _ in range(3):
            leaving = asyncio.ensure_future(bench.submit(*["b"] * 40))
            await asyncio.sleep(0)
            leaving.cancel()
        coming = asyncio.ensure_future(bench.submit(*["c"] * 40, tokens=1))
        await asyncio.sleep(0)
        release.set()
        await tokens_of(await coming, 40)
        running.close()

    bench(work)


def test_cancelling_at_any_moment_leaves_nothing(bench: Any) -> None:
    chance = random.Random(0)

    async def visit(bench: Bench) -> None:
        running = await bench.submit("some words", "more", tokens=1_000_000)
        try:
            while await running.next() is not None:
                pass
        finally:
            running.close()

    async def work(bench: Bench) -> None:
        for _ in range(15):
            visits = [asyncio.ensure_future(visit(bench)) for _ in range(4)]
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.02]))
            for visitor in visits:
                visitor.cancel()
                await asyncio.sleep(chance.choice([0, 0.001]))
            await asyncio.gather(*visits, return_exceptions=True)
        while not bench.engine.idle:
            await asyncio.sleep(0.01)

    bench(work)


def test_closing_ends_everything(bench: Any) -> None:
    async def work(bench: Bench) -> None:
        running = await bench.submit("a", "b", "c", "d", "e", tokens=3000)
        await running.next()
        await bench.worker.close()
        ended = []
        while len(ended) < 5:
            event = await running.next()
            assert event is not None
            if isinstance(event, Finished):
                ended.append(event.reason)
        assert ended == ["cancelled"] * 5
        assert not bench.worker.healthy
        with pytest.raises(WorkerClosedError):
            await bench.submit("late")

    bench(work)


def test_a_failing_step_ends_what_it_held(bench: Any, model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if rows cannot be removed from the batch, because another row stays broken."""

    async def work(bench: Bench) -> None:
        step, remove = bench.engine.step, bench.engine._batch.remove

        def fail_to_remove(slot: int) -> None:
            raise RuntimeError("planted again")

        def fail() -> None:
            monkeypatch.setattr(bench.engine, "step", step)
            monkeypatch.setattr(bench.engine._batch, "remove", fail_to_remove)
            raise RuntimeError("planted")

        running = await bench.submit("a", "b", tokens=1_000_000)
        await running.next()
        monkeypatch.setattr(bench.engine, "step", fail)
        reasons = []
        while len(reasons) < 2:
            event = await running.next()
            assert event is not None
            if isinstance(event, Finished):
                reasons.append((event.reason, event.error))
        assert reasons == [("error", "RuntimeError")] * 2
        monkeypatch.setattr(bench.engine._batch, "remove", remove)
        assert bench.worker.healthy
        assert await tokens_of(await bench.submit("c"), 1) == [alone(model, "c")]
        while not bench.engine.idle:
            await asyncio.sleep(0.01)

    bench(work)


# ---- Limit of open files, and the order in which connections are read.

WANTED = 1 << 16
ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, 1 << 20), [(WANTED, 1 << 20)]),
        ((256, ANY), [(WANTED, ANY)]),
        ((4096, 4096), []),
        ((1 << 20, 1 << 20), []),
        ((ANY, ANY), []),
    ],
)
def test_open_files(limits: tuple[int, int], asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: calls.append(wanted))
    server._allow_many_connections()
    assert calls == asked


@pytest.mark.parametrize("error", [ValueError("current limit exceeds maximum limit"), OSError(22, "Invalid argument")])
def test_a_system_may_refuse(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, wanted: tuple[int, int]) -> None:
        raise error

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, ANY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    server._allow_many_connections()


def test_one_callback_runs_per_iteration_of_the_event_loop() -> None:
    turns, called = Turns(), []

    async def run() -> list[int]:
        for number in range(3):
            turns.add(lambda number=number: called.append(number))
        turns.add(lambda: turns.add(lambda: called.append(9)))
        counts = []
        for _ in range(6):
            counts.append(len(called))
            await asyncio.sleep(0)
        return counts

    assert asyncio.run(run()) == [0, 1, 2, 3, 3, 4]
    assert called == [0, 1, 2, 9]
