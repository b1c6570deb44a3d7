"""The process of the server: its connections and the engine's thread."""

import asyncio
import random
import resource
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from serving.sites import PATIENCE

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


class Bench:
    """A started worker."""

    def __init__(self, model: gecko.Gecko) -> None:
        self.engine = Engine(model, rows=3, max_queued=50)
        self.metrics, self.worker = Metrics(self.engine, None), Worker(self.engine)
        self.worker.start()

    async def submit(self, *texts: str, tokens: int = 20, wrong: bool = False) -> Answer:
        ids = [torch.tensor([256, *text.encode()]) for text in texts] + [torch.tensor([999])] * wrong
        requests = [Request(prompt, tokens, Sampling(0.0), 0, frozenset({256})) for prompt in ids]
        choices = [ChoiceText(index, request, load_tokenizer("bytes")) for index, request in enumerate(requests)]
        prepared, begun = Prepared(requests, choices, Usage(0, 0, 0), 0, Reply()), time.monotonic()
        answer = Answer(prepared, self.worker.cancel, self.metrics, begun, begun + 60, lambda: None)
        await self.worker.submit(requests, answer)
        return answer


Work = Callable[[Bench], Coroutine[Any, Any, None]]


@pytest.fixture
def bench(model: gecko.Gecko) -> Callable[[Work], None]:
    """Return a function that runs a coroutine with a started worker, and checks that the engine is empty afterwards."""

    async def work_and_close(work: Work) -> None:
        bench = Bench(model)
        try:
            await asyncio.wait_for(work(bench), PATIENCE)
        finally:
            await bench.worker.close()
        assert (bench.engine.active, bench.engine.queued, bench.worker._running) == (0, 0, {})

    return lambda work: asyncio.run(work_and_close(work))


async def events_of(running: Answer, ends: int) -> tuple[list[list[int]], list[tuple[str, str | None]]]:
    """Return the tokens of ``ends`` requests, and how they ended."""
    made: dict[int, list[int]] = {}
    ended = []
    while len(ended) < ends:
        event = await running.next()
        if isinstance(event, Token):
            made.setdefault(event.request_id, []).append(event.token)
        else:
            assert isinstance(event, Finished)
            ended.append((event.reason, event.error))
    return [made[request_id] for request_id in sorted(made)], ended


def alone(model: gecko.Gecko, text: str) -> list[int]:
    return gecko.generate(model, [256, *text.encode()], max_new_tokens=20, temperature=0).tokens[0]


def test_all_or_none_are_taken_and_those_cancelled_send_nothing_more(bench: Any, model: gecko.Gecko) -> None:
    async def work(bench: Bench) -> None:
        with pytest.raises(ValueError, match="999"):
            await bench.submit("a", "b", wrong=True)
        first = await bench.submit("a", "b")
        assert await events_of(first, 2) == ([alone(model, "a"), alone(model, "b")], [("length", None)] * 2)
        assert bench.engine.tokens_made == 40
        running = await bench.submit("a", "b", tokens=3000)
        other = await bench.submit("c")
        event = await running.next()
        assert event is not None
        bench.worker.cancel([event.request_id])
        running.close()
        running.close()
        assert await events_of(other, 1) == ([alone(model, "c")], [("length", None)])

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
        await events_of(await coming, 40)
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
        assert (await events_of(running, 5))[1] == [("cancelled", None)] * 5
        assert not bench.worker.healthy
        with pytest.raises(WorkerClosedError):
            await bench.submit("late")

    bench(work)


def test_a_failing_step_ends_what_it_held(bench: Any, model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if rows cannot be removed from the batch, because another row stays broken."""

    async def work(bench: Bench) -> None:
        step, remove = bench.engine.step, bench.engine._batch.remove

        def fail(*_: Any) -> None:
            monkeypatch.setattr(bench.engine, "step", step)
            monkeypatch.setattr(bench.engine._batch, "remove", fail)
            raise RuntimeError("planted")

        running = await bench.submit("a", "b", tokens=1_000_000)
        await running.next()
        monkeypatch.setattr(bench.engine, "step", fail)
        assert (await events_of(running, 2))[1] == [("error", "RuntimeError")] * 2
        monkeypatch.setattr(bench.engine._batch, "remove", remove)
        assert bench.worker.healthy
        assert (await events_of(await bench.submit("c"), 1))[0] == [alone(model, "c")]
        while not bench.engine.idle:
            await asyncio.sleep(0.01)

    bench(work)


# ---- Limit of open files, and the order in which connections are read.

WANTED, ANY = 1 << 16, resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ((1024, 4096), [(4096, 4096)]), ((1024, 1 << 20), [(WANTED, 1 << 20)]), ((256, ANY), [(WANTED, ANY)]),
        ((4096, 4096), []), ((1 << 20, 1 << 20), []), ((ANY, ANY), []),
    ],
)  # fmt: skip
def test_open_files(limits: tuple[int, int], asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may refuse what it says it allows."""
    for error in (None, ValueError("current limit exceeds maximum limit"), OSError(22, "Invalid argument")):
        calls: list[tuple[int, int]] = []

        def wish(kind: int, wanted: tuple[int, int], calls: Any = calls, error: Exception | None = error) -> None:
            calls.append(wanted)
            if error is not None:
                raise error

        monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
        monkeypatch.setattr(resource, "setrlimit", wish)
        server._allow_many_connections()
        assert calls == asked


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
