"""``generate`` and ``stream``: check prompts and seeds, prefill the prompts and decode them side by side. A Llama reads
and decodes one sequence, with a key-value cache that grows with every token."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, SupportsIndex, cast

import numpy as np
import torch
from torch import Tensor

from gecko.data.text_stream import document_ids
from gecko.data.tokenizers import Tokenizer, known_tokenizer, load_tokenizer
from gecko.inference.batch import DecodingBatch
from gecko.inference.pieces import checked, cut
from gecko.inference.prefill import Prefill, inference, read, shifted
from gecko.inference.request import Finished, KeptStates, Request, Token, check_new_tokens
from gecko.inference.sampling import Sampler, Sampling, check_seed, not_finite, random_numbers
from gecko.layers.head import head_token_losses
from gecko.models.gecko import Gecko
from gecko.models.llama import KeyValues, Llama
from gecko.state import GeckoState

LLAMA_PIECE = 2048
Prompt = Tensor | Sequence[int] | str
"""Token ids of one sequence (1-D tensor, array or list), or a text."""


def as_rows(tokenizer: Tokenizer | None, prompts: Prompt | Sequence[Prompt], state: GeckoState | None) -> list[Tensor]:
    """Convert prompts to one 1-D integer tensor each; each row of a 2-D tensor is a prompt. Without a tokenizer they
    are ids. Texts begin with the document start, unless they continue ``state``. Raise TypeError or ValueError if the
    prompts are neither texts nor integers, or have more than two dimensions."""
    if tokenizer is not None:
        texts = [prompts] if isinstance(prompts, str) else [str(prompt) for prompt in prompts]
        return [document_ids(tokenizer, text, state=state) for text in texts]
    if isinstance(prompts, list | tuple) and prompts:
        first = prompts[0]
        if first.dim() if isinstance(first, Tensor) else hasattr(first, "__len__"):
            return [_as_ids(prompt) for prompt in prompts]
    ids = _as_ids(prompts)
    return list(ids.unbind()) if ids.dim() == 2 and len(ids) else [ids]


def _as_ids(prompt: object) -> Tensor:
    if isinstance(prompt, str):
        raise TypeError("prompts must be all texts or all token ids; got both.")
    if isinstance(prompt, list | tuple) and not prompt:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    try:
        ids = prompt if isinstance(prompt, Tensor) else torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a prompt must be a 1-D tensor, array or list of token ids; {error}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"a prompt must be integers; got {ids.dtype}. Use .long() if they are token ids.")
    if ids.dim() not in (1, 2):
        raise ValueError(f"a prompt must be 1-D, or 2-D with one text a row; got shape {tuple(ids.shape)}.")
    return ids


def as_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Return one seed per row; None draws them from PyTorch. Raise TypeError if a seed is not an integer, also of NumPy
    or PyTorch, ValueError if one does not fit in 64 bits, or their number differs."""
    if seed is None:
        return torch.randint(2**53, (rows,), device="cpu").tolist()
    if isinstance(seed, Tensor | np.ndarray) and seed.ndim == 0:
        seed = seed.item()  # a 0-D tensor is an Iterable to Python
    seeds: list[SupportsIndex] = list(seed) if isinstance(seed, Iterable) else [seed] * rows
    if len(seeds) != rows:
        raise ValueError(f"seed must be one integer, or one per prompt ({rows}); got {len(seeds)}. Try seed=0.")
    numbers = []
    for one in seeds:
        try:
            numbers.append(operator.index(one))
        except TypeError as error:
            advice = "Try int(...), or None for a random one."
            raise TypeError(f"a seed must be an integer; got {one!r}. {advice}") from error
        check_seed(numbers[-1])
    return numbers


