"""Carried state on several ranks: the losses of one rank, also after the number of ranks changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from support import training_jobs as work
from support.jobs import Jobs
from support.whole_runs import losses

from gecko.train import ParallelSettings, Run


def test_one_rank_then_four_then_two(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Lanes are rows of the whole batch, so each session holds its part of those that the one before saved."""
    small = run_in("one", steps=10)
    one = replace(small, data=replace(small.data, carry_state=True), gradient_accumulation_steps=2)
    changing = replace(one, output=str(one.folder.parent / "changing"))
    jobs.run(1, work.train_run, one)
    sessions: list[tuple[int, int | None, dict[str, int]]] = [
        (1, 2, {}), (4, 4, {"context": 2}), (2, 6, {"context": 2}), (4, 8, {"replicate": 2}), (2, None, {})
    ]  # fmt: skip
    for ranks, end, parallel in sessions:
        run = replace(changing, parallel=ParallelSettings(**parallel))
        results = jobs.run(ranks, work.resumed_run, run, ranks - 1, end)
        assert {result["step"] for result in results} == {end or 10}
    np.testing.assert_allclose(losses(changing), losses(one), rtol=1e-5)
