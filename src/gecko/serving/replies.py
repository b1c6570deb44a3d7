"""The JSON of OpenAI's answers, whole and in chunks.

What Gecko adds: ``position`` of every choice, where its reading state stands, and ``usage.state_bytes``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gecko.serving.text import Chance, Piece, TokenText

_LEAST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON has no number for."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    state_bytes: int
    """Size of the reading state of one text, at any position."""

    @property
    def json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens, "state_bytes": self.state_bytes,
        }  # fmt: skip


class Reply(Protocol):
    """How one kind of answer is written."""

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """Chunks before the first text."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One chunk of a stream."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream, where it is asked for."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer, from one piece for each choice."""


class _Base:
    def __init__(self, prefix: str, model: str) -> None:
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}


class CompletionReply(_Base):
    """Of ``/v1/completions``.

    Args:
        echoes: text that each choice begins with.
    """

    def __init__(self, model: str, echoes: Sequence[str]) -> None:
        super().__init__("cmpl", model)
        self._echoes = list(echoes)

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """The prompts, where they are to be repeated."""
        return [self._body("text_completion", [_text_choice(i, echo)]) for i, echo in enumerate(self._echoes) if echo]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._body("text_completion", [_text_choice(piece.choice, piece.text, piece)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body("text_completion", []) | {"usage": usage.json}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [_text_choice(piece.choice, self._echoes[piece.choice] + piece.text, piece) for piece in pieces]
        return self._body("text_completion", choices) | {"usage": usage.json}


class ChatReply(_Base):
    """Of ``/v1/chat/completions``."""

    def __init__(self, model: str) -> None:
        super().__init__("chatcmpl", model)

    def opening(self, choices: int) -> Iterable[dict[str, Any]]:
        """Who speaks."""
        return [self._delta(index, {"role": "assistant", "content": ""}, None) for index in range(choices)]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._delta(piece.choice, {"content": piece.text} if piece.text else {}, piece)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage.json}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append({"message": message, **_chat_choice(piece.choice, piece)})
        return self._body("chat.completion", choices) | {"usage": usage.json}

    def _delta(self, index: int, delta: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
        return self._body("chat.completion.chunk", [{"delta": delta, **_chat_choice(index, piece)}])


def _text_choice(index: int, text: str, piece: Piece | None = None) -> dict[str, Any]:
    logprobs = _text_logprobs(piece.tokens) if piece is not None and piece.tokens else None
    return {"index": index, "text": text, "logprobs": logprobs, **_standing(piece)}


def _chat_choice(index: int, piece: Piece | None) -> dict[str, Any]:
    logprobs = _chat_logprobs(piece.tokens) if piece is not None and piece.tokens else None
    return {"index": index, "logprobs": logprobs, **_standing(piece)}


def _standing(piece: Piece | None) -> dict[str, Any]:
    if piece is None:
        return {"finish_reason": None}
    return {"finish_reason": piece.finish_reason, "position": piece.position}


def _text_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "tokens": [token.made.name for token in tokens],
        "token_logprobs": [_number(token.made) for token in tokens],
        "top_logprobs": [{other.name: _number(other) for other in reversed(token.likeliest)} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
    return {
        "content": [
            _chat_token(token.made) | {"top_logprobs": [_chat_token(other) for other in token.likeliest]}
            for token in tokens
        ]
    }


def _chat_token(chance: Chance) -> dict[str, Any]:
    content = None if chance.text is None else list(chance.text.encode())
    return {"token": chance.name, "logprob": _number(chance), "bytes": content}


def _number(chance: Chance) -> float:
    return max(chance.log_probability, _LEAST)
