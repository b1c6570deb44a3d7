"""``generate`` and ``stream``: from prompts to tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gecko.generation.prompts import Prompt, as_rows, as_seeds
from gecko.generation.reading import read
from gecko.generation.sampling import Sampling
from gecko.generation.stream import FinishReason, TokenStream, check_options
from gecko.model import Gecko
from gecko.state import GeckoState


@dataclass(frozen=True)
class Generation:
    """What ``generate`` returns, whatever it was given; one entry for each prompt."""

    tokens: list[list[int]]
    """The new tokens, without the prompt and without the stop token."""
    finish_reasons: list[FinishReason]
    """``length``: as many as asked for. ``stop``: a stop token came."""
    state: GeckoState
    """One row a prompt. It has read the prompt and all of ``tokens``; pass it on with more of the text."""


def generate(
    model: Gecko,
    prompt_tokens: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | Sequence[int] | None = None,
    stop_tokens: Collection[int] = (),
    state: GeckoState | None = None,
) -> Generation:
    """Continue one prompt or several; each gets the tokens it would get alone.

    Prompts are read in pieces and every text keeps a state of constant size, so memory does not depend
    on how long prompt and continuation are.

    Args:
        prompt_tokens: ids of one text, 1-D, or a list of such, of any lengths of at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it, then cut by top_k, then by top_p, then by min_p.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest most likely tokens that have this probability together.
        min_p: draw from tokens that are at least this share as likely as the most likely one.
        repetition_penalty: logits of tokens that the prompt or the new text held are divided by it where positive,
            else multiplied; 0.01 to 100.
        logit_bias: by token id, what is added to its logit, before anything else.
        seed: of every row, or one for each; the same seed gives the same tokens. None: random, from
            PyTorch's generator.
        stop_tokens: ids that end a row, such as ``{tokenizer.document_end}``.
        state: what was read before the prompts: a row for each, or one row that all continue.

    Raises:
        TypeError, ValueError: prompts that are no ids of the model or empty, numbers out of range, a state
            of another model or of a wrong number of rows, logits that are not finite.
    """
    tokens = stream(
        model, prompt_tokens, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, logit_bias=logit_bias, seed=seed,
        stop_tokens=stop_tokens, state=state,
    )  # fmt: skip
    made: dict[int, list[int]] = {}
    for row, token in tokens:
        made.setdefault(row, []).append(token)
    reasons = [reason for reason in tokens.finish_reasons if reason is not None]
    return Generation([made.get(row, []) for row in range(len(reasons))], reasons, tokens.state)


def stream(
    model: Gecko,
    prompt_tokens: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | Sequence[int] | None = None,
    stop_tokens: Collection[int] = (),
    state: GeckoState | None = None,
) -> TokenStream:
    """``generate`` as an iterator of ``(row, token)`` that makes a token when it is asked for.

    The prompts are read in this call. Arguments and errors as for ``generate``.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias or {})
    rows = as_rows(prompt_tokens)
    states, seeds = _states(state, len(rows)), as_seeds(seed, len(rows))
    check_options(model, sampling, max_new_tokens)
    readings = [read(model, [row], before) for row, before in zip(rows, states, strict=True)]
    return TokenStream(
        model, readings, seeds=seeds, sampling=sampling,
        max_new_tokens=max_new_tokens, stop_tokens=stop_tokens,
    )  # fmt: skip


def _states(state: GeckoState | None, rows: int) -> list[GeckoState] | list[None]:
    if state is None:
        return [None] * rows
    if state.batch_size not in (1, rows):
        raise ValueError(
            f"state must have one row, which every prompt continues, or one for each of the {rows} prompts; "
            f"got {state.batch_size}. Try state.rows([...])."
        )
    return [state.rows([row if state.batch_size > 1 else 0]) for row in range(rows)]
