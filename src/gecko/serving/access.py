"""Checks of a request before its body is read: the server's host names (against DNS rebinding) and the API key."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gecko.serving.limits import ApiError

_LONGEST = 100
"""Maximum number of characters of a header that an error quotes."""


class Hosts:
    """Host names of the server; refuses requests that a browser sends for a page of another site.

    Such a page may let its own name resolve to this machine (DNS rebinding); then ``Host`` is a name that the server
    does not have. Otherwise ``Origin`` names the site of the page. IP addresses cannot be rebound.

    Args:
        bound: address or name that the server listens on.
        named: additional names that clients may use.
    """

    def __init__(self, bound: str = "127.0.0.1", named: Sequence[str] = ()) -> None:
        address = _address(bound)
        self._everywhere = address is not None and address.is_unspecified
        self._named = frozenset(map(_clean, named))
        own = {socket.gethostname()} if self._everywhere else {bound}
        self._names = self._named | {"localhost"} | set(map(_clean, own))

    def check(self, host: str | None, origin: str | None) -> None:
        """Check the headers of a request. ``Host`` may be missing in HTTP/1.0; browsers always send it.

        Raises:
            ApiError: 403 for a name or site that is not allowed.
        """
        if host is not None and not self._known(host):
            raise ApiError(
                403,
                f"the Host header must be a name of the server; got {host[:_LONGEST]!r}. "
                "Start it with --allowed-host NAME",
                code="unknown_host",
            )
        if origin is not None and not self._same_site(origin, host):
            raise ApiError(
                403,
                f"the Origin header must be the server itself; got {origin[:_LONGEST]!r}. "
                "Start it with --allowed-host NAME",
                code="unknown_origin",
            )

    def _known(self, host: str) -> bool:
        name = _host_name(host)
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


def _host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without the port."""
    if host.startswith("["):
        return _clean(host[1:].partition("]")[0])
    return _clean(host.partition(":")[0])


def _clean(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


class Gate:
    """ASGI middleware that passes requests with a known host name and, for ``/v1/``, with the key.

    Args:
        key: the bearer token; None: no key is required.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts, key: str | None) -> None:
        self._app, self._hosts = app, hosts
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the other header and see another end of the request (request smuggling).
            raise ApiError(400, "a request must have Content-Length or Transfer-Encoding, not both", close=True)
        self._hosts.check(headers.get("host"), headers.get("origin"))
        if self._key is not None and path.startswith("/v1/"):
            self._check_key(headers.get("authorization", ""), self._key)

    def _check_key(self, given: str, key: bytes) -> None:
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(token.strip().encode("latin-1"), key):
            raise ApiError(401, "the API key must be given as 'Authorization: Bearer KEY'", code="invalid_api_key")
