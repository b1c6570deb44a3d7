"""Read request bodies within the memory of all requests, and parse their JSON in short steps.

One call of ``json.loads`` holds the GIL until it returns, seconds for millions of values, and takes up to sixty times
the memory of the text. This parser reads each string, list and object in a step of its own, and a long list of numbers
in several.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from email.message import Message
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import make_scanner
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from gecko.serving.limits import ApiError
from gecko.serving.options import Limits

MAX_VALUES = 100_000
"""Maximum number of strings, lists, objects and fields of one body; numbers in a list do not count."""
MAX_DEPTH = 32
NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"
_MAX_NUMBER = 4096
_PART = 1 << 15
"""Characters of a list of numbers that are parsed at once."""
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBERS = re.compile(rf"[-+.eE0-9, \t\n\r]{{1,{_PART}}}+")
_NUMBER = re.compile(rf"[-+.eE0-9]{{0,{_MAX_NUMBER + 1}}}+")
_SCALAR = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


def read_json(body: bytes | bytearray) -> Any:
    """Parse a body of JSON in UTF-8. Raise ValueError if it is not valid, or exceeds the bounds of this module."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"at byte {error.start}: invalid UTF-8") from None
    parser = _JsonParser(text)
    value = parser.value(0)
    if parser.next():
        raise parser.error("extra data")
    return value


class _JsonParser:
    """Recursive-descent parser of JSON with bounds."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._values = text, 0, 0

    def value(self, depth: int) -> Any:
        begin = self.next()
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.error(f"more than {MAX_VALUES:,} texts, lists, objects and fields")
        if begin in ("[", "{") and depth == MAX_DEPTH:
            raise self.error(f"lists and objects nested more than {MAX_DEPTH} deep")
        if begin == "{":
            return self._object(depth + 1)
        if begin == "[":
            return self._list(depth + 1)
        return self._string() if begin == '"' else self._scalar()

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._at += 1
        ended = self._take("}")
        while not ended:
            if self.next() != '"':
                raise self.error("expecting the name of a field in double quotes")
            self._values += 1
            name = self._string()
            if not self._take(":"):
                raise self.error("expecting ':'")
            found[name] = self.value(depth)
            ended = self._ends("}")
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        ended = self._take("]")
        while not ended:
            begin = self.next()
            if begin and begin in "-0123456789":
                found += self._numbers()
            else:
                found.append(self.value(depth))
            ended = self._ends("]")
        return found

    def _numbers(self) -> list[Any]:
        """Parse numbers up to the last comma of one part, or to the end of the list."""
        match = _NUMBERS.match(self._text, self._at)
        assert match is not None
        end = match.end()
        if self._text[end : end + 1] != "]":
            end = self._text.rfind(",", self._at, end)
            if end < 0:
                return [self._scalar()]
        found: list[Any] = self._call(json.loads, f"[{self._text[self._at : end]}]")
        if not found:
            raise self.error("expecting a value")
        self._at = end
        return found

    def _string(self) -> str:
        try:
            text, self._at = scanstring(self._text, self._at + 1, True)
        except json.JSONDecodeError as error:
            self._at = error.pos
            raise self.error(error.msg) from None
        return str(text)

    def _scalar(self) -> Any:
        match = _NUMBER.match(self._text, self._at)
        if match is not None and len(match[0]) > _MAX_NUMBER:
            raise self.error(f"a number of more than {_MAX_NUMBER:,} characters")
        try:
            value, self._at = self._call(_SCALAR, self._text, self._at)
        except StopIteration:
            raise self.error("expecting a value") from None
        return value

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except json.JSONDecodeError as error:
            raise self.error(error.msg) from None
        except ValueError as error:
            raise self.error(str(error)[:100]) from None

    def _ends(self, closing: str) -> bool:
        """Skip the separator after an element; return whether the element was the last one."""
        ended = self._take(closing)
        if not ended and not self._take(","):
            raise self.error(f"expecting ',' or '{closing}'")
        return ended

    def _take(self, character: str) -> bool:
        taken = self.next() == character
        self._at += taken
        return taken

    def next(self) -> str:
        """Skip white space and return the character after it; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def error(self, message: str) -> ValueError:
        return ValueError(f"at character {self._at}: {message[:1].lower()}{message[1:]}")


@dataclass
class RequestMemory:
    """Memory of all requests, in bytes."""

    total: int
    taken: int = 0


class Body:
    """Body of one request, and the memory counted for the request until ``close``."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory, self._held = memory, 0
        self._content = bytearray()

    def __len__(self) -> int:
        return len(self._content)

    async def read(self, headers: Headers, receive: Receive, limits: Limits) -> bool:
        """Read the whole body; return False if the client disconnected. Raise ApiError 408 if it is late, 413 if it is
        too large, 503 if there is no memory for it, 400 or 415 if it is not JSON by its headers."""
        declared, most, more = headers.get("content-length", "0"), limits.body_bytes, True
        try:
            async with asyncio.timeout(limits.body_seconds):
                got = f"{int(declared):,}" if declared.isdecimal() and int(declared) > most else ""
                while more and not got:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if len(self) + len(part) > most:
                        got = "more"
                    else:
                        self.add(part)
        except TimeoutError:
            seconds = f"{limits.body_seconds:g} seconds"
            raise ApiError(408, f"the body must arrive within {seconds}; send a smaller one", close=True) from None
        if got:
            raise ApiError(413, f"the body must have at most {most:,} bytes; got {got}", code="body_too_large")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            rule = "the body must not be compressed; send it without Content-Encoding"
            raise ApiError(415, rule, code="compressed_body")
        parsed = Message()
        parsed["content-type"] = headers.get("content-type", "")
        subtype = parsed.get_content_subtype()
        if parsed.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
            raise ApiError(400, NO_OBJECT, code="invalid_json")
        return True

    def add(self, part: bytes) -> None:
        """Append ``part``; ApiError 503 if there is no memory for it."""
        self.resize(self._held + len(part))
        self._content += part

    def take(self) -> bytearray:
        """Return the content and forget it; its memory counts until ``resize``. Thread-safe."""
        content, self._content = self._content, bytearray()
        return content

    def resize(self, size: int) -> None:
        """Count ``size`` bytes for this request from now on. Raise ApiError 400 if ``size`` exceeds the total, 503 if
        other requests take the rest of it."""
        memory = self._memory
        if size > memory.total:
            limit = f"{memory.total:,} bytes of memory, with its tokens and log-probabilities"
            message = f"a request must take at most {limit}; got {size:,}"
            raise ApiError(400, message, code="request_too_large")
        if size > self._held and memory.taken + size - self._held > memory.total:
            raise ApiError(503, "other requests take all of the memory for requests; try later", code="memory_full")
        memory.taken += size - self._held
        self._held = size

    def close(self) -> None:
        self.take()
        self.resize(0)
