"""How to get every number again: commands, code and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gecko.report.reading import Material
from gecko.version import code_name


@dataclass(frozen=True)
class Made:
    """Commands that ran with the same code on the same machine."""

    code: str
    hardware: str
    commands: Sequence[str]


def reproduction(material: Material) -> list[Made]:
    """In the order of the inputs; a run that went on with other code, or elsewhere, stands under both."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for _, record in material.comparisons:
        found.setdefault(_place(record), {}).setdefault(str(record["command"]))
    for run in material.runs:
        command = f"{run.recipe.get('command', 'gecko train ...')}"
        for session in run.sessions or [{}]:
            found.setdefault(_place(session), {}).setdefault(command)
    for file in material.evaluations:
        found.setdefault(_place(file.record), {}).setdefault(str(file.record["command"]))
    return [Made(code, hardware, list(commands)) for (code, hardware), commands in found.items()]


def _place(record: Mapping[str, Any]) -> tuple[str, str]:
    code = code_name(record) if "version" in record else "not recorded"
    hardware = "; ".join(f"{name}: {value}" for name, value in record.get("hardware", {}).items())
    return code, hardware or "not recorded"
