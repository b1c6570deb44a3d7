"""Strict results of ``make test-upstream``: each test either passes or is listed in ``not_passing.py``, never both."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import pytest
from upstream.not_passing import NOT_PASSING

_OUTCOMES: dict[str, set[str]] = defaultdict(set)
"""Outcomes of the parts of each test (setup, call, subtests, teardown), by its name."""
_PATTERNS = [pattern for patterns in NOT_PASSING.values() for pattern in patterns]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _OUTCOMES[_name(report)].add(report.outcome)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Count listed tests that do not pass separately from failures."""
    listed = isinstance(report, pytest.TestReport) and not report.passed and _is_listed(_name(report))
    return ("listed", "l", "LISTED") if listed else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput") or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED if any(_surprises()) else pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    unlisted, passing, unknown = _surprises()
    passed = sum(outcomes == {"passed"} for outcomes in _OUTCOMES.values())
    terminalreporter.section("transformers' tests")
    terminalreporter.line(f"{len(_OUTCOMES)} tests: {passed} pass, {len(_OUTCOMES) - passed} do not")
    for reason, patterns in NOT_PASSING.items():
        count = sum(any(fnmatchcase(name, pattern) for pattern in patterns) for name in _OUTCOMES)
        terminalreporter.line(f"  {count:3} listed: {reason}")
    for complaint, names in (
        ("neither passes nor is listed", unlisted), ("passes, so take it off the list", passing),
        ("matches no test, so take it off the list", unknown),
    ):  # fmt: skip
        for name in names:
            terminalreporter.line(f"{name} {complaint}")


def _surprises() -> tuple[list[str], list[str], list[str]]:
    """Return unlisted tests that do not pass, listed tests that pass, and patterns of the list that match no test."""
    unlisted = [name for name, outcomes in _OUTCOMES.items() if outcomes != {"passed"} and not _is_listed(name)]
    passing = [name for name, outcomes in _OUTCOMES.items() if outcomes == {"passed"} and _is_listed(name)]
    unknown = [pattern for pattern in _PATTERNS if not any(fnmatchcase(name, pattern) for name in _OUTCOMES)]
    return sorted(unlisted), sorted(passing), unknown


def _name(report: pytest.TestReport) -> str:
    return report.nodeid.rpartition("::")[2]


def _is_listed(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
