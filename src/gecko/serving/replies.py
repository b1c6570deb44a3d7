"""Answers in the form of OpenAI's API, whole and as the events of a stream.

Gecko adds ``position`` of each choice, the number of tokens that its state has read, and ``usage.state_bytes``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from gecko.inference.calls import CallPart
from gecko.inference.text import Piece, TokenNames
from gecko.serving.chat_requests import ResponseRequest
from gecko.serving.limits import ApiError

_PART = 1 << 10
"""Elements of a list that are encoded at once."""
_MIN_LOGPROB = -9999.0
"""Replaces a log-probability of minus infinity, which JSON cannot represent."""


class Usage(NamedTuple):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    state_bytes: int
    """Size of the state of one sequence, which is constant."""

    @property
    def json(self) -> dict[str, int]:
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


def encode_json(value: Any) -> str:
    """Return JSON in ASCII: some clients split a stream at U+2028 and others, and UTF-8 has no lone surrogates."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def encode_answer(answer: dict[str, Any]) -> str:
    """Encode an answer with many calls of ``json.dumps``: a call holds the GIL until it returns."""
    return f"{{{','.join(f'{encode_json(name)}:{_encode_field(name, item)}' for name, item in answer.items())}}}"


def _encode_field(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return encode_answer(value)
    if not isinstance(value, list):
        return encode_json(value)
    if name == "choices":
        return f"[{','.join(map(encode_answer, value))}]"
    parts = (value[begin : begin + _PART] for begin in range(0, len(value), _PART))
    return f"[{','.join(encode_json(part)[1:-1] for part in parts)}]"


def encode_event(event: dict[str, Any] | str, encode: Callable[[Any], str] = encode_json) -> bytes:
    """Encode a server-sent event; it is named by its ``type``, if it has one, and a text is sent as it is."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {encode(event)}\n\n".encode()


class Reply:
    """Form of one answer."""

    status = 200

    def opening(self, num_choices: int) -> Iterable[dict[str, Any]]:
        """Return the events before the first text."""
        return ()

    def events(self, piece: Piece) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def encode(self, piece: Piece) -> list[bytes]:
        """Return the encoded events of a piece."""
        encode = encode_json if piece.prompt is None else encode_answer
        return [encode_event(event, encode) for event in self.events(piece)]

    def closing(self, usage: Usage) -> Iterable[dict[str, Any] | str]:
        """Return the events after the last piece."""
        return ()

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error, which ends a stream."""
        return error.body

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the whole answer, from one piece per choice."""
        raise NotImplementedError


class _Choices(Reply):
    """Answer with a list of choices; ``include_usage``: whether a stream ends with the token counts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, names: TokenNames, include_usage: bool = False) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._names, self._include_usage = names, include_usage

    def events(self, piece: Piece) -> Iterable[dict[str, Any]]:
        return [self._body(self.chunk_kind, [self._part(piece)])]

    def closing(self, usage: Usage) -> Iterable[dict[str, Any] | str]:
        return [*([self._body(self.chunk_kind, [], usage)] if self._include_usage else []), "[DONE]"]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._body(self.kind, list(map(self._choice, pieces)), usage)

    def _body(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        counts = {} if usage is None else {"usage": usage.json}
        return {**self._head, "object": kind, "choices": choices, **counts}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, piece: Piece) -> dict[str, Any]:
        """Return what is new of a choice in a stream."""
        return self._choice(piece)


class CompletionReply(_Choices):
    """Answer of ``/v1/completions``."""

    def _choice(self, piece: Piece) -> dict[str, Any]:
        name, prompt = self._names.name, [] if piece.prompt is None else self._names.places(piece.prompt)
        # Clients that score prompts, such as lm-evaluation-harness, count on an entry for the stop token.
        ending = [] if piece.stop_token is None else [piece.stop_token]
        tokens = [*prompt, *piece.tokens, *ending]
        logprobs = {
            "tokens": [name(token.token) for token, _ in tokens],
            "token_logprobs": [_number(token.logprob) for token, _ in tokens],
            # Of tokens with equal names, the most likely one is kept.
            "top_logprobs": [
                None if x.logprob is None else {name(other): _number(value) for other, value in x.top_logprobs[::-1]}
                for x, _ in tokens
            ],
            "text_offset": [offset for _, offset in tokens],
        }
        told = {"index": piece.choice, "text": piece.text, "logprobs": logprobs if tokens else None}
        return {**told, "finish_reason": piece.finish_reason, "position": piece.position}


