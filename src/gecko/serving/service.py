"""From what a client asks to requests of the engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gecko.data import Tokenizer
from gecko.generation import Sampling
from gecko.serving.answer import Answer
from gecko.serving.chat import ChatFormat
from gecko.serving.errors import ApiError
from gecko.serving.limits import Admission, Limits
from gecko.serving.metrics import Metrics
from gecko.serving.replies import ChatReply, CompletionReply, Usage
from gecko.serving.request import QueueFullError, Request
from gecko.serving.schemas import MAX_CHOICES, ChatRequest, CompletionRequest, Ids
from gecko.serving.states import SavedStates
from gecko.serving.text import ChoiceText
from gecko.serving.worker import Worker, WorkerClosedError
from gecko.state import GeckoState

DEFAULT_TOKENS = 16
"""New tokens of a completion that asks for no number, as OpenAI has it."""
_SEEDS = 1 << 63
Asked = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class ServedModel:
    """What clients see of the model."""

    name: str
    vocab_size: int
    state_bytes: int
    """Size of the reading state of one text, at any position."""
    tokenizer: Tokenizer
    chat: ChatFormat


class Service:
    """Takes requests in and begins their answers; for the event loop."""

    def __init__(
        self, model: ServedModel, worker: Worker, metrics: Metrics, limits: Limits, states: SavedStates
    ) -> None:
        self.model, self.worker, self.metrics, self.limits, self.states = model, worker, metrics, limits, states
        self.admission = Admission(limits)

    def reply(self, asked: Asked) -> CompletionReply | ChatReply:
        """How the answer is written."""
        if isinstance(asked, ChatRequest):
            return ChatReply(self.model.name)
        prompts = _prompts(asked)
        echoes = [self._text(prompt) if asked.echo else "" for prompt in prompts for _ in range(asked.n)]
        return CompletionReply(self.model.name, echoes)

    async def begin(self, asked: Asked) -> Answer:
        """Hand the request to the engine; whoever gets the answer closes it.

        Raises:
            ApiError: it cannot be had as asked for, or not now.
        """
        begun = time.monotonic()
        self._check(asked)
        places = asked.n * (1 if isinstance(asked, ChatRequest) else len(_prompts(asked)))
        self.admission.take(places)
        try:
            requests = await asyncio.to_thread(self._requests, asked)
            running = await self.worker.submit(requests, begun, begun + self.limits.seconds)
        except BaseException as error:
            self.admission.release(places)
            told = _told(error)
            if told is None:
                raise
            raise told from error
        choices = [self._choice(index, asked, request) for index, request in enumerate(requests)]
        usage = Usage(sum(len(request.prompt) for request in requests[:: asked.n]), 0, self.model.state_bytes)
        return Answer(running, choices, self.metrics, usage, partial(self.admission.release, places))

    def _check(self, asked: Asked) -> None:
        if asked.model not in (None, self.model.name):
            raise ApiError(
                404, f"the model here is {self.model.name!r}; got {asked.model[:100]!r}",
                code="model_not_found", param="model",
            )  # fmt: skip
        if self._new_tokens(asked) > self.limits.new_tokens:
            raise ApiError(
                400, f"max_tokens must be at most {self.limits.new_tokens}; got {self._new_tokens(asked)}",
                code="invalid_value", param="max_tokens",
            )  # fmt: skip
        if isinstance(asked, CompletionRequest) and asked.n * len(_prompts(asked)) > MAX_CHOICES:
            raise ApiError(400, f"prompts × n must be at most {MAX_CHOICES}", code="invalid_value", param="n")

    def _new_tokens(self, asked: Asked) -> int:
        if isinstance(asked, CompletionRequest):
            return min(DEFAULT_TOKENS, self.limits.new_tokens) if asked.max_tokens is None else asked.max_tokens
        wanted = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return self.limits.new_tokens if wanted is None else wanted

    def _requests(self, asked: Asked) -> list[Request]:
        """One for each continuation. Texts may be long: for a thread of its own."""
        state = None if asked.state is None else self.states.load(asked.state)
        sampling = asked.sampling()
        seed = random.getrandbits(53) if asked.seed is None else asked.seed
        prompts = [prompt for prompt in self._ids(asked, state) for _ in range(asked.n)]
        return [
            self._request(asked, prompt, sampling, (seed + index) % _SEEDS, state)
            for index, prompt in enumerate(prompts)
        ]

    def _request(
        self, asked: Asked, prompt: Tensor, sampling: Sampling, seed: int, state: GeckoState | None
    ) -> Request:
        chat = isinstance(asked, ChatRequest)
        stop_tokens = self.model.chat.stop_ids if chat else frozenset({self.model.tokenizer.document_end})
        return Request(prompt, self._new_tokens(asked), sampling, seed, stop_tokens, asked.likeliest, state)

    def _ids(self, asked: Asked, state: GeckoState | None) -> list[Tensor]:
        if isinstance(asked, ChatRequest):
            ids = self.model.chat.encode(asked.messages)
            begins = ids[:1] == [self.model.tokenizer.document_start]
            # A state stands inside of a document already.
            return [self._checked(ids[1:] if state is not None and begins else ids)]
        return [self._checked(self._encode(prompt, state)) for prompt in _prompts(asked)]

    def _encode(self, prompt: str | Ids, state: GeckoState | None) -> Ids:
        if not isinstance(prompt, str):
            return prompt
        start = [] if state is not None else [self.model.tokenizer.document_start]
        return [*start, *self.model.tokenizer.encode(prompt).tolist()]

    def _checked(self, ids: Ids) -> Tensor:
        if not 0 < len(ids) <= self.limits.prompt_tokens:
            code = "context_length_exceeded" if ids else "invalid_value"
            limit = f"1 to {self.limits.prompt_tokens:,}"
            raise ApiError(400, f"a prompt must have {limit} tokens; got {len(ids):,}", code=code, param="prompt")
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            wrong = next(index for index in ids if not 0 <= index < self.model.vocab_size)
            raise ApiError(
                400, f"token ids must be in 0..{self.model.vocab_size - 1}; got {str(wrong)[:40]}",
                code="invalid_value", param="prompt",
            )  # fmt: skip
        return torch.tensor(ids)

    def _choice(self, index: int, asked: Asked, request: Request) -> ChoiceText:
        chat, position = isinstance(asked, ChatRequest), request.begins_at + len(request.prompt)
        # A turn of a conversation is a text of its own.
        goes_on = not chat and self._follows_text(request)
        stops = [*asked.stop, *(self.model.chat.stops if chat else ())]
        return ChoiceText(index, self.model.tokenizer, stops, position, goes_on=goes_on)

    def _follows_text(self, request: Request) -> bool:
        """Whether anything but document borders stands before the new text."""
        special = self.model.tokenizer.special_ids
        # From the end: a prompt may be long, and most end in text.
        return request.begins_at > 0 or any(int(index) not in special for index in reversed(request.prompt.numpy()))

    def _text(self, prompt: str | Ids) -> str:
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)


def _told(error: BaseException) -> ApiError | None:
    """What a client is told of what the engine or its thread refused; None for anything else."""
    if isinstance(error, ValueError | TypeError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, WorkerClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    return None


def _prompts(asked: CompletionRequest) -> Sequence[str | Ids]:
    """One or several, as one list."""
    prompt = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt
