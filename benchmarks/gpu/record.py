"""Results measured on a card so far: one file, written as a whole after every result, however a part ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.activations import Activations
from gpu.compilations import Compilations
from gpu.decoding import Decoding
from gpu.operators import Agreement, Timing
from gpu.reading import Position
from gpu.shapes import Floor
from gpu.timing import Rates
from gpu.training import Training

from gecko.io.files import read_object, whole_file

Result = Rates | Timing | Agreement | Activations | Training | Position | Decoding
KINDS = {kind.__name__: kind for kind in (Rates, Timing, Agreement, Activations, Training, Position, Decoding)}
UNFINISHED = "did not end"


class Record:
    """Parts by name; each has tasks by name, with results and, if the task failed, a reason.

    The process of a part and its parent write in turn: each reads the file again before it changes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.compilations = Compilations(path.with_suffix(".compilations"))

    def describe(self, command: str, **facts: Any) -> None:
        """Store where, how and with which commands was measured; results of earlier commands are kept."""
        with self._changed() as content:
            content.update(facts)
            content["commands"] = [*dict.fromkeys([*content.get("commands", []), command])]

    def fact(self, name: str) -> Any:
        return self._content()[name]

    def parts(self) -> dict[str, str]:
        """Return how each requested part ended; "" if it succeeded or is still running."""
        return {name: part["ending"] for name, part in self._content()["parts"].items()}

    def tasks(self, part: str) -> dict[str, str]:
        """Return why each started task of a part failed; "" if it did not."""
        return {name: task["reason"] for name, task in self._tasks(part).items()}

    def results(self, kind: type[Result]) -> Iterator[Any]:
        """Yield all results of one kind, in the order of parts."""
        for part in self._content()["parts"]:
            for task in self._tasks(part).values():
                yield from (_decoded(found) for found in task["found"] if found["kind"] == kind.__name__)

    def begin(self, part: str, order: Iterable[str]) -> None:
        """Delete the results of a part, which is about to be measured; parts are kept in ``order``."""
        with self._changed() as content:
            content["parts"][part] = {"ending": "", "tasks": {}}
            content["parts"] = {name: content["parts"][name] for name in order if name in content["parts"]}

    def end(self, part: str, ending: str) -> list[str]:
        """Store how a part ended; tasks that started and did not end fail for the same reason. Return their names."""
        with self._changed() as content:
            content["parts"][part]["ending"] = ending
            tasks = content["parts"][part]["tasks"]
            lost = [name for name, task in tasks.items() if task["reason"] == UNFINISHED]
            for name in lost:
                tasks[name]["reason"] = ending
        return lost

    def forget(self, part: str, tasks: Iterable[str]) -> None:
        """Delete tasks and their results, so that the part's next process starts them again."""
        with self._changed() as content:
            for name in tasks:
                del content["parts"][part]["tasks"][name]

    def begin_task(self, part: str, task: str) -> None:
        with self._changed() as content:
            content["parts"][part]["tasks"][task] = {"reason": UNFINISHED, "found": []}

    def end_task(self, part: str, task: str, reason: str) -> None:
        with self._changed() as content:
            content["parts"][part]["tasks"][task]["reason"] = reason

    def add(self, part: str, task: str, result: Result) -> None:
        with self._changed() as content:
            found = {"kind": type(result).__name__, **dataclasses.asdict(result)}
            content["parts"][part]["tasks"][task]["found"].append(found)

    def _tasks(self, part: str) -> dict[str, Any]:
        return self._content()["parts"].get(part, {}).get("tasks", {})

    def _content(self) -> dict[str, Any]:
        return read_object(self.path, "results") if self.path.exists() else {"parts": {}}

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        content = self._content()
        yield content
        with whole_file(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _decoded(found: dict[str, Any]) -> Result:
    fields = {name: value for name, value in found.items() if name != "kind"}
    if "floor" in fields:
        fields["floor"] = Floor(**fields["floor"])
    return KINDS[found["kind"]](**fields)
