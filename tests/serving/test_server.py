"""What the server asks of the system at its start."""

from __future__ import annotations

import resource

import pytest

from gecko.serving import server

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
