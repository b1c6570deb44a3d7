"""Prepare requests for the engine: parse bodies, load saved states, tokenize. Large requests take seconds."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from gecko.data import Tokenizer
from gecko.inference import Sampling
from gecko.inference.request import Request
from gecko.inference.text import ChoiceText
from gecko.serving.answer import ChatReply, CompletionReply, Usage
from gecko.serving.bodies import read_json
from gecko.serving.chat import ChatFormat, encode_text
from gecko.serving.limits import ApiError, Limits, first_wrong_field
from gecko.serving.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, Ids
from gecko.state import GeckoState

SUFFIX = ".state"
_STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_LOADED = 4
"""Number of states kept in memory after use."""


class SavedStates:
    """Files ``NAME.state`` of a folder, with a cache of loaded states. Replaced files are loaded again.

    Args:
        folder: None if the server offers no states.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._loaded: OrderedDict[tuple[str | int, ...], GeckoState] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the states in the folder."""
        if self._folder is None:
            return []
        names = (path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}") if path.is_file())
        return sorted(name for name in names if _STATE_NAME.fullmatch(name))

    def load(self, name: str) -> GeckoState:
        """Load the state with this name; thread-safe.

        Raises:
            ApiError: 404 if there is no such state; 400 if its file is damaged or does not hold a state of one row.
        """
        if self._folder is None:
            raise ApiError(
                400, "this server offers no states; start it with gecko serve --states FOLDER", param="state"
            )
        path = self._folder / f"{name}{SUFFIX}"
        if not _STATE_NAME.fullmatch(name) or not path.is_file():
            raise ApiError(404, f"there is no state {name[:100]!r}", code="state_not_found", param="state")
        try:
            return self._load(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).replace(str(path), f"the state {name!r}")
            raise ApiError(400, reason, code="invalid_state", param="state") from error

    def _load(self, path: Path) -> GeckoState:
        facts = path.stat()
        # Size and modification time may equal those of the replaced file: all states of a model have the same size.
        key = (path.name, facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size)
        with self._lock:
            state = self._loaded.pop(key, None)
        if state is None:
            state = GeckoState.load(path)
        if state.batch_size != 1:
            raise ValueError(f"a state must have one row to continue a text; {path} has {state.batch_size}.")
        with self._lock:
            self._loaded[key] = state
            while len(self._loaded) > _MAX_LOADED:
                self._loaded.popitem(last=False)
        return state


DEFAULT_TOKENS = 16
"""Default of ``max_tokens`` of a completion, as in the API of OpenAI."""
MAX_ECHO = 1 << 20
"""Maximum number of prompt characters that an answer repeats, over all choices."""
MAX_ECHO_IDS = 1 << 16
"""Maximum number of prompt ids that an answer repeats as text: tokenizers hold the GIL while they decode."""
_SEEDS = 1 << 63
_SMALL = 1 << 16
"""Maximum size in bytes of a body that is prepared in milliseconds, whatever its content."""
_PART = 1 << 16
"""Number of ids converted at once: the conversion of a longer list holds the GIL for too long."""
_LOGPROB_BYTES = 512
"""Memory of one log-probability, from the token to the encoded answer."""
_ECHO_BYTES = 10
"""Memory of one echoed character, in the text of the prompt and in the encoded answer."""
ApiRequest = CompletionRequest | ChatRequest
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """Properties of the model that answers depend on."""

    name: str
    vocab_size: int
    state_bytes: int
    """Size of the state of one sequence, which is constant."""
    tokenizer: Tokenizer
    chat: ChatFormat


@dataclass(frozen=True)
class Prepared:
    """Requests to the engine and the format of their answer."""

    requests: Sequence[Request]
    choices: Sequence[ChoiceText]
    reply: CompletionReply | ChatReply
    usage: Usage
    num_bytes: int
    """Memory until the answer is sent."""


class Threads:
    """Thread pools for work that would block the event loop.

    Large requests are prepared one at a time, small requests in parallel to them. Answers are encoded one at a time.
    """

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, "gecko-large")
        self._small = ThreadPoolExecutor(2, "gecko-small")
        self._answers = ThreadPoolExecutor(1, "gecko-answers")

    async def run(self, size: int, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run ``function`` for a body of ``size`` bytes and return its result."""
        threads = self._small if size <= _SMALL else self._large
        return await asyncio.wrap_future(threads.submit(function, *arguments, **options))

    async def encode(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run ``function``, which encodes an answer, and return its result."""
        return await asyncio.wrap_future(self._answers.submit(function, *arguments, **options))

    def close(self) -> None:
        for threads in (self._large, self._small, self._answers):
            threads.shutdown(wait=False, cancel_futures=True)


class Preparation:
    """Preparation of requests for one model; thread-safe."""

    def __init__(self, model: ServedModel, limits: Limits, states: SavedStates) -> None:
        self._model, self._limits, self._states = model, limits, states

    def parse(self, kind: type[CompletionRequest] | type[ChatRequest], take: Callable[[], bytearray]) -> ApiRequest:
        """Parse and validate the body that ``take`` returns.

        Raises:
            ApiError: 400 for an invalid body, 404 for another model.
        """
        try:
            data = read_json(take())
        except ValueError as error:
            raise ApiError(400, f"the body must be JSON; {error}", code="invalid_json") from error
        try:
            asked = kind.model_validate(data)
        except ValidationError as error:
            raise first_wrong_field(error.errors(include_url=False)) from error
        self._check(asked)
        return asked

    def prepare(self, asked: ApiRequest) -> Prepared:
        """Tokenize the prompts and build the requests to the engine.

        Raises:
            ApiError, ValueError: the request is out of the model's or the server's range.
        """
        state = None if asked.state is None else self._states.load(asked.state)
        prompts = [self._check_ids(ids) for ids in self._ids(asked, state)]
        reply = self._reply(asked)
        requests = self._requests(asked, prompts, state)
        follows = [self._follows_text(asked, prompt, state) for prompt in prompts]
        choices = [
            self._choice(index, asked, request, follows[index // asked.n]) for index, request in enumerate(requests)
        ]
        usage = Usage(sum(map(len, prompts)), 0, self._model.state_bytes)
        return Prepared(requests, choices, reply, usage, self._num_bytes(asked, prompts, reply))

    def _num_bytes(self, asked: ApiRequest, prompts: Sequence[Tensor], reply: CompletionReply | ChatReply) -> int:
        """Return the memory of the request's tokens and of its answer, in bytes."""
        size = sum(prompt.nbytes for prompt in prompts)
        if asked.num_top_logprobs is not None:
            size += _LOGPROB_BYTES * num_choices(asked) * self._new_tokens(asked) * (asked.num_top_logprobs + 1)
        if isinstance(reply, CompletionReply):
            size += _ECHO_BYTES * sum(map(len, reply.echoes))
        return size

    def _check(self, asked: ApiRequest) -> None:
        if asked.model not in (None, self._model.name):
            raise ApiError(
                404, f"the model must be {self._model.name!r}; got {asked.model[:100]!r}",
                code="model_not_found", param="model",
            )  # fmt: skip
        if self._new_tokens(asked) > self._limits.new_tokens:
            raise ApiError(
                400, f"max_tokens must be at most {self._limits.new_tokens}; got {self._new_tokens(asked)}",
                code="invalid_value", param="max_tokens",
            )  # fmt: skip
        if isinstance(asked, CompletionRequest):
            if num_choices(asked) > MAX_CHOICES:
                raise ApiError(
                    400,
                    f"prompts × n must be at most {MAX_CHOICES}; got {num_choices(asked)}",
                    code="invalid_value",
                    param="n",
                )
            if asked.echo:
                for kind, most in ((str, MAX_ECHO), (list, MAX_ECHO_IDS)):
                    prompts = [prompt for prompt in _prompts(asked) if isinstance(prompt, kind)]
                    self._check_echo(asked, sum(map(len, prompts)), most)

    def _check_echo(self, asked: CompletionRequest, length: int, most: int) -> None:
        if asked.n * length > most:
            raise ApiError(
                400,
                f"echo must repeat at most {MAX_ECHO:,} characters, or {MAX_ECHO_IDS:,} ids, in all choices together; "
                f"got {asked.n * length:,}. Leave out echo, or request fewer choices",
                code="invalid_value", param="echo",
            )  # fmt: skip

    def _new_tokens(self, asked: ApiRequest) -> int:
        if isinstance(asked, CompletionRequest):
            return min(DEFAULT_TOKENS, self._limits.new_tokens) if asked.max_tokens is None else asked.max_tokens
        wanted = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return self._limits.new_tokens if wanted is None else wanted

    def _reply(self, asked: ApiRequest) -> CompletionReply | ChatReply:
        if isinstance(asked, ChatRequest):
            return ChatReply(self._model.name)
        prompts = _prompts(asked)
        if not asked.echo:
            return CompletionReply(self._model.name, [""] * (len(prompts) * asked.n))
        texts = [prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt) for prompt in prompts]
        self._check_echo(asked, sum(map(len, texts)), MAX_ECHO)
        return CompletionReply(self._model.name, [text for text in texts for _ in range(asked.n)])

    def _requests(self, asked: ApiRequest, prompts: Sequence[Tensor], state: GeckoState | None) -> list[Request]:
        """Return one request per choice."""
        sampling = asked.sampling()
        seed = random.getrandbits(53) if asked.seed is None else asked.seed
        repeated = [prompt for prompt in prompts for _ in range(asked.n)]
        return [
            self._request(asked, prompt, sampling, (seed + index) % _SEEDS, state)
            for index, prompt in enumerate(repeated)
        ]

    def _request(
        self, asked: ApiRequest, prompt: Tensor, sampling: Sampling, seed: int, state: GeckoState | None
    ) -> Request:
        chat = isinstance(asked, ChatRequest)
        stop_tokens = self._model.chat.stop_ids if chat else frozenset({self._model.tokenizer.document_end})
        return Request(prompt, self._new_tokens(asked), sampling, seed, stop_tokens, asked.num_top_logprobs, state)

    def _ids(self, asked: ApiRequest, state: GeckoState | None) -> list[Tensor]:
        if isinstance(asked, ChatRequest):
            ids = self._model.chat.encode(asked.messages)
            begins = ids[:1] == [self._model.tokenizer.document_start]
            # The state is inside a document, so no document starts here.
            return [self._tensor(ids[1:] if state is not None and begins else ids)]
        return [self._encode(prompt, state) for prompt in _prompts(asked)]

    def _encode(self, prompt: str | Ids, state: GeckoState | None) -> Tensor:
        if not isinstance(prompt, str):
            return self._tensor(prompt)
        start = [] if state is not None else [self._model.tokenizer.document_start]
        ids = encode_text(self._model.tokenizer, prompt)
        self._check_length(len(start) + len(ids))
        return torch.from_numpy(np.concatenate([np.array(start, dtype=np.int64), ids]))

    def _tensor(self, ids: Ids) -> Tensor:
        self._check_length(len(ids))
        parts = [ids[begin : begin + _PART] for begin in range(0, len(ids), _PART)]
        for part in parts:
            if min(part) < 0 or max(part) >= self._model.vocab_size:
                raise self._id_error(next(index for index in part if not 0 <= index < self._model.vocab_size))
        return torch.cat([torch.tensor(part) for part in parts])

    def _check_ids(self, ids: Tensor) -> Tensor:
        self._check_length(len(ids))
        if int(ids.max()) >= self._model.vocab_size:
            raise self._id_error(int(ids.max()))
        return ids

    def _check_length(self, length: int) -> None:
        if not 0 < length <= self._limits.prompt_tokens:
            code = "context_length_exceeded" if length else "invalid_value"
            limit = f"1 to {self._limits.prompt_tokens:,}"
            raise ApiError(400, f"a prompt must have {limit} tokens; got {length:,}", code=code, param="prompt")

    def _id_error(self, wrong: int) -> ApiError:
        limit = self._model.vocab_size - 1
        return ApiError(
            400, f"token ids must be in 0..{limit}; got {str(wrong)[:40]}", code="invalid_value", param="prompt"
        )

    def _choice(self, index: int, asked: ApiRequest, request: Request, goes_on: bool) -> ChoiceText:
        position = request.start_position + len(request.prompt)
        stops = [*asked.stop, *(self._model.chat.stops if isinstance(asked, ChatRequest) else ())]
        return ChoiceText(index, self._model.tokenizer, stops, position, goes_on=goes_on)

    def _follows_text(self, asked: ApiRequest, prompt: Tensor, state: GeckoState | None) -> bool:
        """Return whether the new text continues other text: not in a chat, nor after special tokens only."""
        if isinstance(asked, ChatRequest):
            return False
        special = np.array(sorted(self._model.tokenizer.special_ids), dtype=np.int64)
        start_position = 0 if state is None else state.position[0]
        return start_position > 0 or not bool(np.isin(prompt.numpy(), special).all())


def num_choices(asked: ApiRequest) -> int:
    """Return the number of choices over all prompts."""
    return asked.n * (1 if isinstance(asked, ChatRequest) else len(_prompts(asked)))


def _prompts(asked: CompletionRequest) -> Sequence[str | Ids]:
    """Return the prompts as a list, also if there is one."""
    prompt = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt
