"""Compiled blocks with context parallelism: the compiler does not trace the exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from support import compile_jobs
from support import training_jobs as work
from support.jobs import Jobs

from gecko.train import Run


def test_compiled_steps_on_context_ranks_are_those_of_plain_ones(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Compare loss, gradient norm and every parameter after two steps, in float64, on both ranks."""
    model = replace(run_in("x").model, num_layers=1)
    plain = run_in("plain", context=2, model=model)
    runs = [plain, replace(plain, activation_checkpointing="full")]
    expected = jobs.run(2, work.exact_steps, [plain], 2)
    for (want,), results in zip(expected, jobs.run(2, compile_jobs.compiled_steps, runs, 2), strict=True):
        for got in results:
            np.testing.assert_allclose(got["curve"], want["curve"], rtol=1e-9)
            for name, value in want["parameters"].items():
                np.testing.assert_allclose(got["parameters"][name], value, rtol=1e-6, atol=1e-8, err_msg=name)
