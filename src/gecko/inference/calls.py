"""Calls of functions in the text of an answer, read while it is generated, in the forms in use, whatever the model: an
object with name and arguments after ``<tool_call>`` (Hermes, Qwen), after ``[TOOL_CALLS]`` (Mistral) or
``<|python_tag|>``, or at the beginning of the answer (Llama 3), and lists of such."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gecko.data.turns import CALL_CLOSING, CALL_OPENINGS

_FIRST = re.compile(r"\s*(?=\{)")
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Beginning of a call whose arguments come last."""


@dataclass(frozen=True)
class CallPart:
    """New part of a call: the next of the JSON text of its arguments. The first part has ``id`` and function."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class CallReader:
    """Divides the text of an answer into text and calls, however it is cut into pieces.

    Text that may begin a call is held back until that is decided. What is no object with the name of a known function
    and an object of arguments is text. An answer ends with its calls: the reader stops where other text follows, and
    after one call unless it may have ``several``. An answer that is ``opened`` begins inside of a call, and is nothing
    else. ``openings`` are texts before a call, besides those in use; ``marks`` are the texts that special tokens have
    in calls, by their ids.
    """

    def __init__(
        self, names: Collection[str], openings: Collection[str] = (), marks: Mapping[int, str] = MappingProxyType({}),
        *, opened: bool = False, several: bool = True,
    ) -> None:  # fmt: skip
        self.marks = marks
        self.num_calls = 0
        self.stopped = False
        self.end = 0
        """Number of characters up to the end of the last call."""
        self._names, self._several = frozenset(names), several
        self._openings = {*CALL_OPENINGS, *openings}
        self._opening = re.compile("|".join(map(re.escape, sorted(self._openings, key=len, reverse=True))))
        self._between = re.compile(rf"(?:[\s,;\[\]]|{self._opening.pattern}|{CALL_CLOSING})*+")
        self._held, self._taken = "", 0
        self._region: str | None = "" if opened else None
        """Text since an opening; None outside calls."""
        self._object: _Object | None = None
        self._silent = opened
        """Whether no text may follow."""

    @property
    def unclosed(self) -> bool:
        """Whether the answer ends with the object of a call, without what closes it."""
        return self.end > 0 and (self.stopped or self.end == self._taken + len(self._held))

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Return the text and the parts of calls that ``text`` decides."""
        said: list[str] = []
        parts: list[CallPart] = []
        self._held += text
        more = True
        while more and not self.stopped:
            if self._region is None:
                more = self._read_text(said)
            elif self._object is None:
                more = self._read_between(said)
            else:
                more = self._read_object(self._object, said, parts)
        return "".join(said), tuple(parts)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return "" if self._silent or self.stopped else (self._region or "") + self._held

    # These read what is held, and return whether there may be more to read.

    def _read_text(self, said: list[str]) -> bool:
        found = (None if self._taken else _FIRST.match(self._held)) or self._opening.search(self._held)
        end = len(self._held) - overlap(self._held, self._openings) if found is None else found.start()
        cut = len(self._held[:end].rstrip())
        said.append(self._take(cut))
        if found is not None:
            self._region = self._take(found.end() - cut)
        return found is not None

    def _read_between(self, said: list[str]) -> bool:
        found = self._between.match(self._held)
        assert found is not None and self._region is not None
        self._region += self._take(found.end())
        if self._held.startswith("{"):
            self._object = _Object()
        elif not self._held or any(border.startswith(self._held) for border in (*self._openings, CALL_CLOSING)):
            return False
        else:
            self._give_up(said, 0)
        return True

    def _read_object(self, one: _Object, said: list[str], parts: list[CallPart]) -> bool:
        head = None if one.arguments else _HEAD.match(self._held)
        if head is not None and head[1] in self._names:
            one.arguments = head.end()
            parts.append(self._begin(head[1], ""))
        end = one.scan(self._held)
        if one.arguments and (more := self._held[one.arguments : one.arguments_end or len(self._held)]):
            one.arguments += len(more)
            parts.append(CallPart(self.num_calls - 1, more))
        if end is None:
            return False
        if not one.arguments:
            call = _call(self._held[:end])
            if call is None or call[0] not in self._names:
                self._give_up(said, end)
                return True
            parts.append(self._begin(*call))
        self._take(end)
        self._object, self._region = None, ""
        self.end, self.stopped = self._taken, not self._several
        return True

    def _begin(self, name: str, arguments: str) -> CallPart:
        self._silent, self.num_calls = True, self.num_calls + 1
        return CallPart(self.num_calls - 1, arguments, secrets.token_hex(5)[:9], name)  # Mistral's have 9 characters

    def _give_up(self, said: list[str], size: int) -> None:
        """Take what was read since the opening, and ``size`` characters more, as text. After a call, that ends all."""
        self.stopped = self._silent
        if not self._silent:
            said += [self._region or "", self._take(size)]
            self._region = self._object = None

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        self._taken += len(taken)
        return taken


class _Object:
    """Place in a JSON object that is read piece by piece."""

    def __init__(self) -> None:
        self.arguments = 0
        """Where the arguments go on that were not passed on; 0 before it is decided that this is a call."""
        self.arguments_end = 0
        """Where the arguments end; 0 before that."""
        self._at = self._depth = 0
        self._string = self._escaped = False

    def scan(self, text: str) -> int | None:
        """Read on in the object, of which ``text`` is the beginning; return where it ends, or None."""
        while self._at < len(text):
            symbol = text[self._at]
            self._at += 1
            if self._string:
                self._string = self._escaped or symbol != '"'
                self._escaped = symbol == "\\" and not self._escaped
            elif symbol == '"':
                self._string = True
            else:
                self._depth += (symbol in "{[") - (symbol in "}]")
                if symbol in "}]" and self._depth == 1 and self.arguments:
                    self.arguments_end = self.arguments_end or self._at
                if not self._depth:
                    return self._at
        return None


def overlap(text: str, borders: Collection[str]) -> int:
    """Return the length of the longest end of ``text`` that begins one of ``borders``."""
    longest = min(len(text), max(map(len, borders), default=1) - 1)
    ends = (size for size in range(longest, 0, -1) if any(border.startswith(text[-size:]) for border in borders))
    return next(ends, 0)


def _call(text: str) -> tuple[str, str] | None:
    """Return the name of the function and the arguments of an object that is a call; None if it is none."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = found.get("function", found)
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
