"""Errors in the format of OpenAI's API, and the limit for requests in progress."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from gecko.serving.options import Limits

RETRY_AFTER = "2"
"""Seconds after which a refused client should retry."""
_LONGEST_NAME = 100
"""Maximum number of characters of a name or address that an error quotes."""
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Error that is answered with HTTP ``status``. The message states the rule and the value given.

    Args:
        code: identifier for programs.
        param: the wrong field of the request.
        close: close the connection after the answer.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.close = status, code, param, close

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # Quoted parts of a request may contain lone surrogates, which UTF-8 cannot encode.
        message, param = (text and text.encode(errors="backslashreplace").decode() for text in (str(self), self.param))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error for a request whose field ``param`` has a wrong value."""
    return ApiError(400, message, code="invalid_value", param=param)


class ClientGoneError(Exception):
    """The client closed its connection."""


def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Convert any exception of a route to an error in this format."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, ClientGoneError):
        return ApiError(499, "the client closed the connection").response()
    if isinstance(error, HTTPException):
        asked = f"{request.method} {request.url.path}"[:_LONGEST_NAME]
        response = ApiError(error.status_code, f"{asked}: {error.detail}").response()
        response.headers.update(error.headers or {})
        return response
    return ApiError(500, "the server failed on this request; see its log").response()


HANDLERS = dict.fromkeys((ApiError, ClientGoneError, HTTPException, Exception), answer_error)
"""Exception handlers of the application."""


class Admission:
    """Counter of choices in progress, which refuses requests before any work is done."""

    def __init__(self, limits: Limits) -> None:
        self._places = limits.rows + limits.queue
        self.taken = 0
        self.draining = False
        """Whether the server is stopping and refuses new requests."""

    def take(self, held: ExitStack, places: int, of: int) -> None:
        """Take ``places`` more for a request, which then has ``of`` places in total, until ``held`` is closed. Raise
        ApiError 503 while draining, 429 if too few places are free, 400 if the server has fewer than ``of``."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; try another one, or later", code="shutting_down")
        if of > self._places:
            raise ApiError(400, f"a request must have at most {self._places} prompts × n; got {of}")
        if self.taken + places > self._places:
            raise ApiError(429, f"all {self._places} places of the queue are taken; try later", code="queue_full")
        self.taken += places
        held.callback(self._release, places)

    def _release(self, places: int) -> None:
        self.taken -= places
