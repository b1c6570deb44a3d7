"""``/v1/responses``: conversations that continue from the state after an earlier response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gecko.data.chat import encode_text
from gecko.inference.request import KeptStates
from gecko.inference.text import Piece
from gecko.serving.answer import Answer, encode_json
from gecko.serving.bodies import BODY, Body, parse_body
from gecko.serving.limits import ApiError, Limits
from gecko.serving.prepare import Preparation, Prepared, PreparedReply, ServedModel
from gecko.serving.responses.fields import ResponseRequest, ResponseTurn
from gecko.serving.responses.reply import ResponseReply, encode_events
from gecko.serving.responses.store import ResponseStore, StoredResponse, response_not_found
from gecko.serving.sending import EventStream, slices, unless_gone

if TYPE_CHECKING:
    from gecko.serving.app import Service

PATH = "/v1/responses"


@dataclass(frozen=True)
class PreparedResponse(Prepared):
    """Request to the engine for one response."""

    response: ResponseReply
    keep: KeptStates | None
    """Receives the states; None if the response is not stored."""


class ResponsePreparation:
    """Preparation of requests of ``/v1/responses``; thread-safe."""

    def __init__(self, model: ServedModel, limits: Limits, preparation: Preparation, store: ResponseStore) -> None:
        self._model, self._limits, self._preparation, self._store = model, limits, preparation, store

    def parse(self, take: Callable[[], bytearray]) -> ResponseTurn:
        """Parse and validate the body that ``take`` returns.

        Raises:
            ApiError: 400 for an invalid body, 404 for another model.
        """
        asked = parse_body(ResponseRequest, take())
        wanted, most = asked.max_output_tokens or 0, self._limits.new_tokens
        if wanted > most:
            raise ApiError(
                400, f"max_output_tokens must be at most {most}; got {wanted}", code="invalid_value",
                param="max_output_tokens",
            )  # fmt: skip
        turn = ResponseTurn.of(asked)
        self._preparation.check(turn)
        return turn

    def prepare(self, turn: ResponseTurn) -> PreparedResponse:
        """Build the request to the engine.

        Raises:
            ApiError, ValueError: the request is out of range, or the response that it continues is not stored.
        """
        asked = turn.asked
        prepared = self._preparation.prepare(turn) if asked.previous_response_id is None else self._continue(turn)
        (request,) = prepared.requests
        keep = KeptStates() if asked.store else None
        reply = ResponseReply(self._model.name, asked, request.start_position)
        return PreparedResponse(
            [replace(request, keep=keep)], prepared.choices, prepared.usage, prepared.num_bytes, reply, keep
        )  # fmt: skip

    def _continue(self, turn: ResponseTurn) -> PreparedReply:
        name = turn.asked.previous_response_id
        previous = self._store.get(name)
        if previous is None:
            raise ApiError(
                400, f"Previous response with id '{name[:100]}' not found. It was never stored, was deleted, or made "
                "room for later ones: send the whole conversation as input.",
                code="previous_response_not_found", param="previous_response_id",
            )  # fmt: skip
        closing, turns = self._model.chat.continuation(turn.messages)
        prompt = torch.tensor([*previous.unread, *closing, *turns], device="cpu")
        return self._preparation.build(turn, [prompt], previous.state)

    def store(self, prepared: PreparedResponse, body: dict[str, Any], piece: Piece) -> None:
        """Store a finished response; ``piece`` has all of its text.

        The state at the end is of use only if it has read the text and nothing else. After a stop string, or at the
        time limit, the engine is ahead of the text. The answer is then read again from the state after the prompt.
        """
        keep = prepared.keep
        if keep is None or keep.prompt is None:
            return
        end = keep.end
        if end is not None and end.position == piece.position and not prepared.choices[0].stopped:
            state, unread = end.state, [] if end.pending_token is None else [end.pending_token]
        else:
            state, unread = keep.prompt, encode_text(self._model.tokenizer, piece.text).tolist()
        self._store.put(body["id"], StoredResponse(encode_json(body).encode(), state, unread))


@dataclass(frozen=True)
class _Started:
    answer: Answer
    prepared: PreparedResponse
    stream: bool


def add_responses(app: FastAPI, service: Service) -> None:
    """Add the routes. That of ``POST`` takes no body from FastAPI, which would validate it on the event loop."""
    preparation = service.response_preparation

    @app.post(PATH)
    async def respond(request: Request) -> Response:
        started = await unless_gone(request.receive, _begin(service, request.scope[BODY]))
        answer, prepared = started.answer, started.prepared
        try:
            if started.stream:
                # An error before the first piece is answered with its HTTP status.
                pieces = answer.pieces()
                first = await unless_gone(request.receive, anext(pieces))
                return EventStream(answer, encode_events(_events(service, started, first, pieces)))
            (piece,) = await unless_gone(request.receive, answer.whole())
            body = prepared.response.finished(piece, answer.usage)
            preparation.store(prepared, body, piece)
        except BaseException:
            answer.close()
            raise
        answer.close()
        content = encode_json(body).encode()
        headers = {"Content-Length": str(len(content))}
        return StreamingResponse(slices(content), headers=headers, media_type="application/json")

    @app.get(PATH + "/{response_id}")
    async def retrieve(response_id: str) -> Response:
        found = service.responses.get(response_id)
        if found is None:
            raise response_not_found(response_id)
        return Response(found.body, media_type="application/json")

    @app.delete(PATH + "/{response_id}")
    async def delete(response_id: str) -> Response:
        if not service.responses.delete(response_id):
            raise response_not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _begin(service: Service, body: Body) -> _Started:
    preparation = service.response_preparation
    turn, prepared, answer = await service.start(body, preparation.parse, preparation.prepare)
    return _Started(answer, prepared, turn.stream)


async def _events(
    service: Service, started: _Started, first: Piece, pieces: AsyncIterator[Piece]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream; the response is stored before the last one."""
    prepared, reply, texts, last = started.prepared, started.prepared.response, [first.text], first
    for event in reply.opening():
        yield event
    for event in reply.delta(first):
        yield event
    try:
        async for piece in pieces:
            texts.append(piece.text)
            last = piece
            for event in reply.delta(piece):
                yield event
    except ApiError as error:
        yield {"type": "response.failed", "response": reply.failed(error)}
        return
    whole = replace(last, text="".join(texts))
    body = reply.finished(whole, started.answer.usage)
    service.response_preparation.store(prepared, body, whole)
    for event in reply.closing(body):
        yield event
