"""Prepare requests for the engine: parse bodies, load saved states, tokenize. Large requests take seconds.

``/tokenize`` and ``/detokenize``, in vLLM's form, are answered here as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gecko.data import Tokenizer
from gecko.data.chat import ChatFormat, encode_text
from gecko.data.tokenizers import TokenIds
from gecko.data.turns import linked
from gecko.inference.calls import CallReader
from gecko.inference.grammar import Constraint, ConstraintError, Grammar, GrammarCompiler
from gecko.inference.request import KeptStates, Request
from gecko.inference.text import ChoiceText, Piece, TokenNames
from gecko.serving.chat_requests import (
    ChatRequest,
    ConversationRequest,
    DetokenizeRequest,
    ResponseRequest,
    TokenizeRequest,
)
from gecko.serving.fields import Ids, parse_body
from gecko.serving.limits import ApiError, invalid
from gecko.serving.options import Limits
from gecko.serving.protocol import MAX_CHOICES, CompletionRequest, GenerationRequest, SaveState
from gecko.serving.replies import ChatReply, CompletionReply, Reply, ResponseReply, StateReply, Usage, encode_json
from gecko.serving.stores import ResponseStore, SavedStates, StoredResponse
from gecko.state import GeckoState

MAX_ECHO = 1 << 20
"""Maximum number of prompt characters that an answer repeats, over all choices."""
MAX_ECHO_IDS = 1 << 16
"""Maximum number of prompt ids that an answer repeats as text: tokenizers hold the GIL while they decode."""
_PART = 1 << 16
"""Number of ids converted at once: the conversion of a longer list holds the GIL for too long."""
_LOGPROB_BYTES = 512
"""Memory of one log-probability, from the token to the encoded answer."""
_ECHO_BYTES = 16
"""Memory of one echoed character, in the text of the prompt and in the encoded answer."""
_CONSTRAINT_BYTES = 1 << 21
"""Memory of a constraint; most take less, and the limits of ``gecko.inference.grammar`` allow more."""
R = TypeVar("R", bound=GenerationRequest | SaveState | TokenizeRequest | DetokenizeRequest)


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
            message = f"the model must be {self.name!r}; got {asked[:100]!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise ApiError 400 if an id is outside of the vocabulary."""
        if len(ids) and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(index for index in ids if not 0 <= index < self.vocab_size)
            raise invalid(field, f"{field}: token ids must be in 0..{self.vocab_size - 1}; got {str(wrong)[:40]}")


@dataclass(frozen=True)
class Prepared:
    """Requests to the engine, one per choice, and the form of their answer."""

    requests: Sequence[Request]
    choices: Sequence[ChoiceText]
    usage: Usage
    num_bytes: int
    """Memory until the answer is sent."""
    reply: Reply
    stream: bool = False


