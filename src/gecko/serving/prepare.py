"""Prepare requests for the engine: parse bodies, load saved states, tokenize. Large requests take seconds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gecko.data import Tokenizer
from gecko.data.chat import ChatFormat, encode_text
from gecko.inference import Sampling
from gecko.inference.grammar import Constraint, ConstraintError, GrammarCompiler
from gecko.inference.request import Request
from gecko.inference.text import ChoiceText, TokenNames
from gecko.serving.answer import ChatReply, CompletionReply, Usage
from gecko.serving.bodies import parse_body
from gecko.serving.limits import ApiError, Limits
from gecko.serving.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, Ids
from gecko.serving.states.files import SavedStates
from gecko.serving.structured import GrammarField
from gecko.state import GeckoState

DEFAULT_TOKENS = 16
"""Default of ``max_tokens`` of a completion, as in the API of OpenAI."""
MAX_ECHO = 1 << 20
"""Maximum number of prompt characters that an answer repeats, over all choices."""
MAX_ECHO_IDS = 1 << 16
"""Maximum number of prompt ids that an answer repeats as text: tokenizers hold the GIL while they decode."""
_SMALL = 1 << 16
"""Maximum size in bytes of a body that is prepared in milliseconds, whatever its content."""
LARGE = _SMALL + 1
"""Size at which requests with a constraint count: it takes up to a second to compile."""
_PART = 1 << 16
"""Number of ids converted at once: the conversion of a longer list holds the GIL for too long."""
_LOGPROB_BYTES = 512
"""Memory of one log-probability, from the token to the encoded answer."""
_ECHO_BYTES = 16
"""Memory of one echoed character, in the text of the prompt and in the encoded answer."""
_CONSTRAINT_BYTES = 1 << 21
"""Memory of a constraint; most take less, and the limits of ``gecko.inference.grammar`` allow more."""
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

    def check_name(self, asked: str | None) -> None:
        """Raise ApiError 404 if a request asks for another model."""
        if asked not in (None, self.name):
            raise ApiError(
                404, f"the model must be {self.name!r}; got {asked[:100]!r}", code="model_not_found", param="model"
            )


@dataclass(frozen=True)
class Prepared:
    """Requests to the engine."""

    requests: Sequence[Request]
    choices: Sequence[ChoiceText]
    usage: Usage
    num_bytes: int
    """Memory until the answer is sent."""


@dataclass(frozen=True)
class PreparedReply(Prepared):
    """Requests to the engine and the format of their answer."""

    reply: CompletionReply | ChatReply


class Asked(Protocol):
    """A validated body, of which the engine gets one request per choice."""

    @property
    def n(self) -> int:
        """Choices per prompt."""

    @property
    def constrained(self) -> bool:
        """Whether the text may have to match a grammar, which takes long to prepare."""


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
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size)
        self._names = TokenNames(model.tokenizer)

    def parse(self, kind: type[CompletionRequest] | type[ChatRequest], take: Callable[[], bytearray]) -> ApiRequest:
        """Parse and validate the body that ``take`` returns.

        Raises:
            ApiError: 400 for an invalid body, 404 for another model.
        """
        asked = parse_body(kind, take())
        self.check(asked)
        return asked

    def prepare(self, asked: ApiRequest) -> PreparedReply:
        """Tokenize the prompts and build the requests to the engine.

        Raises:
            ApiError, ValueError: the request is out of the model's or the server's range.
        """
        state = None if asked.state is None else self._states.load(asked.state)
        return self.build(asked, self._ids(asked, state), state)

    def build(self, asked: ApiRequest, prompts: Sequence[Tensor], state: GeckoState | None) -> PreparedReply:
        """Build the requests to the engine from the ids of the prompts, which continue ``state``.

        Raises:
            ApiError, ValueError: the request is out of the model's or the server's range.
        """
        prompts = [self._check_ids(ids) for ids in prompts]
        name, scored = self._model.name, asked.num_top_logprobs is not None
        reply = ChatReply(name, scored) if isinstance(asked, ChatRequest) else CompletionReply(name)
        echoes = self._echoes(asked, prompts)
        requests = self._requests(asked, prompts, state)
        follows = [self._follows_text(asked, prompt, state) for prompt in prompts]
        choices = [
            self._choice(index, asked, request, follows[index // asked.n], echoes[index // asked.n])
            for index, request in enumerate(requests)
        ]
        usage = Usage(sum(map(len, prompts)), 0, self._model.state_bytes)
        return PreparedReply(requests, choices, usage, self._num_bytes(asked, prompts, echoes), reply)

    def _num_bytes(self, asked: ApiRequest, prompts: Sequence[Tensor], echoes: Sequence[str]) -> int:
        """Return the memory of the request's tokens and of its answer, in bytes."""
        size = sum(prompt.nbytes for prompt in prompts) + _ECHO_BYTES * asked.n * sum(map(len, echoes))
        if asked.num_top_logprobs is not None:
            scored = num_choices(asked) * self._new_tokens(asked)
            if _prompt_logprobs(asked) is not None:
                scored += asked.n * sum(map(len, prompts))
            size += _LOGPROB_BYTES * scored * (asked.num_top_logprobs + 1)
        return size + (_CONSTRAINT_BYTES if asked.constrained else 0)

    def check(self, asked: ApiRequest) -> None:
        """Check a request before its prompts are tokenized; ApiError 400, or 404 for another model."""
        self._model.check_name(asked.model)
        self._check_stops(asked)
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
            elif asked.max_tokens == 0:
                raise ApiError(
                    400, "max_tokens must be at least 1 without echo; got 0", code="invalid_value", param="max_tokens"
                )

    def _check_stops(self, asked: ApiRequest) -> None:
        if asked.min_tokens > self._new_tokens(asked):
            raise ApiError(
                400, f"min_tokens must be at most max_tokens, {self._new_tokens(asked)}; got {asked.min_tokens}",
                code="invalid_value", param="min_tokens",
            )  # fmt: skip
        wrong = next((index for index in asked.stop_token_ids if not 0 <= index < self._model.vocab_size), None)
        if wrong is not None:
            raise self._id_error(wrong, "stop_token_ids")

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

    def _echoes(self, asked: ApiRequest, ids: Sequence[Tensor]) -> Sequence[str]:
        """Return the text that the answer repeats of each prompt; empty without ``echo``."""
        if isinstance(asked, ChatRequest) or not asked.echo:
            return [""] * len(ids)
        if asked.logprobs is not None:
            self._check_echo(asked, sum(map(len, ids)), MAX_ECHO_IDS)
        texts = [
            prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt) for prompt in _prompts(asked)
        ]
        self._check_echo(asked, sum(map(len, texts)), MAX_ECHO)
        return texts

    def _requests(self, asked: ApiRequest, prompts: Sequence[Tensor], state: GeckoState | None) -> list[Request]:
        """Return one request per choice. Those of every prompt have the seeds from ``seed`` on, as in vLLM."""
        sampling, constraint = _sampling(asked), self._compile(asked.grammar())
        seeds = [random.getrandbits(53) if asked.seed is None else asked.seed for _ in prompts]
        return [
            self._request(asked, prompt, sampling, seed + index, state, constraint)
            for seed, prompt in zip(seeds, prompts, strict=True) for index in range(asked.n)
        ]  # fmt: skip

    def _request(
        self, asked: ApiRequest, prompt: Tensor, sampling: Sampling, seed: int, state: GeckoState | None,
        constraint: Constraint | None,
    ) -> Request:  # fmt: skip
        return Request(
            prompt, self._new_tokens(asked), sampling, seed, self._stop_tokens(asked), asked.num_top_logprobs, state,
            min_new_tokens=asked.min_tokens, prompt_logprobs=_prompt_logprobs(asked), constraint=constraint,
        )  # fmt: skip

    def _compile(self, asked: GrammarField | None) -> Constraint | None:
        if asked is None:
            return None
        try:
            return self._grammars.compile(asked.grammar)
        except (ConstraintError, ImportError) as error:
            raise ApiError(400, f"{asked.name}: {error}", code="invalid_constraint", param=asked.name) from error

    def _stop_tokens(self, asked: ApiRequest) -> frozenset[int]:
        if asked.ignore_eos:
            return frozenset(asked.stop_token_ids)
        chat = isinstance(asked, ChatRequest)
        ends = self._model.chat.stop_ids if chat else frozenset({self._model.tokenizer.document_end})
        return ends.union(asked.stop_token_ids)

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
        return torch.cat([torch.tensor(part, device="cpu") for part in parts])

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

    def _id_error(self, wrong: int, field: str = "prompt") -> ApiError:
        limit = self._model.vocab_size - 1
        return ApiError(
            400, f"{field}: token ids must be in 0..{limit}; got {str(wrong)[:40]}", code="invalid_value", param=field
        )

    def _choice(self, index: int, asked: ApiRequest, request: Request, goes_on: bool, echo: str) -> ChoiceText:
        position = request.start_position + len(request.prompt)
        constrained = request.constraint is not None
        stops = [*asked.stop, *(self._model.chat.stops if isinstance(asked, ChatRequest) and not constrained else ())]
        # A constraint covers all characters, also a space of SentencePiece before the first word.
        return ChoiceText(
            index, self._model.tokenizer, stops, position, goes_on=goes_on or constrained,
            min_tokens=asked.min_tokens, echo=echo, scored=request.prompt_logprobs is not None, names=self._names,
        )  # fmt: skip

    def _follows_text(self, asked: ApiRequest, prompt: Tensor, state: GeckoState | None) -> bool:
        """Return whether the new text continues other text: not in a chat, nor after special tokens only."""
        if isinstance(asked, ChatRequest):
            return False
        special = np.array(sorted(self._model.tokenizer.special_ids), dtype=np.int64)
        start_position = 0 if state is None else state.position[0]
        return start_position > 0 or not bool(np.isin(prompt.numpy(), special).all())


def _sampling(asked: ApiRequest) -> Sampling:
    try:
        return asked.sampling()
    except ValueError as error:
        # The message starts with the name of the field.
        raise ApiError(400, str(error), code="invalid_value", param=str(error).split()[0]) from error


def _prompt_logprobs(asked: ApiRequest) -> int | None:
    """Return the number of alternatives to each token of the prompt; None: no log-probabilities of the prompt."""
    return asked.logprobs if isinstance(asked, CompletionRequest) and asked.echo else None


def num_choices(asked: Asked) -> int:
    """Return the number of choices over all prompts."""
    return asked.n * (len(_prompts(asked)) if isinstance(asked, CompletionRequest) else 1)


def _prompts(asked: CompletionRequest) -> Sequence[str | Ids]:
    """Return the prompts as a list, also if there is one."""
    prompt = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt
