"""Limit of open files, and the order in which connections are read."""

from __future__ import annotations

import asyncio
import resource

import pytest

from gecko.serving import server
from gecko.serving.connection import Turns

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
