"""Chats for supervised fine-tuning: JSON Lines files, their tokens and answers, and rows of whole chats."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gecko.data.chat import TemplateChat
from gecko.data.loader import IGNORED, Row, make_row
from gecko.data.packing import ROW_LAYOUT, SPLIT_STREAM, Shuffle, held_out_part, permutation
from gecko.data.readers import check_regular, format_of, read_records
from gecko.data.sources import empty_source, find_files
from gecko.data.turns import Function, ToolCall, Turn, linked, read_functions
from gecko.records import FieldError, convert

ROLES = ("system", "user", "assistant", "tool")
_UNREAD = ("functions", "tool_choice", "function_call", "system", "documents", "chat_template_kwargs")
"""Fields beside ``messages`` that would change how a conversation reads; others describe the chat."""
_FIELDS = {"assistant": ("weight", "tool_calls"), "tool": ("tool_call_id", "name")}
"""Fields of messages beside role and content, by role."""
_EXPECTED = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


class RecordedChat(NamedTuple):
    """A chat of a file, and the functions that its answers may call."""

    turns: list[Turn]
    functions: Sequence[Function] = ()


def read_chats(source: str) -> Iterator[tuple[str, RecordedChat]]:
    """Yield the chats of JSON Lines files, each after its place in the file for errors.

    ``source`` is a file, a folder or a glob; ``.gz`` and ``.zst`` too. Raise FileNotFoundError if it names no file,
    ValueError if a file is not JSON Lines, or a line is not a chat with an answer; the message names the line.
    """
    for path in find_files(source):
        if format_of(path) != "json lines":
            raise ValueError(f"chats must be JSON Lines (.jsonl), one object a line as {_EXPECTED}; got {path}.")
        check_regular(path)
        for where, record in read_records(path):
            yield where, _chat(record, where)


def _chat(record: dict[str, Any], where: str) -> RecordedChat:
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise _no_chat(where, f"the fields {sorted(record)}" if messages is None else "messages that are no list")
    _check_fields(record, [name for name in record if name in _UNREAD], where)
    turns = [_turn(message, f"{where} message {number},") for number, message in enumerate(messages, start=1)]
    if not any(turn.role == "assistant" and turn.learned and (turn.content.strip() or turn.calls) for turn in turns):
        raise _no_chat(where, "a chat without an answer of the assistant, from which nothing can be learned")
    try:
        return RecordedChat(linked(turns, "messages"), read_functions(record.get("tools") or [], "tools"))
    except FieldError as error:
        raise ValueError(f"{where} {error}") from error


def _turn(message: object, where: str) -> Turn:
    if not isinstance(message, dict):
        raise _no_chat(where, "no object with role and content")
    role = message.get("role")
    _check_fields(message, message.keys() - {"role", "content", *_FIELDS.get(str(role), ("weight",))}, where)
    try:
        calls = tuple(one.call for one in convert(message.get("tool_calls") or [], list[ToolCall], "tool_calls"))
        call_id, name = (convert(message.get(field) or "", str, field) for field in ("tool_call_id", "name"))
    except FieldError as error:
        raise ValueError(f"{where} {error}") from error
    if "role" not in message or ("content" not in message and not calls):
        raise _no_chat(where, "no object with role and content")
    content, weight = message.get("content"), message.get("weight")
    if calls:
        content = content or ""
    if role not in ROLES:
        raise _no_chat(where, f"the role {role!r}, which is none of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise _no_chat(where, f"content of the type {type(content).__name__} instead of text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _no_chat(where, "half a surrogate pair, which UTF-8 cannot write") from error
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1) or role != "assistant"):
        raise _no_chat(where, f"the weight {weight!r} of {role!r}; answers alone have one, 0 (not learned) or 1")
    return Turn(role, content, weight != 0, calls, call_id, name)


def _check_fields(fields: Mapping[str, Any], unknown: Iterable[str], where: str) -> None:
    """Raise ValueError if an ``unknown`` field has a value: what is not read cannot be learned."""
    if given := sorted(name for name in unknown if fields[name] not in (None, "", [], {})):
        raise _no_chat(where, f"{', '.join(map(repr, given))}, which chats for fine-tuning do not have")


def _no_chat(where: str, found: str) -> ValueError:
    return ValueError(f"{where} must be a chat as {_EXPECTED}; got {found}.")


@dataclass(frozen=True)
class ChatCorpus:
    """Chats as token ids, in their order."""

    tokens: list[NDArray[np.int64]]  # (length,) ids of each chat, up to the end of its last answer
    trained: list[NDArray[np.bool_]]
    """(length,) of each chat, True at the tokens that a model learns: answers and what ends them."""

    @classmethod
    def build(cls, chats: Iterable[tuple[str, RecordedChat]], chat_format: TemplateChat) -> ChatCorpus:
        """Tokenize chats, each given after its place for errors. Raise ValueError if a chat does not fit the template;
        the message names its place."""
        found = cls([], [])
        for where, chat in chats:
            try:
                pieces = list(chat_format.trained_pieces(*chat))
            except ValueError as error:
                raise ValueError(f"{where} cannot be read: {error}") from error
            found.tokens.append(np.concatenate([np.array(ids, np.int64) for ids, _ in pieces]))
            found.trained.append(np.concatenate([np.full(len(ids), learned) for ids, learned in pieces]))
        return found

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def trained_tokens(self) -> int:
        return sum(int(trained.sum()) for trained in self.trained)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest chat."""
        return max(map(len, self.tokens), default=0)

    def select(self, chats: Iterable[int]) -> ChatCorpus:
        kept = list(chats)
        return ChatCorpus([self.tokens[chat] for chat in kept], [self.trained[chat] for chat in kept])

    def split(self, validation_fraction: float, seed: int, layout: int = ROW_LAYOUT) -> tuple[ChatCorpus, ChatCorpus]:
        """Return training and held-out chats; see ``TokenizedCorpus.split``. Tokens of answers are counted.

        A chat that is divided ends, in training, where the held-out end of its last answers begins.
        """
        if not len(self):
            return self, self
        order = permutation(len(self), seed, SPLIT_STREAM)
        learned = np.array([int(trained.sum()) for trained in self.trained])
        count, tail = held_out_part(learned[order], validation_fraction, layout, 1)
        training, held_out = self.select(np.sort(order[count:])), self.select(order[: count + (tail > 0)])
        if tail:
            place = int(np.searchsorted(np.sort(order[count:]), order[count]))
            begin = int(np.flatnonzero(training.trained[place])[-tail])
            training.tokens[place] = training.tokens[place][:begin]
            training.trained[place] = training.trained[place][:begin]
            held_out.trained[-1] = np.concatenate([np.zeros(begin, bool), held_out.trained[-1][begin:]])
        return training, held_out

    def cut(self, length: int) -> ChatCorpus:
        """Return the first ``length`` tokens of each chat, without chats that have no part of an answer in them."""
        part = self.select(chat for chat in range(len(self)) if self.trained[chat][1:length].any())
        return ChatCorpus([tokens[:length] for tokens in part.tokens], [trained[:length] for trained in part.trained])

    def digest(self) -> str:
        """Return a SHA-256 of all ids, learned tokens and lengths."""
        found = hashlib.sha256()
        for tokens, trained in zip(self.tokens, self.trained, strict=True):
            found.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + trained.tobytes())
        return found.hexdigest()


