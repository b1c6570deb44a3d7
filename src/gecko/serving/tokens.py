"""Routes ``/tokenize`` and ``/detokenize``, in the form of vLLM: the ids of a prompt, and the text of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gecko.data.chat import encode_text
from gecko.data.tokenizers import TokenIds
from gecko.inference.text import TokenNames
from gecko.serving.answer import encode_json
from gecko.serving.bodies import parse_body
from gecko.serving.limits import ApiError, Limits
from gecko.serving.prepare import MAX_ECHO_IDS, ServedModel
from gecko.serving.protocol import DetokenizeRequest, TokenizeRequest

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_PART = 1 << 16
"""Ids that are encoded as JSON at once: a call holds the GIL until it returns."""


class TokenRoutes:
    """Answers to requests for tokens, as encoded JSON; thread-safe. Large requests take seconds."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self._model, self._limits, self._names = model, limits, TokenNames(model.tokenizer)

    def tokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer the request whose body ``take`` returns with the ids that a generation would read.

        Raises:
            ApiError, ValueError: the request is invalid, or the prompt is too long.
        """
        asked = parse_body(TokenizeRequest, take())
        self._model.check_name(asked.model)
        ids = self._ids(asked)
        if len(ids) > self._limits.prompt_tokens:
            raise ApiError(
                400, f"a prompt must have at most {self._limits.prompt_tokens:,} tokens; got {len(ids):,}",
                code="context_length_exceeded", param="prompt",
            )  # fmt: skip
        strings = _encode_list(ids, self._name) if asked.return_token_strs else b"null"
        head = f'{{"count":{len(ids)},"max_model_len":{self._limits.prompt_tokens},"tokens":'.encode()
        return b"".join((head, _encode_list(ids, int), b',"token_strs":', strings, b"}"))

    def detokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer the request whose body ``take`` returns with the text of its ids, without special ids.

        Raises:
            ApiError: the request is invalid, or has too many ids.
        """
        asked = parse_body(DetokenizeRequest, take())
        self._model.check_name(asked.model)
        if len(asked.tokens) > MAX_ECHO_IDS:
            raise _wrong_ids(f"there must be at most {MAX_ECHO_IDS:,} ids; got {len(asked.tokens):,}")
        wrong = next((index for index in asked.tokens if not 0 <= index < self._model.vocab_size), None)
        if wrong is not None:
            raise _wrong_ids(f"token ids must be in 0..{self._model.vocab_size - 1}; got {str(wrong)[:40]}")
        return encode_json({"prompt": self._model.tokenizer.decode(asked.tokens)}).encode()

    def _ids(self, asked: TokenizeRequest) -> TokenIds:
        if asked.messages:
            return np.array(self._model.chat.encode(asked.messages), dtype=np.int64)
        ids = encode_text(self._model.tokenizer, asked.prompt or "")
        start = [] if asked.add_special_tokens is False else [self._model.tokenizer.document_start]
        return np.concatenate([np.array(start, dtype=np.int64), ids])

    def _name(self, token: int) -> str:
        return self._names.logprob(token, None).name


def _encode_list(ids: TokenIds, form: Callable[[int], Any]) -> bytes:
    """Encode ``form`` of every id as a list of JSON."""
    parts: Sequence[Any] = [ids[begin : begin + _PART].tolist() for begin in range(0, len(ids), _PART)]
    return b"[" + b",".join(encode_json(list(map(form, part)))[1:-1].encode() for part in parts) + b"]"


def _wrong_ids(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="tokens")
