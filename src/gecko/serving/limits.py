"""What one server takes on, and how it refuses more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gecko.serving.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Beyond these, a request is refused.

    Raises:
        ValueError: a number is out of range.
    """

    rows: int = 16
    """Texts that are continued side by side."""
    queue: int = 256
    """Requests that wait for a row; 429 for more."""
    body_bytes: int = 16 << 20
    """Of one HTTP request; 413 for more."""
    body_seconds: float = 30
    """For the body of a request to arrive, once its header has; 408 after that."""
    prompt_tokens: int = 4_000_000
    """400 for more."""
    new_tokens: int = 4096
    """400 for more; what chats get that ask for no number."""
    seconds: float = 600
    """For one request: then it ends with what there is, and with 504 if there is nothing."""

    def __post_init__(self) -> None:
        for name in ("rows", "body_bytes", "body_seconds", "prompt_tokens", "new_tokens", "seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}.")
        if self.queue < 0:
            raise ValueError(f"queue must be 0 (nobody waits) or more; got {self.queue}.")


class Admission:
    """Counts the continuations that are under way, so that what is too much is refused before any work."""

    def __init__(self, limits: Limits) -> None:
        self._places = limits.rows + limits.queue
        self.taken = 0
        self.draining = False
        """No new ones: the server is about to stop."""

    def take(self, places: int) -> None:
        """Raises ApiError 503 while draining, 429 when there are not as many places, 400 if there never are."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; ask another one, or later", code="shutting_down")
        if places > self._places:
            raise ApiError(400, f"a request must have at most {self._places} prompts × n; got {places}")
        if self.taken + places > self._places:
            raise ApiError(429, f"all {self._places} places of the queue are taken; try later", code="queue_full")
        self.taken += places

    def release(self, places: int) -> None:
        self.taken -= places


class LimitBodies:
    """Reads the whole body of a request before ``app`` sees it; 413 if it is too large, 408 if it is too slow."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = ApiError(408, f"the body must arrive within {self._limits.body_seconds:g} seconds; it did not")
            await _close(error, scope, receive, send)
        except ApiError as error:
            await _close(error, scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client went away. A body that is too large is let through to nowhere.

        A client reads the answer only after it has sent all.
        """
        declared = Headers(scope=scope).get("content-length", "0")
        size, parts = 0, list[bytes]()
        kept = not declared.isdecimal() or int(declared) <= self._limits.body_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            kept = kept and size <= self._limits.body_bytes
            if kept:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body", False):
                break
        if not kept:
            raise ApiError(
                413,
                f"the body must have at most {self._limits.body_bytes:,} bytes; got {size:,}",
                code="body_too_large",
            )
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then whatever comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


async def _close(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