class ChatReply(_Choices):
    """Answer of ``/v1/chat/completions``; ``scored``: whether it has log-probabilities."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, names: TokenNames, include_usage: bool = False, *, scored: bool = False) -> None:
        super().__init__(model, names, include_usage)
        self._scored = scored

    def opening(self, num_choices: int) -> Iterable[dict[str, Any]]:
        """Return the role of each choice."""
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._body(self.chunk_kind, [{"index": index, **begun}]) for index in range(num_choices)]

    def _part(self, piece: Piece) -> dict[str, Any]:
        text = {"content": piece.text} if piece.text else {}
        calls = {"tool_calls": list(map(_part_of_call, piece.calls))} if piece.calls else {}
        return {"delta": text | calls, **self._progress(piece, bool(piece.tokens))}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if calls := joined(piece.calls):
            told = [{"id": call.id, "type": "function", "function": _function(call)} for call in calls]
            message |= {"content": piece.text or None, "tool_calls": told}
        return {"message": message, **self._progress(piece, self._scored)}

    def _progress(self, piece: Piece, scored: bool) -> dict[str, Any]:
        content = [
            {**self._token(token.token, token.logprob), "top_logprobs": [self._token(*x) for x in token.top_logprobs]}
            for token, _ in piece.tokens
        ]
        told = {"index": piece.choice, "logprobs": {"content": content} if scored else None}
        return {**told, "finish_reason": piece.finish_reason, "position": piece.position}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._names.text(token)
        content = None if text is None else list(text.encode())
        return {"token": self._names.name(token), "logprob": _number(logprob), "bytes": content}


def _part_of_call(part: CallPart) -> dict[str, Any]:
    """Return the new part of a call in a stream: its identifier and function, or what follows of the arguments."""
    head = {"id": part.id, "type": "function"} if part.id else {}
    return {"index": part.index, **head, "function": _function(part) if part.id else {"arguments": part.arguments}}


def _function(call: CallPart) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def joined(parts: Iterable[CallPart]) -> list[CallPart]:
    """Return the calls of an answer as one part each."""
    calls: list[CallPart] = []
    for part in parts:
        if part.id:
            calls.append(part)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    return calls


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)


class ResponseReply(Reply):
    """Answer of ``/v1/responses``, of which the state had read ``cached_tokens`` before the prompt. ``store`` is called
    with the whole response, and the piece with all of its text, before its end is sent."""

    def __init__(
        self, model: str, asked: ResponseRequest, cached_tokens: int, store: Callable[[dict[str, Any], Piece], None]
    ) -> None:
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._place: dict[str, Any] = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._cached, self._store = cached_tokens, store
        self._texts: list[str] = []
        self._calls: list[CallPart] = []
        self._last: Piece | None = None
        self._numbers = count()
        form = {"type": "text"} if asked.format is None else vars(asked.format)
        self._head = {
            "id": self._id, "object": "response", "created_at": int(time.time()), "model": model, "background": False,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata, "parallel_tool_calls": bool(asked.functions) and asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id, "reasoning": {"effort": None, "summary": None},
            "service_tier": "default", "store": asked.store,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {name: value for name, value in form.items() if value is not None}},
            "tool_choice": asked.choice.shown if asked.tools else "none",
            "tools": [
                {"type": "function", "strict": bool(function.strict), "description": None, **function.tool["function"]}
                for function in asked.tools
            ],
            "top_p": 1.0 if asked.top_p is None else asked.top_p, "truncation": "disabled",
        }  # fmt: skip

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        begun = self._body("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._last = piece
        if piece.text:
            if not self._texts:
                yield from self._begin_message()
            self._texts.append(piece.text)
            yield self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])
        for part in piece.calls:
            if part.id:
                yield from self._end_item("completed")
            self._calls = joined([*self._calls, part])
            place = self._call_place()
            if part.id:
                item = _call_item(replace(part, arguments=""), "in_progress")
                yield self._event("response.output_item.added", output_index=place["output_index"], item=item)
            if part.arguments:
                yield self._event("response.function_call_arguments.delta", **place, delta=part.arguments)

    def closing(self, usage: Usage) -> Iterator[dict[str, Any]]:
        assert self._last is not None
        if not self._texts and not self._calls:
            yield from self._begin_message()
            self._texts.append("")
        whole = self.whole([replace(self._last, text="".join(self._texts), calls=tuple(self._calls))], usage)
        yield from self._end_item(whole["status"])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> dict[str, Any]:
        told = error.body["error"]
        body = self._body("failed", [], None) | {"error": {"code": told["code"], "message": told["message"]}}
        return self._event("response.failed", response=body)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (piece,) = pieces
        cut, calls = piece.finish_reason == "length", joined(piece.calls)
        status = "incomplete" if cut else "completed"
        said = [self._message(piece.text, "completed" if calls else status)] if piece.text or not calls else []
        called = [_call_item(call, status if call == calls[-1] else "completed") for call in calls]
        read = self._cached + usage.prompt_tokens
        counts = {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + usage.completion_tokens, "state_bytes": usage.state_bytes,
        }  # fmt: skip
        body = self._body(status, [*said, *called], counts)
        body |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "position": piece.position}
        self._store(body, piece)
        return body

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress"))
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        """Return the events that end the item in progress, if there is one."""
        if self._calls:
            call, place = self._calls[-1], self._call_place()
            yield self._event("response.function_call_arguments.done", **place, **_function(call))
            item = _call_item(call, status)
        elif self._texts:
            text, place = "".join(self._texts), self._place
            yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=_part(text))
            item = self._message(text, status)
        else:
            return
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _call_place(self) -> dict[str, Any]:
        """Return the place of the last call in the output: after the message, if there is one."""
        call = self._calls[-1]
        return {"item_id": f"fc_{call.id}", "output_index": call.index + bool(self._texts)}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, **fields, "sequence_number": next(self._numbers)}

    def _body(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        told = {"status": status, "output": output, "usage": usage, "error": None, "incomplete_details": None}
        return {**self._head, **told}

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(call: CallPart, status: str) -> dict[str, Any]:
    identity = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "status": status}
    return {**identity, **_function(call)}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class StateReply(Reply):
    """Answer of ``POST /v1/states``; ``save`` saves the state and describes it."""

    status = 201

    def __init__(self, save: Callable[[], dict[str, Any]]) -> None:
        self._save = save

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._save()
