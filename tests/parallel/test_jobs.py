"""The worker processes of these tests: processes that die or hang end their job but not later jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import jobs as processes
from support.jobs import Jobs


@pytest.fixture(scope="module")
def two() -> Iterator[Jobs]:
    jobs = Jobs(2)
    jobs.run(2, os.getpid)  # waits until they have started
    yield jobs
    jobs.close()


@pytest.mark.parametrize(
    "function, argument, said",
    [(time.sleep, 1000, "did not answer within 2 seconds"), (os._exit, 3, "ended with exit code 3")],
)
def test_ranks_without_an_answer_are_named_and_replaced(
    two: Jobs, monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any], argument: int, said: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(processes, "LIMIT", 2.0)
        answers = two.answers(2, function, argument)
    for rank, answer in enumerate(answers):
        assert answer.error is not None and answer.error.startswith(f"rank {rank} {said}")
    assert len(set(two.run(2, os.getpid))) == 2
