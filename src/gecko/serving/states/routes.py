"""``/v1/states``: save, list and delete the states of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gecko.inference.request import KeptStates
from gecko.inference.request import Request as EngineRequest
from gecko.inference.text import ChoiceText
from gecko.serving.answer import Usage
from gecko.serving.bodies import BODY, Body, parse_body
from gecko.serving.prepare import Prepared
from gecko.serving.protocol import JsonObject
from gecko.serving.responses.store import response_not_found
from gecko.serving.sending import unless_gone
from gecko.state import GeckoState

if TYPE_CHECKING:
    from gecko.serving.app import Service

PATH = "/v1/states"


class SaveState(JsonObject):
    """Body of ``POST /v1/states``."""

    name: str
    response_id: str
    """Stored response after which the conversation is saved."""

    @property
    def n(self) -> int:
        return 1

    @property
    def constrained(self) -> bool:
        return False


def add_states(app: FastAPI, service: Service) -> None:
    """Add the routes. That of ``POST`` takes no body from FastAPI, which would validate it on the event loop."""
    states = service.states

    @app.post(PATH)
    async def save(request: Request) -> Response:
        return JSONResponse(await unless_gone(request.receive, _save(service, request.scope[BODY])), 201)

    @app.get(PATH)
    async def describe() -> Response:
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(states.describe)})

    @app.get(PATH + "/{name}")
    async def describe_one(name: str) -> Response:
        return JSONResponse(await asyncio.to_thread(states.position, name))

    @app.delete(PATH + "/{name}")
    async def delete(name: str) -> Response:
        await asyncio.to_thread(states.delete, name)
        return JSONResponse({"id": name, "object": "state", "deleted": True})


@dataclass(frozen=True)
class _PreparedState(Prepared):
    """Request by which the engine reads the end of the answer and of its turn."""

    before: GeckoState
    """State before that."""
    keep: KeptStates


async def _save(service: Service, body: Body) -> dict[str, Any]:
    asked, prepared, answer = await service.start(body, partial(_parse, service), partial(_prepare, service))
    try:
        await answer.whole()
    finally:
        answer.close()
    return await asyncio.to_thread(service.states.save, asked.name, prepared.keep.prompt or prepared.before)


def _parse(service: Service, take: Callable[[], bytearray]) -> SaveState:
    asked = parse_body(SaveState, take())
    service.states.check_new(asked.name)
    return asked


def _prepare(service: Service, asked: SaveState) -> _PreparedState:
    stored = service.responses.get(asked.response_id)
    if stored is None:
        raise response_not_found(asked.response_id)
    unread = [*stored.unread, *service.model.chat.continuation([]).closing]
    keep = KeptStates()
    requests = [EngineRequest(torch.tensor(unread, device="cpu"), 0, state=stored.state, keep=keep)] if unread else []
    choices = [ChoiceText(0, service.model.tokenizer, [], 0) for _ in requests]
    usage = Usage(len(unread), 0, service.model.state_bytes)
    return _PreparedState(requests, choices, usage, 8 * len(unread), stored.state, keep)