class Preparation:
    """Preparation of requests for one model; thread-safe."""

    def __init__(self, model: ServedModel, limits: Limits, states: SavedStates, responses: ResponseStore) -> None:
        self._model, self._limits, self._states, self._responses = model, limits, states, responses
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size)
        self._names = TokenNames(model.tokenizer)

    def parse(self, kind: type[R], take: Callable[[], bytearray]) -> R:
        """Parse the body that ``take`` returns, and check what needs no tokenizer. Raise ApiError 400 for an invalid
        body, 404 for another model; for a state as ``SavedStates.check_new``."""
        asked = parse_body(kind, take())
        if isinstance(asked, SaveState):
            self._states.check_new(asked.name)
        else:
            self._model.check_name(asked.model)
        if isinstance(asked, GenerationRequest):
            self._model.check_ids(asked.stop_token_ids, "stop_token_ids")
            self._check_lengths(asked)
        if isinstance(asked, CompletionRequest) and asked.echo:
            for form, most in ((str, MAX_ECHO), (list, MAX_ECHO_IDS)):
                _check_echo(asked, sum(len(prompt) for prompt in asked.prompt if isinstance(prompt, form)), most)
        return asked

    def prepare(self, asked: GenerationRequest | SaveState) -> Prepared:
        """Load states, tokenize prompts and build the requests to the engine. Raise ApiError or ValueError if the
        request is out of the model's or the server's range, or names a state or a response that is not there."""
        if isinstance(asked, SaveState):
            return self._prepare_saving(asked)
        previous = self._previous(asked) if isinstance(asked, ResponseRequest) else None
        state, prompts = self._prompts(asked, previous)
        echoes = self._echoes(asked, prompts)
        try:
            sampling = asked.sampling()
        except ValueError as error:
            raise invalid(str(error).split()[0], str(error)) from error  # the message starts with the field's name
        constraint, stop_tokens = self._constraint(asked), self._stop_tokens(asked)
        _, tokens = asked.length(self._limits.new_tokens)
        special = np.array(sorted(self._model.tokenizer.special_ids), dtype=np.int64)
        requests: list[Request] = []
        choices: list[ChoiceText] = []
        for prompt, echo in zip(prompts, echoes, strict=True):
            seed = random.getrandbits(53) if asked.seed is None else asked.seed  # of every prompt, as in vLLM
            follows = (state is not None and state.position[0] > 0) or not np.isin(prompt.numpy(), special).all()
            for place in range(asked.n):
                request = Request(
                    prompt, tokens, sampling, seed + place, stop_tokens, asked.num_top_logprobs, state,
                    min_new_tokens=asked.min_tokens, constraint=constraint,
                    prompt_logprobs=asked.logprobs if isinstance(asked, CompletionRequest) and asked.echo else None,
                    keep=KeptStates() if isinstance(asked, ResponseRequest) and asked.store else None,
                )  # fmt: skip
                requests.append(request)
                choices.append(self._choice(len(choices), asked, request, bool(follows), echo))
        size = sum(prompt.nbytes for prompt in prompts) + _ECHO_BYTES * asked.n * sum(map(len, echoes))
        for request in requests:
            if request.logprobs is not None:
                scored = request.max_new_tokens + (0 if request.prompt_logprobs is None else len(request.prompt))
                size += _LOGPROB_BYTES * scored * (request.logprobs + 1)
        size += _CONSTRAINT_BYTES if asked.constrained else 0
        usage = Usage(sum(map(len, prompts)), 0, self._model.state_bytes)
        reply = self._reply(asked, previous, requests[0], choices[0])
        return Prepared(requests, choices, usage, size, reply, asked.stream)

    def _prepare_saving(self, asked: SaveState) -> Prepared:
        """Build the request by which the engine reads the end of a stored answer and of its turn."""
        stored = self._responses.find(asked.response_id)
        unread = [*stored.unread, *self._model.chat.continuation([]).closing]
        keep = KeptStates()
        requests = [Request(torch.tensor(unread, device="cpu"), 0, state=stored.state, keep=keep)] if unread else []
        choices = [ChoiceText(0, request, self._model.tokenizer) for request in requests]
        usage = Usage(len(unread), 0, self._model.state_bytes)
        reply = StateReply(lambda: self._states.save(asked.name, keep.prompt or stored.state))
        return Prepared(requests, choices, usage, 8 * len(unread), reply)

    def _check_lengths(self, asked: GenerationRequest) -> None:
        most = self._limits.new_tokens
        field, tokens = asked.length(most)
        if tokens > most:
            raise invalid(field, f"{field} must be at most {most}; got {tokens}")
        if asked.min_tokens > tokens:
            raise invalid("min_tokens", f"min_tokens must be at most {field}, {tokens}; got {asked.min_tokens}")
        if asked.num_choices > MAX_CHOICES:
            raise invalid("n", f"prompts × n must be at most {MAX_CHOICES}; got {asked.num_choices}")
        if tokens == 0 and not (isinstance(asked, CompletionRequest) and asked.echo):
            raise invalid(field, f"{field} must be at least 1 without echo; got 0")

    def _previous(self, asked: ResponseRequest) -> StoredResponse | None:
        """Return the response that a request continues, which must have been told of its functions."""
        if (name := asked.previous_response_id) is None:
            return None
        if (previous := self._responses.get(name)) is None:
            reason = "was never stored, was deleted, or made room for later ones: send the whole conversation as input."
            message = f"Previous response with id '{name[:100]}' not found. It {reason}"
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        for function in asked.functions:
            if encode_json(function.tool) not in previous.functions:
                rule = "must be those that the first request of the conversation had, as they are read once"
                advice = "Send the whole conversation as input"
                raise invalid("tools", f"tools {rule}; got {function.name!r}. {advice}")
        return previous

    def _prompts(
        self, asked: GenerationRequest, previous: StoredResponse | None
    ) -> tuple[GeckoState | None, list[Tensor]]:
        """Return the state that a request continues, and the ids of its prompts."""
        state = None if asked.state is None else self._states.load(asked.state)
        # A state is inside a document, so no document starts after it.
        start = [] if state is not None else [self._model.tokenizer.document_start]
        if isinstance(asked, CompletionRequest):
            return state, [self._tensor(prompt, start) for prompt in asked.prompt]
        assert isinstance(asked, ConversationRequest)
        chat = self._model.chat
        # The answer is the object of a call if it must be one.
        opening = chat.encode_answer(chat.call_form.opening) if asked.enforced else []
        if previous is not None:
            closing, turns = chat.continuation(asked.turns(previous.calls))
            return previous.state, [self._tensor([*previous.unread, *closing, *turns, *opening])]
        # After a state, a result may be of a call that the state has read.
        ids = chat.encode(asked.turns({} if state is None else None), asked.functions) + opening
        begins = ids[:1] == [self._model.tokenizer.document_start]
        return state, [self._tensor(ids[1:] if state is not None and begins else ids)]

    def _tensor(self, prompt: str | Ids, start: Ids | None = None) -> Tensor:
        """Return the ids of a prompt; a text comes after ``start``."""
        text = encode_text(self._model.tokenizer, prompt) if isinstance(prompt, str) else None
        length, most = len(prompt) if text is None else len(start or []) + len(text), self._limits.prompt_tokens
        if not 0 < length <= most:
            message = f"a prompt must have 1 to {most:,} tokens; got {length:,}"
            code = "context_length_exceeded" if length else "invalid_value"
            raise ApiError(400, message, code=code, param="prompt")
        if text is not None:
            ids = np.concatenate([np.array(start or [], dtype=np.int64), text])
            self._model.check_ids([int(ids.max())], "prompt")
            return torch.from_numpy(ids)
        parts: list[Any] = [prompt[begin : begin + _PART] for begin in range(0, length, _PART)]
        for part in parts:
            self._model.check_ids(part, "prompt")
        return torch.cat([torch.tensor(part, device="cpu") for part in parts])

    def _echoes(self, asked: GenerationRequest, ids: Sequence[Tensor]) -> Sequence[str]:
        """Return the text that the answer repeats of each prompt; empty without ``echo``."""
        if not isinstance(asked, CompletionRequest) or not asked.echo:
            return [""] * len(ids)
        if asked.logprobs is not None:
            _check_echo(asked, sum(map(len, ids)), MAX_ECHO_IDS)
        texts = [x if isinstance(x, str) else self._model.tokenizer.decode(x) for x in asked.prompt]
        _check_echo(asked, sum(map(len, texts)), MAX_ECHO)
        return texts

    def _constraint(self, asked: GenerationRequest) -> Constraint | None:
        schemas = {function.name: function.schema for function in asked.enforced}
        if schemas:
            name, grammar = "tools", Grammar.call(self._model.chat.call_form.arguments, schemas)
        elif (found := asked.grammar()) is not None:
            name, grammar = found
        else:
            return None
        try:
            return self._grammars.compile(grammar)
        except (ConstraintError, ImportError) as error:
            raise ApiError(400, f"{name}: {error}", code="invalid_constraint", param=name) from error

    def _stop_tokens(self, asked: GenerationRequest) -> frozenset[int]:
        if asked.ignore_eos:
            return frozenset(asked.stop_token_ids)
        completes, chat = isinstance(asked, CompletionRequest), self._model.chat
        ends = frozenset({self._model.tokenizer.document_end}) if completes else chat.stop_ids
        inside = chat.call_marks.values() if asked.functions else ()
        return ends.difference(inside).union(asked.stop_token_ids)

    def _choice(self, index: int, asked: GenerationRequest, request: Request, follows: bool, echo: str) -> ChoiceText:
        """Return the text of one choice; ``follows``: whether text, not only special tokens, stands before it."""
        completes, constrained = isinstance(asked, CompletionRequest), request.constraint is not None
        stops = [*asked.stop, *(() if completes or constrained else self._model.chat.stops)]
        reader = None
        if isinstance(asked, ConversationRequest) and asked.functions:
            opening = self._model.chat.call_form.opening.partition("{")[0].strip(" \r\n[")
            reader = CallReader(
                [function.name for function in asked.functions], [opening] if opening else [],
                {mark: text for text, mark in self._model.chat.call_marks.items()},
                opened=bool(asked.enforced), several=asked.parallel_tool_calls,
            )  # fmt: skip
        # A constraint covers all characters, also a space of SentencePiece before the first word.
        goes_on = constrained or (completes and follows)
        return ChoiceText(index, request, self._model.tokenizer, stops, goes_on=goes_on, echo=echo, reader=reader)

    def _reply(
        self, asked: GenerationRequest, previous: StoredResponse | None, request: Request, choice: ChoiceText
    ) -> Reply:
        name = self._model.name
        if isinstance(asked, ResponseRequest):
            told = frozenset(encode_json(function.tool) for function in asked.functions)
            store = partial(self._store, request.keep, choice, told if previous is None else previous.functions)
            return ResponseReply(name, asked, request.start_position, store)
        if isinstance(asked, ChatRequest):
            return ChatReply(name, self._names, asked.include_usage, scored=asked.num_top_logprobs is not None)
        assert isinstance(asked, CompletionRequest)
        return CompletionReply(name, self._names, asked.include_usage)

    def _store(
        self, keep: KeptStates | None, choice: ChoiceText, told: frozenset[str], body: dict[str, Any], piece: Piece
    ) -> None:
        """Store a finished response, unless its request forbids it; ``piece`` has all of its text, and ``told`` are the
        functions that the conversation has been told, as JSON.

        The state at the end is of use only if it has read the text and nothing else. After a stop string, or at the
        time limit, the engine is ahead of the text. The answer is then read again from the state after the prompt.
        """
        if keep is None or keep.prompt is None:
            return
        end = keep.end
        if end is not None and end.position == piece.position and not choice.stopped:
            state, unread = end.state, [] if end.pending_token is None else [end.pending_token]
        else:
            # Without functions, the names of their special tokens are text.
            special = self._model.chat.encode_answer if choice.marks else partial(encode_text, self._model.tokenizer)
            state, unread = keep.prompt, list(map(int, special(choice.written)))
        if choice.unclosed:
            unread += self._model.chat.encode_answer(self._model.chat.call_form.closing)
        calls = {part.id: part.name for part in piece.calls if part.id}
        self._responses.put(body["id"], StoredResponse(encode_json(body).encode(), state, unread, told, calls))

    def tokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer a request to ``/tokenize``, whose body ``take`` returns, with the ids that a generation would read.
        Raise ApiError or ValueError if the request is invalid, or the prompt is too long."""
        asked, most = self.parse(TokenizeRequest, take), self._limits.prompt_tokens
        if asked.messages:
            turns = linked([message.turn for message in asked.messages], "messages")
            ids = np.array(self._model.chat.encode(turns, asked.tools), dtype=np.int64)
        else:
            start = [] if asked.add_special_tokens is False else [self._model.tokenizer.document_start]
            text = encode_text(self._model.tokenizer, asked.prompt or "")
            ids = np.concatenate([np.array(start, dtype=np.int64), text])
        if len(ids) > most:
            message = f"a prompt must have at most {most:,} tokens; got {len(ids):,}"
            raise ApiError(400, message, code="context_length_exceeded", param="prompt")
        strings = _encode_list(ids, self._names.name) if asked.return_token_strs else b"null"
        head = f'{{"count":{len(ids)},"max_model_len":{most},"tokens":'.encode()
        return b"".join((head, _encode_list(ids, int), b',"token_strs":', strings, b"}"))

    def detokenize(self, take: Callable[[], bytearray]) -> bytes:
        """Answer a request to ``/detokenize``, whose body ``take`` returns, with the text of its ids, without special
        ids. Raise ApiError if the request is invalid, or has too many ids."""
        asked = self.parse(DetokenizeRequest, take)
        if len(asked.tokens) > MAX_ECHO_IDS:
            raise invalid("tokens", f"there must be at most {MAX_ECHO_IDS:,} ids; got {len(asked.tokens):,}")
        self._model.check_ids(asked.tokens, "tokens")
        return encode_json({"prompt": self._model.tokenizer.decode(asked.tokens)}).encode()


def _check_echo(asked: CompletionRequest, length: int, most: int) -> None:
    if asked.n * length > most:
        limits = f"{MAX_ECHO:,} characters, or {MAX_ECHO_IDS:,} ids, in all choices together"
        advice = "Leave out echo, or request fewer choices"
        raise invalid("echo", f"echo must repeat at most {limits}; got {asked.n * length:,}. {advice}")


def _encode_list(ids: TokenIds, form: Callable[[int], Any]) -> bytes:
    """Encode ``form`` of every id as a list of JSON."""
    parts: Sequence[Any] = [ids[begin : begin + _PART].tolist() for begin in range(0, len(ids), _PART)]
    return b"[" + b",".join(encode_json(list(map(form, part)))[1:-1].encode() for part in parts) + b"]"
