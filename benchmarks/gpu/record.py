"""Results of a card: a file of lines of JSON, each written at once, so that whatever happens later loses none."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gpu.decoding import Decoding
from gpu.kernel_times import KernelTime
from gpu.operators import Agreement, Timing
from gpu.shapes import Floor
from gpu.timing import Rates
from gpu.training import Training


@dataclass(frozen=True)
class Tried:
    """A variant of a kernel, or the chosen form, beside the eager form in float64; or the reason why it did not run."""

    operator: str
    family: str
    variant: str
    """Name of the variant; ``TODAY`` for the chosen form."""
    agreement: Agreement | None = None
    seconds: float | None = None
    """Seconds of forward and backward of the operator."""
    reason: str = ""


TODAY = "today"


@dataclass(frozen=True)
class Noted:
    """Any other number, with what it means."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Tested:
    """How one test ended."""

    __test__ = False  # for pytest: this class is no test

    file: str
    test: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    seconds: float
    message: str = ""


Result = Rates | Timing | Agreement | Training | Decoding | KernelTime | Tried | Noted | Tested
KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Result)}
INNER = {"floor": Floor, "agreement": Agreement}


@dataclass(frozen=True)
class Ended:
    """How an item ended; ``reason`` is "" if nothing failed."""

    item: str
    reason: str
    seconds: float
    compiled: int
    """Kernels that were not in the cache."""


class Record:
    """The lines of a file, and of ``earlier`` files. Results of an item are those of the last file that has it."""

    def __init__(self, path: Path, earlier: Sequence[Path] = ()) -> None:
        self.path, self._earlier = path, earlier

    def describe(self, **facts: Any) -> None:
        self._write({"kind": "facts", **facts})

    def add(self, item: str, result: Result) -> None:
        self._write({"kind": type(result).__name__, "item": item, **dataclasses.asdict(result)})

    def end(self, ended: Ended) -> None:
        self._write({"kind": "Ended", **dataclasses.asdict(ended)})

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def facts(self) -> dict[str, Any]:
        """Return the facts of the last description, and all commands in their order."""
        found = [line for path in self._paths() for line in _lines(path) if line["kind"] == "facts"]
        return {**(found[-1] if found else {}), "commands": list(dict.fromkeys(line["command"] for line in found))}

    def ended(self) -> dict[str, Ended]:
        """Return how the items of this file, not of earlier ones, ended."""
        return {x.item: x for x in self._ends(self.path)}

    def all_ended(self) -> list[Ended]:
        return list({x.item: x for path in self._paths() for x in self._ends(path)}.values())

    def results(self, kind: type[Any]) -> Iterator[Any]:
        """Yield all results of one kind."""
        of_item: dict[str, list[dict[str, Any]]] = {}
        for path in self._paths():
            found: dict[str, list[dict[str, Any]]] = {}
            for line in _lines(path):
                if "item" in line:
                    found.setdefault(line["item"], []).append(line)
            of_item.update(found)
        yield from (_decoded(line) for lines in of_item.values() for line in lines if line["kind"] == kind.__name__)

    def _paths(self) -> list[Path]:
        return [*self._earlier, self.path]

    def _ends(self, path: Path) -> Iterator[Ended]:
        for line in _lines(path):
            if line["kind"] == "Ended":
                yield Ended(**{name: value for name, value in line.items() if name != "kind"})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; the last one may be cut off."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return


def _decoded(line: dict[str, Any]) -> Any:
    fields = {name: value for name, value in line.items() if name not in ("kind", "item")}
    for name, kind in INNER.items():
        if fields.get(name) is not None:
            fields[name] = kind(**fields[name])
    return KINDS[line["kind"]](**fields)
