"""``gecko doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gecko.cli.machine import DISTRIBUTION, graphics, optional_packages, paths, processor, resources, software
from gecko.cli.selftest import Finding, self_test

UNHEALTHY = 1


def doctor() -> None:
    """Say what this machine has, which ways of computing will be used, and whether they compute rightly.

    The self-test takes seconds, on every kind of device there is. The exit code is 1 if any of it fails.

    **Example**

        gecko doctor
    """
    console = Console(highlight=False)
    facts = {**software(), **processor(), **resources(Path.cwd()), **graphics()}
    _print_facts(console, "This machine", facts)
    _print_facts(console, "What will be used", paths())
    _print_packages(console)
    findings = [finding for device in _devices() for finding in _examine(console, device)]
    failed = sum(not finding.passed for finding in findings)
    if failed:
        console.print(f"[bold red]{failed} of {len(findings)} checks failed.[/] Do not trust results on this machine.")
        raise typer.Exit(UNHEALTHY)
    console.print(f"[bold green]All {len(findings)} checks passed.[/]")


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def _examine(console: Console, device: torch.device) -> list[Finding]:
    with console.status(f"testing on {device}"):
        findings = self_test(device)
    table = _table(f"Self-test on {device}")
    for finding in findings:
        verdict = "[green]pass[/]" if finding.passed else "[bold red]FAIL[/]"
        table.add_row(finding.name, verdict, escape(finding.detail))
    console.print(table, "")
    return findings


def _print_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    table = _table(title)
    for name, value in facts.items():
        table.add_row(name, escape(value))
    console.print(table, "")


def _print_packages(console: Console) -> None:
    packages = optional_packages()
    if not packages:
        console.print(f"Optional packages: unknown, as {DISTRIBUTION} is not installed. Run: pip install -e .\n")
        return
    table = _table("Optional packages")
    for package in packages:
        table.add_row(package.name, package.version or f"missing; {escape(package.remedy)}")
    console.print(table, "")


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