class ChatRows:
    """Training rows of whole chats. Every epoch has the same rows, in another random order.

    A chat is never divided between rows, and chats in one row are separate documents: a model resets its state between
    them. Each row takes the longest chat that is left, and then the longest ones that still fit. Raise ValueError if
    there is no chat, or a chat does not fit in a row.
    """

    def __init__(self, corpus: ChatCorpus, sequence_length: int, seed: int) -> None:
        if not len(corpus):
            raise ValueError(
                f"at least one chat must have an answer within its first {sequence_length + 1} tokens; none has. "
                "Set a larger sequence_length."
            )
        if corpus.longest > sequence_length + 1:
            raise ValueError(f"a row takes chats of {sequence_length + 1} tokens; got one of {corpus.longest}.")
        self.sequence_length, self._corpus, self._seed = sequence_length, corpus, seed
        self._packed = pack([len(tokens) for tokens in corpus.tokens], sequence_length + 1)
        self.rows_per_epoch = len(self._packed)

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, self.rows_per_epoch)
        chats = self._packed[Shuffle(self.rows_per_epoch, self._seed, SPLIT_STREAM + 1 + epoch)[place]]
        tokens = np.concatenate([self._corpus.tokens[chat] for chat in chats])
        trained = np.concatenate([self._corpus.trained[chat] for chat in chats])
        segments = np.repeat(np.arange(len(chats)), [len(self._corpus.tokens[chat]) for chat in chats])
        ids, targets, segment_ids = make_row(tokens, segments, self.sequence_length)
        learned = np.pad(trained, (0, self.sequence_length + 1 - len(trained)))[1:]
        return ids, np.where(learned, targets, IGNORED), segment_ids


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Divide items into groups of at most ``room`` in total: best fit, the largest items first. Raise ValueError if an
    item is larger than ``room``."""
    groups, left = list[list[int]](), list[tuple[int, int]]()  # room left and group, sorted
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        if sizes[item] > room:
            raise ValueError(f"an item must be at most {room}; got {sizes[item]}.")
        place = bisect_left(left, (sizes[item], 0))
        if place == len(left):
            left.append((room, len(groups)))
            groups.append([])
        free, group = left.pop(place)
        groups[group].append(item)
        insort(left, (free - sizes[item], group))
    return groups


def load_chats(source: str, chat_format: TemplateChat) -> ChatCorpus:
    """Read and tokenize all chats of a source; errors as for ``read_chats`` and ``ChatCorpus.build``."""
    corpus = ChatCorpus.build(read_chats(source), chat_format)
    if not len(corpus):
        raise empty_source(source)
    return corpus
