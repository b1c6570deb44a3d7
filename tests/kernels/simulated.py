"""A plugin of pytest that runs the kernels under ttsem: each launch is compiled as it is for sm_90, and what Triton's
frontend makes of it is executed on the CPU.

pytest -p kernels.simulated tests/kernels/interpreted, with tests/ on PYTHONPATH and without TRITON_INTERPRET

Accesses outside a tensor, two programs or two lanes that write one element, and launches that do not compile fail the
test that made them. The session fails if there was no launch, or one that was not checked for races.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from ttsem import _fakedriver, sanitize

CAPABILITY = 90

COUNTS = pytest.StashKey[list[int]]()
"""Launches, and those of them that were not checked for races, of all workers."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTS] = [0, 0]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    with sanitize.session(CAPABILITY, "<pytest>", cuda_is_cpu=False) as simulation:
        _fakedriver.unstub_torch_cuda()  # opcheck asks torch.cuda itself
        try:
            return (yield)
        finally:  # the loop raises where a session is stopped, as by -x
            _add(session.config, simulation.launches, simulation.races_unchecked)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    launches, unchecked = session.config.stash[COUNTS]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["simulated"] = [launches, unchecked]
    elif unchecked or (not launches and session.testscollected and session.exitstatus == 0):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker of xdist has ended."""
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
