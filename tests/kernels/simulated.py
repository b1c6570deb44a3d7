"""Pytest plugin that runs the kernels under ttsem: each launch is compiled as for sm_90, and the output of Triton's
frontend is executed on the CPU.

pytest -p kernels.simulated tests/kernels/interpreted, with tests/ on PYTHONPATH and without TRITON_INTERPRET

A test fails if one of its launches accesses memory outside a tensor, lets two programs or two lanes write one element,
or does not compile. The session fails if a launch was not checked for races, or if there was none, unless single tests
were named.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

import pytest
from ttsem import _fakedriver, mlir, sanitize

CAPABILITY = 90

COUNTS = pytest.StashKey[list[int]]()
"""Number of launches, and number of launches not checked for races, over all workers."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = [0, 0]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    mlir.parse = cache(mlir.parse)  # else every launch parses its kernel again; what is parsed is only read
    with sanitize.session(CAPABILITY, "<pytest>", cuda_is_cpu=False) as simulation:
        _fakedriver.unstub_torch_cuda()  # opcheck calls torch.cuda itself
        try:
            return (yield)
        finally:  # the loop raises if the session is stopped, for example by -x
            _add(session.config, simulation.launches, simulation.races_unchecked)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    launches, unchecked = session.config.stash[COUNTS]
    named = any("::" in argument for argument in session.config.args)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["simulated"] = [launches, unchecked]
    elif unchecked or (not launches and session.testscollected and session.exitstatus == 0 and not named):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Add the counts of an xdist worker that has ended."""
    _add(node.config, *node.workeroutput.get("simulated", (0, 0)))


def _add(config: pytest.Config, launches: int, unchecked: int) -> None:
    counts = config.stash[COUNTS]
    counts[0] += launches
    counts[1] += unchecked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    launches, unchecked = config.stash[COUNTS]
    terminalreporter.write_line(
        f"{launches:,} launches simulated, {launches - unchecked:,} checked for races, {unchecked:,} not"
    )
