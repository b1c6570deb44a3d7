"""Format of responses of ``/v1/responses``, whole and as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

from gecko.inference.text import Piece
from gecko.serving.answer import Usage, encode_json
from gecko.serving.limits import ApiError
from gecko.serving.responses.fields import ResponseRequest

_PLACE = {"output_index": 0, "content_index": 0}
"""Place of the text in a response: it has one output item with one part."""


class ResponseReply:
    """Format of one response.

    Args:
        cached_tokens: tokens of the conversation before the prompt, which the state had read.
    """

    def __init__(self, model: str, asked: ResponseRequest, cached_tokens: int) -> None:
        self.id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._cached = cached_tokens
        form = None if asked.text is None else asked.text.format
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        self._head = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": model, "background": False,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata, "parallel_tool_calls": False,
            "previous_response_id": asked.previous_response_id, "reasoning": {"effort": None, "summary": None},
            "service_tier": "default", "store": asked.store,
            "temperature": 1.0 if asked.temperature is None else asked.temperature, "text": {"format": shown},
            "tool_choice": "none", "tools": [], "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
        }  # fmt: skip

    def begun(self) -> dict[str, Any]:
        """Return the response before its first text."""
        return self._body("in_progress", [], None)

    def finished(self, piece: Piece, usage: Usage) -> dict[str, Any]:
        """Return the whole response; ``piece`` has all of its text."""
        cut = piece.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        body = self._body(status, [self._item(status, piece.text)], self._usage(usage))
        return body | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "position": piece.position,
        }  # fmt: skip

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the response after an error that ended its stream."""
        told = error.body["error"]
        return self._body("failed", [], None) | {"error": {"code": told["code"], "message": told["message"]}}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first text."""
        yield {"type": "response.created", "response": self.begun()}
        yield {"type": "response.in_progress", "response": self.begun()}
        item = self._item("in_progress", None)
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield {"type": "response.content_part.added", "item_id": self._item_id, **_PLACE, "part": _part("")}

    def delta(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the event of new text."""
        if piece.text:
            kind = "response.output_text.delta"
            yield {"type": kind, "item_id": self._item_id, **_PLACE, "delta": piece.text, "logprobs": []}

    def closing(self, whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events after the last text of the response ``whole``."""
        (item,), status = whole["output"], whole["status"]
        (part,) = item["content"]
        place = {"item_id": self._item_id, **_PLACE}
        yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": f"response.{status}", "response": whole}

    def _body(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            **self._head, "status": status, "output": output, "usage": usage, "error": None,
            "incomplete_details": None,
        }  # fmt: skip

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        read = self._cached + usage.prompt_tokens
        return {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + usage.completion_tokens, "state_bytes": usage.state_bytes,
        }  # fmt: skip


async def encode_events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Number and encode the events of a stream."""
    numbers = count()
    async for event in events:
        yield f"event: {event['type']}\ndata: {encode_json(event | {'sequence_number': next(numbers)})}\n\n".encode()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
