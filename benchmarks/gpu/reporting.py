"""Pytest plugin of ``suites.py``: writes a line of JSON per test, and marks compilations of all workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.compilations import Compilations


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=Path)
    parser.addoption("--compilations", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    Compilations(config.getoption("--compilations")).note()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reporter(config.getoption("--report-to")))


class _Reporter:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report the test itself, and its setup or teardown if they do not pass."""
        if report.when != "call" and report.passed:
            return
        message = str(report.longrepr).strip().splitlines()[-1][:200] if report.failed else ""
        name = report.nodeid.partition("::")[2]
        line = {"test": name, "outcome": report.outcome, "seconds": report.duration, "message": message}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
