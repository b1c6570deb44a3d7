"""HTTP connections with limits on time and header size, and the checks of a request before its body is read: the
server's host names, against DNS rebinding, and the API key."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from gecko.serving.bodies import Body, RequestMemory
from gecko.serving.limits import ApiError
from gecko.serving.options import Limits

_SLICE = 1 << 14
"""Bytes of a header given to h11 at once; h11 refuses longer headers, but only after it has buffered the data."""
_CHUNKS, _CHUNK_BYTES = 1000, 256
"""Chunks that a body may have in any case, and the mean size of those beyond them."""
_LEAVING_SECONDS = 0.05
"""A client that ends its side of the connection later than this after its request has left."""


class Turns:
    """Queue of callbacks for the event loop, which calls one of them per iteration: if all connections delivered up to
    256 KiB of their bodies in the same iteration, everything else would wait for all of these reads."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._waiting[0]()
        self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class _Flow(FlowControl):
    """Flow control of uvicorn that waits for its turn before it resumes reading."""

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self._turns = turns

    def resume_reading(self) -> None:
        if self.read_paused:
            self._turns.add(super().resume_reading)


class _Parser(h11.Connection):
    """Parser of HTTP that refuses bodies of tiny chunks: each of them takes the event loop as long as a large one."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._size += len(event.data)
            if self._chunks > _CHUNKS + self._size // _CHUNK_BYTES:
                rule = f"the chunks of a body must have {_CHUNK_BYTES} bytes and more on average"
                raise h11.RemoteProtocolError(rule)
        return event


class Connection(H11Protocol):
    """HTTP/1.1 connection of uvicorn with time limits, in which bodies are read in turn with other connections.

    A header must be complete ``header_seconds`` after the connection opened or the previous response ended. The rest
    of a body that the application did not read must arrive within ``body_seconds``; it is discarded. A client must
    read some of its response within any ``body_seconds``.
    """

    limits = Limits()
    turns = Turns()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, max_incomplete_event_size=_SLICE)
        self._received, self._ended = 0.0, False
        """When the last part of a request came, and whether the client has ended its side of the connection."""
        self._expected: str | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.turns)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: a client may end its side at once and read the answer."""
        asked = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        self._ended = asked and self.loop.time() - self._received < _LEAVING_SECONDS
        return self._ended

    def data_received(self, data: bytes) -> None:
        self._received = self.loop.time()
        # Headers are passed on in slices: h11 checks the length of a header only after buffering all data it is given.
        while data and self.conn.their_state is not h11.SEND_BODY and not self.transport.is_closing():
            super().data_received(data[:_SLICE])
            data = data[_SLICE:]
        if data and not self.transport.is_closing():
            super().data_received(data)
            if self._discards_body():
                self.flow.pause_reading()
                self.flow.resume_reading()
        self._watch()

    def on_response_complete(self) -> None:
        self._received = self.loop.time()
        super().on_response_complete()
        if self.cycle.response_complete:
            self.cycle.body.clear()
            if self._ended:
                self.transport.close()
        self._watch()
        self._watch_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]
        self._refuse(400, f"the request must be valid HTTP; {error or msg}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer the request with an error, unless its response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = bytes(ApiError(status, message).response().body)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            self.transport.write(
                f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _watch(self) -> None:
        """Set the alarm for the header or body that the connection waits for."""
        expected = None
        if not self.transport.is_closing():
            idle = self.conn.their_state is h11.IDLE
            expected = "header" if idle else "body" if self._discards_body() else None
        if expected == self._expected:
            return
        self._expected = expected
        if self._alarm is not None:
            self._alarm.cancel()
        if expected is not None:
            seconds = self.limits.header_seconds if expected == "header" else self.limits.body_seconds
            self._alarm = self.loop.call_later(seconds, self._on_timeout)

    def _discards_body(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self._expected == "header" and self.conn.trailing_data[0]:
            self._refuse(408, f"the header must arrive within {self.limits.header_seconds:g} seconds; send it at once")
        self.transport.close()

    def _watch_sending(self) -> None:
        """Set the alarm for a client that does not read its response."""
        left = self.transport.get_write_buffer_size()
        if left and self._sending is None:
            self._sending = self.loop.call_later(self.limits.body_seconds, self._check_sending, left)

    def _check_sending(self, before: int) -> None:
        self._sending = None
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_sending()


def connection_class(limits: Limits) -> type[Connection]:
    """Create the protocol class of a server with these limits."""
    return type("Connection", (Connection,), {"limits": limits, "turns": Turns()})


_LONGEST = 100
_ADVICE = "Start it with --allowed-host NAME"


class Hosts:
    """Host names of the server; refuses requests that a browser sends for a page of another site.

    Such a page may let its own name resolve to this machine (DNS rebinding); then ``Host`` is a name that the server
    does not have. Otherwise ``Origin`` names the site of the page. IP addresses cannot be rebound. The server listens
    on the address or name ``bound``; clients may also use the names ``named``.
    """

    def __init__(self, bound: str = "127.0.0.1", named: Sequence[str] = ()) -> None:
        address = _address(bound)
        self._everywhere = address is not None and address.is_unspecified
        self._named = frozenset(map(_clean, named))
        own = {socket.gethostname()} if self._everywhere else {bound}
        self._names = self._named | {"localhost"} | set(map(_clean, own))

    @property
    def origins(self) -> str:
        """Regular expression of the sites whose pages may read responses: those of the additional names."""
        return rf"https?://\[?({'|'.join(map(re.escape, self._named)) or '(?!)'})\]?\.?(:[0-9]+)?"

    def check(self, host: str | None, origin: str | None) -> None:
        """Check the headers of a request. ``Host`` may be missing in HTTP/1.0; browsers always send it. Raise ApiError
        403 for a name or site that is not allowed."""
        if host is not None and not self._known(host):
            message = f"the Host header must be a name of the server; got {host[:_LONGEST]!r}. {_ADVICE}"
            raise ApiError(403, message, code="unknown_host")
        if origin is not None and not self._same_site(origin, host):
            message = f"the Origin header must be the server itself; got {origin[:_LONGEST]!r}. {_ADVICE}"
            raise ApiError(403, message, code="unknown_origin")

    def _known(self, host: str) -> bool:
        name = _clean(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
        address = _address(name)
        return name in self._names or (address is not None and (self._everywhere or address.is_loopback))

    def _same_site(self, origin: str, host: str | None) -> bool:
        try:
            parts = urlsplit(origin)
            name = parts.hostname
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or name is None:
            return False
        return parts.netloc.lower() == (host or "").lower() or _clean(name) in self._named


def _clean(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


_WITH_KEY = ("/v1/", "/tokenize", "/detokenize")
BODY = "gecko.body"


def guarded(
    app: ASGIApp, limits: Limits, memory: RequestMemory, paths: Collection[str], hosts: Hosts, key: str | None
) -> ASGIApp:
    """Return ``app`` for requests with a known host name and, for the routes that work, with the key. ``scope[BODY]``
    is their body, which is read for ``paths`` only."""

    async def admit(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the connection sends the head of the response only
        path, headers, error = scope["path"], Headers(scope=scope), None
        with closing(Body(memory)) as body:
            try:
                _check(headers, hosts, key if path.startswith(_WITH_KEY) else None)
                whole = scope["method"] != "POST" or path not in paths or await body.read(headers, receive, limits)
            except ApiError as refused:
                error = refused
            else:
                if whole:
                    await app({**scope, BODY: body}, receive, send)
        if error is not None:
            await error.response()(scope, receive, send)

    return admit


def _check(headers: Headers, hosts: Hosts, key: str | None) -> None:
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy may use the other header and see another end of the request (request smuggling).
        raise ApiError(400, "a request must have Content-Length or Transfer-Encoding, not both", close=True)
    hosts.check(headers.get("host"), headers.get("origin"))
    if key is None:
        return
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(token.strip().encode("latin-1"), key.encode()):
        raise ApiError(401, "the API key must be given as 'Authorization: Bearer KEY'", code="invalid_api_key")
