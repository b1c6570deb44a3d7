"""Sending of answers: whole or as server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gecko.serving.answer import Answer, encode_json
from gecko.serving.limits import ClientGoneError

_SLICE_BYTES = 1 << 16
"""Maximum number of bytes of an answer that are handed to the connection at once."""
_SENDING_SECONDS = 5
"""Seconds to send the rest of a stream after the time limit of its request."""
T = TypeVar("T")


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which is closed at their end or when the client disconnects.

    If the client does not read, the response ends ``_SENDING_SECONDS`` after the time limit of the request.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._answer.seconds_left + _SENDING_SECONDS):
                await unless_gone(receive, self.stream_response(send))
        except (ClientGoneError, TimeoutError):
            # uvicorn closes the connection of an unfinished response.
            pass
        finally:
            self._answer.close()


async def slices(content: bytes) -> AsyncIterator[bytes]:
    """Yield ``content`` in slices, so that the memory of the request counts until the client has read its answer."""
    for begin in range(0, len(content), _SLICE_BYTES):
        yield content[begin : begin + _SLICE_BYTES]


def encode_event(data: dict[str, Any]) -> bytes:
    return f"data: {encode_json(data)}\n\n".encode()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``; cancel it and raise ClientGoneError if the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