def own_tokenizer(model: Gecko, prompts: Prompt | Sequence[Prompt]) -> Tokenizer | None:
    """Return the tokenizer in the folder from which ``gecko.load`` read a model; None if the prompts are no texts.
    Raise ValueError if the model was made in memory, or its folder names no tokenizer."""
    several = isinstance(prompts, list | tuple) and prompts
    if not all(isinstance(prompt, str) for prompt in (prompts if several else [prompts])):
        return None
    name = None if model.folder is None else known_tokenizer(model.folder)
    if name is None:
        raise ValueError(
            "a prompt may be a text only for a model that gecko.load read from a folder with its tokenizer; this model "
            "has none. Try token ids: gecko.data.document_ids(gecko.data.load_tokenizer(...), text)."
        )
    return load_tokenizer(name)


FinishReason = Literal["length", "stop"]
"""``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn, or ``TokenStream.stop`` called."""


class NewToken(NamedTuple):
    """A generated token and the index of its sequence."""

    row: int
    token: int


class TokenStream:
    """Iterator over the tokens that continue prefilled sequences; each step yields its tokens in the order of rows.

    The sequences are decoded in one batch and leave it when they are finished. The tokens of a sequence depend on its
    own prefill and seed only. A stop token is neither yielded nor read. Raise ValueError if a number is out of range,
    and while iterating if logits are not finite.

    Args:
        prefills: one per row.
        seeds: one per row; a row draws one random number per token.
        max_new_tokens: maximum number of tokens per row, at least 0.
    """

    def __init__(
        self, model: Gecko, prefills: Sequence[Prefill], *, seeds: Sequence[int], sampling: Sampling,
        max_new_tokens: int, stop_tokens: Collection[int] = (),
    ) -> None:  # fmt: skip
        check_new_tokens(max_new_tokens, sampling, model.config)
        self._model, self._kept = model, [KeptStates() for _ in prefills]
        self._reasons: dict[int, FinishReason] = {}
        prompt, stops = torch.empty(0, dtype=torch.int64, device="cpu"), frozenset(stop_tokens)
        with inference(model):
            self._batch = DecodingBatch(model, len(prefills))
            for row, (prefill, seed) in enumerate(zip(prefills, seeds, strict=True)):
                request = Request(prompt, max_new_tokens, sampling, seed, stops, keep=self._kept[row])
                self._batch.add(row, request, prefill)
            if max_new_tokens == 0:
                for slot in reversed(range(len(prefills))):
                    self._finish(slot, "length")

    def __iter__(self) -> Iterator[NewToken]:
        while self._batch.sequences:
            with inference(self._model):
                self._batch.decode()
                events = self._batch.draw(strict=True)
            for event in events:
                if isinstance(event, Finished):
                    self._reasons[event.request_id] = cast(FinishReason, event.reason)
            yield from sorted(NewToken(event.request_id, event.token) for event in events if isinstance(event, Token))

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """One per row; None if the row is not finished."""
        return [self._reasons.get(row) for row in range(len(self._kept))]

    @property
    def state(self) -> GeckoState:
        """State of every row after all of its tokens so far; one model call per row reads its last token."""
        with inference(self._model):
            active = {one.key: self._batch.end(slot) for slot, one in enumerate(self._batch.sequences)}
            states = []
            for row, kept in enumerate(self._kept):
                end = active[row] if kept.end is None else kept.end
                if end.pending_token is None:
                    states.append(end.state.to(self._model.embedding.weight.device))
                else:
                    ids = torch.tensor([end.pending_token], device="cpu")
                    states.append(read(self._model, [ids], end.state).state)
            stacked = GeckoState.stack(states)
        # Tensors cloned outside inference mode can take part in autograd.
        return stacked.map(torch.clone)

    def stop(self, row: int) -> None:
        """Finish a row; no effect if it is finished already."""
        with inference(self._model):
            for slot in [slot for slot, one in enumerate(self._batch.sequences) if one.key == row]:
                self._finish(slot, "stop")

    def _finish(self, slot: int, reason: FinishReason) -> None:
        self._reasons[self._batch.sequences[slot].key] = reason
        self._batch.finish(slot)


