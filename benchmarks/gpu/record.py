"""Results measured on a card so far: one file, written as a whole after every result, however a part ends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from gpu.activations import Activations
from gpu.compilations import Compilations
from gpu.decoding import Decoding
from gpu.kernel_times import KernelTime
from gpu.operators import Agreement, Timing
from gpu.reading import Position
from gpu.shapes import Floor
from gpu.suites import Tested
from gpu.sweep import Swept
from gpu.timing import Rates
from gpu.training import Training
from gpu.warm_cache import Warmed

from gecko.io.files import read_object, whole_file

Result = (
    Rates | Timing | Agreement | Activations | Training | Position | Decoding | KernelTime | Swept | Tested | Warmed
)
KINDS: dict[str, type[Result]] = {kind.__name__: kind for kind in get_args(Result)}
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

    def take_over(self, path: Path) -> None:
        """Add the parts and commands of another file that are not here. Facts are those of this one.

        Raises:
            ValueError: the file is of another card or other software, or was measured in another way.
        """
        with self._changed() as content:
            earlier = read_object(path, "results")
            theirs, ours = _origin(earlier), _origin(content)
            if theirs != ours:
                raise ValueError(
                    f"results that are taken over must be of the same card, software and settings, {ours}; {path} has "
                    f"{theirs}. Give another --out, and leave --earlier out."
                )
            content["parts"] = {**earlier["parts"], **content["parts"]}
            content["commands"] = [*dict.fromkeys([*earlier["commands"], *content["commands"]])]

    def refuse(self, part: str, order: Iterable[str], reason: str) -> None:
        """Store why nothing of a part is measured; what an earlier command measured of it is kept."""
        if not self.tasks(part):
            self.begin(part, order)
            self.end(part, reason)

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


def _origin(content: dict[str, Any]) -> dict[str, Any]:
    """Return card, software and settings of results. Processor and memory may differ between two commands."""
    fields = content["hardware"].split("; ")
    settings = {name: content[name] for name in ("dtype", "repeats", "warm_ups")}
    return {"card": fields[0], "software": fields[-1], **settings}


def _decoded(found: dict[str, Any]) -> Result:
    fields = {name: value for name, value in found.items() if name != "kind"}
    if "floor" in fields:
        fields["floor"] = Floor(**fields["floor"])
    return KINDS[found["kind"]](**fields)
