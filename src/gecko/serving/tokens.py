"""Routes ``/tokenize`` and ``/detokenize``, in the form of vLLM: the ids of a prompt, and the text of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np

from gecko.data.chat import encode_text
from gecko.data.tokenizers import TokenIds
from gecko.data.turns import linked
from gecko.inference.text import TokenNames
from gecko.records import FieldError
from gecko.serving.chat_requests import ChatMessage, Functions
from gecko.serving.fields import Ids, JsonPart, conversation, parse_body, read
from gecko.serving.limits import ApiError, invalid
from gecko.serving.options import Limits
from gecko.serving.prepare import MAX_ECHO_IDS, ServedModel
from gecko.serving.replies import encode_json

_PART = 1 << 16
"""Ids that are encoded as JSON at once: a call holds the GIL until it returns."""


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest(JsonPart):
    """Body of ``POST /tokenize``: a text, or a conversation as for ``/v1/chat/completions``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], conversation(partial(read, ChatMessage))] = field(default_factory=list)
    tools: Functions = field(default_factory=list)
    add_special_tokens: bool | None = None
    """Whether the document start comes before a text; true unless given."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("there must be a prompt or messages, not both")
        if self.messages and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: the chat format writes those of messages")
        if not self.add_generation_prompt:
            raise FieldError(
                "add_generation_prompt must be true: the last message is answered", "add_generation_prompt"
            )


@dataclass(frozen=True, kw_only=True)
class DetokenizeRequest(JsonPart):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


class TokenRoutes:
    """Answers to requests for tokens, as encoded JSON; thread-safe. Large requests take seconds."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self._model, self._limits, self._names = model, limits, TokenNames(model.tokenizer)

    def tokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer the request whose body ``take`` returns with the ids that a generation would read. Raise ApiError or
        ValueError if the request is invalid, or the prompt is too long."""
        asked = parse_body(TokenizeRequest, take())
        self._model.check_name(asked.model)
        ids = self._ids(asked)
        if len(ids) > self._limits.prompt_tokens:
            message = f"a prompt must have at most {self._limits.prompt_tokens:,} tokens; got {len(ids):,}"
            raise ApiError(400, message, code="context_length_exceeded", param="prompt")
        strings = _encode_list(ids, self._name) if asked.return_token_strs else b"null"
        head = f'{{"count":{len(ids)},"max_model_len":{self._limits.prompt_tokens},"tokens":'.encode()
        return b"".join((head, _encode_list(ids, int), b',"token_strs":', strings, b"}"))

    def detokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer the request whose body ``take`` returns with the text of its ids, without special ids. Raise ApiError
        if the request is invalid, or has too many ids."""
        asked = parse_body(DetokenizeRequest, take())
        self._model.check_name(asked.model)
        if len(asked.tokens) > MAX_ECHO_IDS:
            raise invalid("tokens", f"there must be at most {MAX_ECHO_IDS:,} ids; got {len(asked.tokens):,}")
        self._model.check_ids(asked.tokens, "tokens")
        return encode_json({"prompt": self._model.tokenizer.decode(asked.tokens)}).encode()

    def _ids(self, asked: TokenizeRequest) -> TokenIds:
        if asked.messages:
            turns = linked([message.turn for message in asked.messages], "messages")
            return np.array(self._model.chat.encode(turns, asked.tools), dtype=np.int64)
        ids = encode_text(self._model.tokenizer, asked.prompt or "")
        start = [] if asked.add_special_tokens is False else [self._model.tokenizer.document_start]
        return np.concatenate([np.array(start, dtype=np.int64), ids])

    def _name(self, token: int) -> str:
        return self._names.logprob(token, None).name


def _encode_list(ids: TokenIds, form: Callable[[int], Any]) -> bytes:
    """Encode ``form`` of every id as a list of JSON."""
    parts: Sequence[Any] = [ids[begin : begin + _PART].tolist() for begin in range(0, len(ids), _PART)]
    return b"[" + b",".join(encode_json(list(map(form, part)))[1:-1].encode() for part in parts) + b"]"
