"""Answers other than success, in the shape of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

RETRY_AFTER = "2"
"""Seconds after which a refused client may try again."""
_LONGEST_NAME = 100
"""Characters of a field's name that an answer quotes."""
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with ``status`` and a message that says what must hold and what was got.

    Args:
        code: what programs look at.
        param: the field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # What is quoted of a request may hold half of a surrogate pair, which no answer can.
        message, param = (text and text.encode(errors="backslashreplace").decode() for text in (str(self), self.param))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


def install(app: FastAPI) -> None:
    """Turns every exception that leaves an endpoint into an answer of this shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def on_wrong_fields(request: Request, error: RequestValidationError) -> JSONResponse:
        return _first_wrong_field(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        response = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(request: Request, error: ClientGoneError) -> JSONResponse:
        return ApiError(499, "the client closed the connection").response()

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed at this request; its log says why").response()


def _first_wrong_field(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"][1:])[:_LONGEST_NAME]
    if first["type"] == "json_invalid":
        where = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body must be JSON; at character {field}: {where}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: there is no such field", code="unknown_field", param=field)
    if first["type"] == "string_unicode" and not field:
        name = repr(first["input"])[:_LONGEST_NAME]
        return ApiError(400, f"names of fields must be Unicode; got {name}", code="unknown_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    if field:
        return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", code="invalid_value", param=field)
    if first["type"] == "value_error":
        return ApiError(400, message, code="invalid_value")
    return ApiError(400, "the body must be a JSON object, with Content-Type: application/json", code="invalid_json")
