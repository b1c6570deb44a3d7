"""The interface of models to evaluations, ``ScoredModel``, its forms for Gecko and Llama, and the texts they read.

``GeckoModel(renew_norms=True)`` reproduces Megalodon's released evaluator, which computes norm statistics over the last
chunks only. The release scores a text 2 chunks per call. After 8 chunks, and if more text follows, it reads the last 6
chunks again from an empty state after each call, and replaces the statistics of all norms by those of this second
reading. CEMA and attention keep their states. The cumulative norm thus never averages over more than 8 chunks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.data import ByteTokenizer, Tokenizer, check_vocabulary
from gecko.data.readers import check_plain_text, decode_text, read_pieces
from gecko.data.text_stream import token_bytes
from gecko.inference import Prefill, Sampling, TextStream, TokenStream, encode_stream, read, score
from gecko.inference.generate import LlamaPrefill, LlamaStream, prefill_llama, score_llama
from gecko.inference.pieces import pieces
from gecko.inference.prefill import inference
from gecko.io.files import found_at
from gecko.io.fingerprints import fingerprint
from gecko.models import LanguageModel, Llama
from gecko.models.gecko import Gecko
from gecko.ops.loss import IGNORED

CHUNKS_A_CALL, FIRST_RENEWAL = 2, 8
KEPT = FIRST_RENEWAL - CHUNKS_A_CALL
NO_TOKENS = torch.empty(0, dtype=torch.int64, device="cpu")

C = TypeVar("C")


def renewed_losses(model: Gecko, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the losses in nats of all tokens of a text except the first, with renewed norms, on the CPU."""
    chunk, device = model.config.chunk_size, model.embedding.weight.device
    state, recent, read = None, NO_TOKENS, 0
    for part, after in pairwise(chain(pieces(model.config, tokens, piece=CHUNKS_A_CALL * chunk), [NO_TOKENS])):
        targets, follows = torch.cat([part[1:], after[:1]]), len(after) > 0
        padded = F.pad(targets, (0, len(part) - len(targets)), value=IGNORED)
        with inference(model):
            losses, state = model.token_losses(part[None].to(device), padded[None].to(device), state=state)
            recent, read = torch.cat([recent, part])[-KEPT * chunk :], read + len(part)
            if read >= FIRST_RENEWAL * chunk and follows:
                _, renewed = model.hidden(recent[None].to(device))
                both = zip(state.mixers, renewed.mixers, strict=True)
                mixers = tuple(dataclasses.replace(mixer, norm=other.norm) for mixer, other in both)
                state = dataclasses.replace(state, mixers=mixers, final_norm=renewed.final_norm)
        yield losses[0, : len(targets)].cpu()


class Predicted(NamedTuple):
    """Losses of given tokens."""

    losses: Tensor
    """(n,) nats per token."""
    greedy: Tensor
    """(n,) bool: the token is the most likely one."""


