"""Perplexity against context length: the same tokens, with more and more text before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gecko.eval.intervals import Values, bootstrap_mean
from gecko.eval.results import Report, Results, Score, quiet
from gecko.eval.scored_model import ScoredModel
from gecko.eval.texts import Cursor, Text, TextSize, measure

LENGTHS = tuple(1024 * 4**power for power in range(7))
"""1 K to 4 M."""
MOST_BLOCKS, LEAST_BLOCK = 4096, 1024
_LARGEST_EXPONENT = 500
"""Of a perplexity that is worth a number: texts of very long words have none by word."""


@dataclass(frozen=True)
class _Plan:
    """What is scored: of every text its first tokens, a multiple of the largest length."""

    lengths: tuple[int, ...]
    block: int
    """Tokens whose losses are summed, the units of the bootstrap."""
    texts: list[Text]
    sizes: list[TextSize]
    """Of what is scored of each text."""
    notes: list[str]

    @property
    def total(self) -> TextSize:
        return TextSize(*(sum(getattr(size, name) for size in self.sizes) for name in ("tokens", "bytes", "words")))


def perplexity(
    model: ScoredModel[Any], texts: Sequence[Text], lengths: Sequence[int] | None = None, *, seed: int = 0,
    report: Report = quiet,
) -> Results:  # fmt: skip
    """Score texts once for every context length.

    A text is cut into disjoint segments of that length, each read from a fresh state after a document start, so
    that all its tokens are scored, and the same ones for every length. Memory does not grow with length.

    Args:
        lengths: in tokens, each a divisor of the next; None: those of ``LENGTHS`` that fit into every text.
            With lengths given, texts shorter than the largest are skipped, and the notes say so.
        seed: of the bootstrap.

    Raises:
        ValueError: lengths that are no divisors of one another, or texts that are all too short.
    """
    plan = _plan(model, texts, lengths)
    total, scores, before = plan.total, [], None
    for length in plan.lengths:
        blocks = _block_losses(model, plan, length, report)
        scores += _scores(length, blocks, total, seed)
        if before is not None:
            scores.append(_change(length, blocks - before, plan, seed))
        before = blocks
    settings = {"lengths": list(plan.lengths), "texts": [text.name for text in plan.texts], "block": plan.block}
    return Results("perplexity", scores, settings, seed, plan.notes, {"bytes": total.bytes, "words": total.words})


def _plan(model: ScoredModel[Any], texts: Sequence[Text], lengths: Sequence[int] | None) -> _Plan:
    tokens = [sum(map(len, text.tokens(model.tokenizer))) for text in texts]
    chosen, notes = _fitting(tokens) if lengths is None else (_checked(lengths), [])
    largest, kept, sizes = chosen[-1], [], []
    for text, count in zip(texts, tokens, strict=True):
        scored = count // largest * largest
        if not scored:
            notes.append(f"skipped {text.name}: its {count:,} tokens are fewer than the context of {largest:,}")
            continue
        if scored < count:
            notes.append(f"{text.name}: the first {scored:,} of {count:,} tokens are scored, whole segments")
        kept.append(text)
        sizes.append(measure(model.tokenizer, Cursor(text.tokens(model.tokenizer)).take(scored)))
    if not kept:
        raise ValueError(
            f"a text must be at least as long as the largest context, {largest:,} tokens; the longest has "
            f"{max(tokens):,}. Ask for shorter contexts (--lengths), or join the files to one text (--joined)."
        )
    block = _block(chosen, sum(size.tokens for size in sizes))
    return _Plan(chosen, block, kept, sizes, notes)


def _fitting(tokens: Sequence[int]) -> tuple[tuple[int, ...], list[str]]:
    shortest = min(tokens)
    fits = tuple(length for length in LENGTHS if length <= shortest)
    if not fits:
        raise ValueError(f"texts must have at least {LENGTHS[0]:,} tokens; the shortest has {shortest:,}.")
    notes = [
        f"context {length:,} skipped: the shortest text has {shortest:,} tokens" for length in LENGTHS[len(fits) :]
    ]
    return fits, notes


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    ordered = tuple(sorted(set(lengths)))
    if not ordered or ordered[0] < 1 or any(b % a for a, b in pairwise(ordered)):
        raise ValueError(
            f"context lengths must be at least 1 and each a divisor of the next, so that segments of all hold the "
            f"same tokens; got {list(lengths)}. Try powers of two."
        )
    return ordered


def _block(lengths: tuple[int, ...], total: int) -> int:
    """Small enough for many units, large enough for them to be few and nearly independent; divides every segment."""
    block = lengths[0]
    while block % 2 == 0 and block > LEAST_BLOCK:
        block //= 2
    while total // block > MOST_BLOCKS and lengths[-1] % (2 * block) == 0:
        block *= 2
    return block


def _block_losses(model: ScoredModel[Any], plan: _Plan, length: int, report: Report) -> Values:
    """Summed losses of every block of the scored tokens, (blocks,)."""
    sums = np.zeros(plan.total.tokens // plan.block)
    place = 0
    for text, size in zip(plan.texts, plan.sizes, strict=True):
        cursor = Cursor(text.tokens(model.tokenizer))
        for _ in range(size.tokens // length):
            report(f"context {length:,}: {place:,} of {plan.total.tokens:,} tokens")
            for losses in segment_losses(model, cursor, length):
                index = (place + np.arange(len(losses))) // plan.block
                np.add.at(sums, index, losses.double().numpy())
                place += len(losses)
    return sums


def segment_losses(model: ScoredModel[Any], cursor: Cursor, length: int) -> Iterator[Tensor]:
    """Losses of the next ``length`` tokens, all of them, read after a document start, in pieces."""
    start = torch.tensor([model.tokenizer.document_start])
    return model.losses(chain([start], cursor.take(length)))


def _scores(length: int, blocks: Values, size: TextSize, seed: int) -> list[Score]:
    """The same sum of losses by token, word and byte; texts without words have no number by word."""
    mean, per_block = float(blocks.mean()), len(blocks)
    spread = bootstrap_mean(blocks, f"blocks of {size.tokens // per_block:,} tokens", seed)
    measures: dict[str, Callable[[float], float]] = {
        "nats a token": lambda x: x * per_block / size.tokens,
        "perplexity, token": lambda x: math.exp(x * per_block / size.tokens),
        "perplexity, word": lambda x: math.exp(x * per_block / size.words),
        "bits a byte": lambda x: x * per_block / size.bytes / math.log(2),
    }
    if not size.words or mean * per_block / size.words > _LARGEST_EXPONENT:
        del measures["perplexity, word"]
    return [
        Score(name, of_block(mean), size.tokens, "tokens", spread and spread.map(of_block), {"context": length})
        for name, of_block in measures.items()
    ]


def _change(length: int, difference: Values, plan: _Plan, seed: int) -> Score:
    """What the longer context gains, block by block: negative is better."""
    tokens = plan.total.tokens
    spread = bootstrap_mean(difference / plan.block, f"blocks of {plan.block:,} tokens", seed)
    before = plan.lengths[plan.lengths.index(length) - 1]
    name = f"change from {before:,}, nats"
    return Score(name, float(difference.sum()) / tokens, tokens, "tokens", spread, {"context": length})