@dataclass(frozen=True)
class Generation:
    """Result of ``generate``, with one entry per prompt. It is printed as its texts."""

    tokens: list[list[int]]
    """Generated tokens, without the prompt and the stop token."""
    finish_reasons: list[FinishReason]
    """``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn."""
    state: GeckoState
    """State after the prompts and all of ``tokens``, one row per prompt; pass it with the text that follows."""
    texts: list[str] = field(default_factory=list)
    """Texts of ``tokens``; empty if the prompts were token ids."""

    def __str__(self) -> str:
        return "\n".join(self.texts) if self.texts else repr(self)

    def __repr__(self) -> str:
        ends = zip(map(len, self.tokens), self.finish_reasons, strict=True)
        rows = ", ".join(f"{count:,} tokens ended by {reason!r}" for count, reason in ends)
        return f"Generation({rows}; {self.state!r})"


def generate(
    model: Gecko, prompt_tokens: Prompt | Sequence[Prompt], *, max_new_tokens: int = 256, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None, seed: int | Sequence[int] | None = None,
    stop_tokens: Collection[int] = (), state: GeckoState | None = None,
) -> Generation:  # fmt: skip
    """Generate a continuation of one or several prompts; the tokens of a prompt do not depend on the others.

    Prompts are prefilled in pieces and the state of a sequence has constant size, so memory does not depend on the
    length of prompt and continuation.

    Args:
        prompt_tokens: a text, 1-D ids, or a list of texts or of ids; each of at least one token. Texts are for a model
            that ``load`` read, whose tokenizer is in its folder: they begin with the document start, unless they
            continue ``state``, end at the document end, and make the result's ``texts``.
        temperature: 0 is greedy; otherwise logits are divided by it, then cut by top_k, then by top_p, then by min_p.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest most likely tokens that have this probability together.
        min_p: draw from tokens with at least this fraction of the probability of the most likely one.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that the prompt or the
            generated text contains; 0.01 to 100.
        presence_penalty: subtracted from the logits of tokens that were generated before; −2 to 2.
        frequency_penalty: subtracted from the logit of a token once for every time it was generated before; −2 to 2.
        logit_bias: added to the logits of these token ids, before anything else.
        seed: one for all rows, or one per row; the same seed gives the same tokens. None: random, from
            PyTorch's generator.
        stop_tokens: ids that end a sequence, such as ``{tokenizer.document_end}``.
        state: state before the prompts: one row per prompt, or one row that all prompts continue.

    Raises:
        TypeError, ValueError: a prompt is empty or has ids outside the vocabulary, a number is out of range, the state
            belongs to another model or has the wrong number of rows, or logits are not finite.
    """
    tokenizer = own_tokenizer(model, prompt_tokens)
    if tokenizer is not None:
        prompt_tokens, stop_tokens = as_rows(tokenizer, prompt_tokens, state), {*stop_tokens, tokenizer.document_end}
    tokens = stream(
        model, prompt_tokens, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, logit_bias=logit_bias, seed=seed, stop_tokens=stop_tokens, state=state,
    )  # fmt: skip
    ids: list[list[int]] = [[] for _ in tokens.finish_reasons]
    for row, token in tokens:
        ids[row].append(token)
    texts = [] if tokenizer is None else [tokenizer.decode(row) for row in ids]
    return Generation(ids, [reason for reason in tokens.finish_reasons if reason is not None], tokens.state, texts)


