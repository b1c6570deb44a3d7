"""Tasks made of random tokens that need one skill each: generators of batches, for training and for evaluating.

A batch says for every answer where the token that it repeats stands, so that accuracy can be told by distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gecko.config import unknown_name
from gecko.ops.loss import IGNORED


@dataclass(frozen=True)
class SyntheticBatch:
    """All (B, T) int64."""

    tokens: Tensor
    targets: Tensor
    """What follows each token, ``IGNORED`` where that is not asked."""
    sources: Tensor
    """Where in the row the answer stands, −1 where nothing is asked."""


@dataclass(frozen=True)
class TaskSize:
    """length: tokens of a row. vocab_size: ids 0 to V − 1. items: what has to be remembered of a row."""

    length: int = 256
    vocab_size: int = 256
    items: int = 8
    power_a: float = 1.0
    """MQAR: gaps between pair and query follow a power law of exponent a − 1; 1 is uniform."""
    noise: bool = True
    """MQAR: random tokens between the queries, keys and values among them; else token 0, which is neither (Zoology's
    ``random_non_queries``)."""


def mqar(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Multi-query associative recall: pairs of key and value, then each key once more, and its value is asked.

    As in Zoology, with random tokens or token 0 between the queries: keys from the lower half of the vocabulary but
    token 0, values from the upper, no key nor value twice in a row; queries at even places after the pairs.

    Raises:
        ValueError: length or vocabulary are too small for the pairs.
    """
    pairs, half = size.items, size.vocab_size // 2
    space = (size.length - 2 * pairs) // 2
    if pairs < 1 or space < pairs or pairs > half - 1 or size.power_a <= 0:
        raise ValueError(
            f"mqar needs at least one pair, 4 tokens of length and 2 of the vocabulary for each, and power_a above 0; "
            f"got items={pairs}, length={size.length}, vocab_size={size.vocab_size}, power_a={size.power_a}."
        )
    keys = 1 + _drawn(torch.zeros(half - 1), rows, pairs, generator)
    values = half + _drawn(torch.zeros(size.vocab_size - half), rows, pairs, generator)
    law = (size.power_a - 1) * torch.arange(1, space + 1).log()
    queries = 2 * pairs + 2 * _drawn(law, rows, pairs, generator)
    tokens = torch.randint(size.vocab_size if size.noise else 1, (rows, size.length), generator=generator)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    tokens.scatter_(1, queries, keys)
    places = (2 * torch.arange(pairs) + 1).expand(rows, -1)
    return SyntheticBatch(tokens, *_asked(tokens, queries, values, places))


def selective_copying(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Tokens scattered among noise (id 0), then as many marks (id 1): each mark asks for the next of them, in order.

    Raises:
        ValueError: the length does not hold the tokens and their marks.
    """
    items, context = size.items, size.length - size.items
    if items < 1 or context < items or size.vocab_size < 3:
        raise ValueError(
            f"selective_copying needs at least one item, 2 tokens of length for each, and 3 of the vocabulary; "
            f"got items={items}, length={size.length}, vocab_size={size.vocab_size}."
        )
    places = _drawn(torch.zeros(context), rows, items, generator).sort(1).values
    data = torch.randint(2, size.vocab_size, (rows, items), generator=generator)
    tokens = torch.zeros(rows, size.length, dtype=torch.int64)
    tokens.scatter_(1, places, data)
    tokens[:, context:] = 1
    marks = torch.arange(context, size.length).expand(rows, -1)
    return SyntheticBatch(tokens, *_asked(tokens, marks, data, places))


def induction_heads(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Random tokens, one of which is special (id 0), once somewhere and once at the end: what followed it is asked.

    ``items`` says nothing here: there is one.

    Raises:
        ValueError: rows too short, or one token only.
    """
    if size.length < 4 or size.vocab_size < 3:
        raise ValueError(
            f"induction_heads needs a length of at least 4 and a vocabulary of at least 3; got {size.length} and "
            f"{size.vocab_size}."
        )
    tokens = torch.randint(1, size.vocab_size, (rows, size.length), generator=generator)
    first = torch.randint(size.length - 2, (rows, 1), generator=generator)
    tokens.scatter_(1, first, 0)
    tokens[:, -1] = 0
    last = torch.full((rows, 1), size.length - 1)
    return SyntheticBatch(tokens, *_asked(tokens, last, tokens.gather(1, first + 1), first + 1))


Maker = Callable[[TaskSize, int, torch.Generator], SyntheticBatch]
TASKS: Mapping[str, Maker] = {
    "mqar": mqar, "selective_copying": selective_copying, "induction_heads": induction_heads,
}  # fmt: skip


def guessing(task: str, size: TaskSize) -> float:
    """Accuracy of a guess among the tokens that answers are drawn from, or that the row shows as such."""
    shown = {"mqar": size.items, "selective_copying": size.vocab_size - 2, "induction_heads": size.vocab_size - 1}
    return 1 / shown[check_task(task)]


def check_task(task: str) -> str:
    if task not in TASKS:
        raise ValueError(unknown_name("task", task, TASKS))
    return task


def hits_by_distance(batch: SyntheticBatch, predicted: Tensor, chunk: int) -> dict[int, list[bool]]:
    """Whether each answer was right, by how many chunks it stands before the question; predicted (B, T) tokens."""
    rows, places = (batch.targets != IGNORED).nonzero(as_tuple=True)
    distances = places // chunk - batch.sources[rows, places] // chunk
    right = predicted[rows, places] == batch.targets[rows, places]
    found: dict[int, list[bool]] = {}
    for distance, hit in zip(distances.tolist(), right.tolist(), strict=True):
        found.setdefault(distance, []).append(hit)
    return dict(sorted(found.items()))


def _drawn(log_weights: Tensor, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """(rows, count) places drawn one after the other without replacement, with chances in proportion to weights."""
    noise = -torch.rand(rows, len(log_weights), generator=generator).clamp(min=1e-20).log()
    return (log_weights - noise.clamp(min=1e-20).log()).topk(count, dim=1).indices


def _asked(tokens: Tensor, questions: Tensor, answers: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    targets = torch.full_like(tokens, IGNORED).scatter_(1, questions, answers)
    sources = torch.full_like(tokens, -1).scatter_(1, questions, places)
    return targets, sources


def as_settings(size: TaskSize) -> dict[str, Any]:
    return dict(vars(size))