class ScoredModel(Protocol[C]):
    """A model with its tokenizer. ``C`` is the context after a text was read; no method changes it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chunk_size(self) -> int | None:
        """Chunk size of attention; None if attention has no chunk borders."""

    def describe(self) -> dict[str, Any]:
        """Return a description of the model for results, as JSON values."""

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the losses in nats of all tokens of a text except the first, in pieces, in constant memory.

        Args:
            tokens: text with its document-start token, as 1-D int64 tensors of any lengths.
        """

    def read(self, tokens: Tensor, after: C | None = None) -> C:
        """Read at least one 1-D token and return the new context. A text starts with the document-start token."""

    def predict(self, after: C, tokens: Tensor) -> Predicted:
        """Return the losses of at least one 1-D token after a context, in float32 at least."""

    def write(self, after: C, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        """Return the greedy continuation, which ends before a stop string or at the document end."""


class GeckoModel:
    """``ScoredModel`` of a Gecko or Megalodon, called ``name`` in results.

    Args:
        renew_norms: compute ``losses`` as Megalodon's released evaluator does; see the module's docstring.

    Raises:
        ValueError: the tokenizer has more ids than the model, or ``renew_norms`` is set for a norm with decay.
    """

    notes: Sequence[str] = ()
    """None: texts of any length are read."""

    def __init__(self, model: Gecko, tokenizer: Tokenizer, name: str, *, renew_norms: bool = False) -> None:
        check_vocabulary(tokenizer, model.config.vocab_size)
        if renew_norms and model.config.timestep_betas is not None:
            raise ValueError(
                "renewed norm statistics are for models with the cumulative norm (timestep_betas=None), as Megalodon "
                f"is; {name} has decays {model.config.timestep_betas}, which forget by themselves. Leave it out."
            )
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._renew_norms = renew_norms

    @property
    def chunk_size(self) -> int | None:
        return None if self.model.config.attention == "sliding_window" else self.model.config.chunk_size

    def describe(self) -> dict[str, Any]:
        return describe_model(self.model, self.tokenizer, self.name)

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        if self._renew_norms:
            return renewed_losses(self.model, tokens)
        return (scored.losses.cpu() for scored in score(self.model, tokens))

    def read(self, tokens: Tensor, after: Prefill | None = None) -> Prefill:
        return read(self.model, [tokens], None if after is None else after.state)

    def predict(self, after: Prefill, tokens: Tensor) -> Predicted:
        return _predicted(self.model, after, tokens, lambda later: self.model(later, state=after.state)[0][0])

    def stream(self, after: Prefill, max_new_tokens: int, stop_tokens: Collection[int] = ()) -> TokenStream:
        """Return the stream of the greedy continuation, which ends before a stop token."""
        return TokenStream(
            self.model, [after], seeds=[0], sampling=Sampling(temperature=0), max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
        )  # fmt: skip

    def write(self, after: Prefill, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        stream = self.stream(after, max_new_tokens, {self.tokenizer.document_end})
        return "".join(TextStream(stream, self.tokenizer, stops))


def _predicted(
    model: LanguageModel, after: Prefill | LlamaPrefill, tokens: Tensor, read: Callable[[Tensor], Tensor]
) -> Predicted:
    """Score (n,) tokens after a context; ``read`` returns logits (n − 1, V) of (1, n − 1)."""
    tokens = tokens.to(after.logits.device)
    with inference(model):
        logits = after.logits.unsqueeze(0)
        if len(tokens) > 1:
            logits = torch.cat([logits, read(tokens[None, :-1])])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, tokens, reduction="none")
        return Predicted(losses.cpu(), (wide.argmax(-1) == tokens).cpu())


def describe_model(model: LanguageModel, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Return the description of a model for results, as JSON values."""
    parameters = list(model.parameters())
    return {
        "name": name, "weights": fingerprint(model), "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."), "device": str(parameters[0].device),
        "tokenizer": tokenizer.name, "config": model.config.to_dict(),
    }  # fmt: skip


class LlamaModel:
    """``ScoredModel`` of a Llama. It keeps keys and values of all tokens, so memory grows with the text.

    Args:
        trained_length: sequence length in training; None if unknown.

    Raises:
        ValueError: the tokenizer has more ids than the model.
    """

    chunk_size: int | None = None

    def __init__(self, model: Llama, tokenizer: Tokenizer, name: str, trained_length: int | None) -> None:
        check_vocabulary(tokenizer, model.config.vocab_size)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._trained_length, self._longest = trained_length, 0

    @property
    def notes(self) -> list[str]:
        """Notes on the scores of the texts read so far."""
        trained, longest = self._trained_length, self._longest
        if trained is None:
            return [f"the longest text had {longest:,} tokens; the training context of {self.name} is not known"]
        if longest <= trained:
            return []
        return [
            f"{self.name} was trained with a context of {trained:,} tokens, and the longest text had {longest:,}: "
            "it never saw the later positions in training"
        ]

    def describe(self) -> dict[str, Any]:
        return describe_model(self.model, self.tokenizer, self.name) | {"trained_length": self._trained_length}

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        read = 0
        for losses in score_llama(self.model, tokens):
            read += len(losses)  # the last token is a target only
            self._longest = max(self._longest, read)
            yield losses.cpu()

    def read(self, tokens: Tensor, after: LlamaPrefill | None = None) -> LlamaPrefill:
        reading = prefill_llama(self.model, [tokens], after)
        self._longest = max(self._longest, reading.cache.length)
        return reading

    def predict(self, after: LlamaPrefill, tokens: Tensor) -> Predicted:
        self._longest = max(self._longest, after.cache.length + len(tokens) - 1)
        model = self.model
        return _predicted(model, after, tokens, lambda later: model.lm_head(model.read(later, after.cache)[0][0]))

    def stream(self, after: LlamaPrefill, max_new_tokens: int, stop_tokens: Collection[int] = ()) -> LlamaStream:
        """Return the stream of the greedy continuation, which ends before a stop token."""
        return LlamaStream(
            self.model, after, seed=0, temperature=0, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens
        )

    def write(self, after: LlamaPrefill, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        text = TextStream(self.stream(after, max_new_tokens, {self.tokenizer.document_end}), self.tokenizer, stops)
        written = "".join(text)
        self._longest = max(self._longest, after.cache.length + text.num_tokens)
        return written


_CONTEXT_IDS = 8
"""Ids of context with which a piece is decoded: SentencePiece drops the space before a text's first word."""


@dataclass(frozen=True)
class Text:
    """A text: the content of one file, or of several files in order."""

    name: str
    paths: tuple[Path, ...]

    def tokens(self, tokenizer: Tokenizer) -> Iterator[Tensor]:
        """Yield the ids as 1-D int64 tensors, without document tokens; errors as for ``encode_stream``."""
        return encode_stream(tokenizer, self._pieces(), self.name)

    def whole(self) -> str:
        """Return the whole text as a string; errors as for ``decode_text``."""
        return decode_text(b"".join(self._pieces()), self.name)

    def start(self) -> Iterator[str]:
        """Yield the first piece of the text, without what is not UTF-8."""
        return (piece.decode("utf-8", "ignore") for piece in islice(self._pieces(), 1))

    def _pieces(self) -> Iterator[bytes]:
        return (piece for path in self.paths for piece in read_pieces(path))


def open_texts(sources: Sequence[str], *, joined: bool) -> list[Text]:
    """Return one text per file, or with ``joined`` one text of all files; errors as for ``open_files``.

    Raises:
        ValueError: a suffix names a format of records or another format that is not plain text.
    """
    texts = open_files(sources)
    paths = [path for text in texts for path in text.paths]
    for path in paths:
        check_plain_text(path)
    return [Text(" + ".join(path.name for path in paths), tuple(paths))] if joined else texts


def open_files(sources: Sequence[str]) -> list[Text]:
    """Return each file as a text, whatever its suffix says; one that several sources name is one text.

    Raises:
        FileNotFoundError: a source is not a file. Standard input is not supported, since texts are read repeatedly.
    """
    paths = [Path(source).expanduser() for source in sources]
    for path in paths:
        if not path.is_file():
            there = f"{path}: {found_at(path)}" if os.path.lexists(path) else f"there is no file {path}"
            raise FileNotFoundError(f"a text must be a file, since it is read more than once; {there}.")
    first: dict[Path, Path] = {}
    for path in paths:
        first.setdefault(path.resolve(), path)
    return [Text(str(path), (path,)) for path in first.values()]


class Cursor:
    """Reader of a stream of 1-D tensors that takes a given number of elements at a time."""

    def __init__(self, parts: Iterator[Tensor]) -> None:
        self._parts, self._held = parts, NO_TOKENS

    def take(self, count: int) -> Iterator[Tensor]:
        """Yield the next ``count`` elements, or those that are left. Iterate to the end before the next call."""
        while count:
            if not len(self._held):
                held = next(self._parts, None)
                if held is None:
                    return
                self._held = held
            part, self._held = self._held[:count], self._held[count:]
            count -= len(part)
            yield part


class TextSize(NamedTuple):
    """Size of a text. Words are separated by white space, as PG-19 counts them."""

    tokens: int
    bytes: int
    words: int


def measure(tokenizer: Tokenizer, parts: Iterator[Tensor]) -> TextSize:
    """Return the size of a text that is given in pieces."""
    tokens = size = words = 0
    inside, context, sizes = False, NO_TOKENS, token_bytes(tokenizer)
    for part in parts:
        size += sizes.of_text(part.numpy(), begins=not tokens)
        tokens += len(part)
        if isinstance(tokenizer, ByteTokenizer):
            content = bytes(part.tolist())
        else:
            before = tokenizer.decode(context.tolist())
            content = tokenizer.decode([*context.tolist(), *part.tolist()])[len(before) :].encode()
        context = torch.cat([context, part])[-_CONTEXT_IDS:]
        if content:
            words += len(content.split()) - (inside and not content[:1].isspace())
            inside = not content[-1:].isspace()
    return TextSize(tokens, size, words)