def stream(
    model: Gecko, prompt_tokens: Prompt | Sequence[Prompt], *, max_new_tokens: int = 256, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None, seed: int | Sequence[int] | None = None,
    stop_tokens: Collection[int] = (), state: GeckoState | None = None,
) -> TokenStream:  # fmt: skip
    """Return an iterator of ``(row, token)`` that generates tokens on demand.

    This call prefills the prompts. Arguments and errors as for ``generate``.
    """
    sampling = Sampling(
        temperature, top_k, top_p, min_p, repetition_penalty, logit_bias or {}, presence_penalty, frequency_penalty
    )
    tokenizer = own_tokenizer(model, prompt_tokens)
    rows = as_rows(tokenizer, prompt_tokens, state)
    if tokenizer is not None:
        stop_tokens = {*stop_tokens, tokenizer.document_end}
    states: Sequence[GeckoState | None] = [None] * len(rows)
    if state is not None:
        if state.batch_size not in (1, len(rows)):
            raise ValueError(
                f"state must have one row, which all prompts continue, or one row per prompt ({len(rows)}); "
                f"got {state.batch_size}. Try state.rows([...])."
            )
        states = [state.rows([row if state.batch_size > 1 else 0]) for row in range(len(rows))]
    seeds = as_seeds(seed, len(rows))
    check_new_tokens(max_new_tokens, sampling, model.config)
    prefills = [read(model, [row], before) for row, before in zip(rows, states, strict=True)]
    return TokenStream(
        model, prefills, seeds=seeds, sampling=sampling, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens
    )


@dataclass(frozen=True)
class LlamaPrefill:
    """Key-value cache of one sequence and the logits (V,) of its next token."""

    cache: KeyValues
    logits: Tensor


def _read_llama(
    model: Llama, tokens: Iterable[Tensor], cache: KeyValues | None
) -> Iterator[tuple[Tensor, KeyValues, Tensor]]:
    """Yield per piece: the input of the head (n, D), the cache after it, and its tokens."""
    for part in cut(checked(tokens, model.config.vocab_size), LLAMA_PIECE, LLAMA_PIECE):
        part = part.to(model.lm_head.weight.device)
        with inference(model):
            hidden, cache = model.read(part.unsqueeze(0), cache)
        yield hidden[0], cache, part


def prefill_llama(model: Llama, tokens: Iterable[Tensor], after: LlamaPrefill | None = None) -> LlamaPrefill:
    """Read one sequence, given as 1-D integer tensors of any lengths. Raise TypeError or ValueError if the tokens are
    not ids of the model, or there are none."""
    reading = None
    for hidden, cache, _ in _read_llama(model, tokens, None if after is None else after.cache):
        with inference(model):
            reading = LlamaPrefill(cache, model.lm_head(hidden[-1]))
    if reading is None:
        raise ValueError("a prompt must have at least one token; got none. Try the document start.")
    return reading


def score_llama(model: Llama, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the losses in nats of all tokens after the first, piece by piece; the keys and values of all are kept."""
    last = None
    for hidden, _, part in _read_llama(model, tokens, None):
        inputs, targets = shifted(last, hidden, part)
        last = hidden[-1:]
        if len(targets):
            with inference(model):
                losses = head_token_losses(model.lm_head, inputs, targets)
            yield losses


class LlamaStream:
    """Iterator over the tokens that continue a prefilled sequence, all of row 0; a stop token ends it. The same logits
    and seed give the same tokens as ``TokenStream``. Raise ValueError while iterating if logits are not finite."""

    def __init__(
        self, model: Llama, reading: LlamaPrefill, *, seed: int, temperature: float, max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._reading, self._left, self._stop_tokens = model, reading, max_new_tokens, {*stop_tokens}
        self._sampler = Sampler([Sampling(temperature)], reading.logits.device)
        self._random = random_numbers(seed)

    def __iter__(self) -> Iterator[NewToken]:
        while self._left:
            (token,) = self._sampler.draw(self._reading.logits.unsqueeze(0), [self._random])
            if token < 0:
                raise ValueError(not_finite(self._reading.logits))
            if token in self._stop_tokens:
                return
            self._left -= 1
            yield NewToken(0, token)
            if self._left:
                self._reading = prefill_llama(self._model, [torch.tensor([token], device="cpu")], self._reading)

    def stop(self, row: int) -> None:
        """Generate no more tokens."""
        self._left = 0
