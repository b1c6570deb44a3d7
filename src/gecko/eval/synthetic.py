"""Synthetic tasks of random tokens: recall, copying, and tracking of a state.

``mqar`` is Zoology's (Arora et al., 2023). The tasks of recall, ``selective_copying`` and ``memorization`` are MAD's
(Poli et al., 2024), for a language model. ``parity``, ``counting`` and ``permutations`` ask for a state after every
token. MAD's compression is missing: it trains an auto-encoder, whose decoder is no part of a language model.

A batch has the position of the token that each answer repeats, so that accuracy can be reported by distance.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations as orders

import torch
from torch import Tensor

from gecko.config import LARGEST
from gecko.eval.results import check_task
from gecko.ops.loss import IGNORED


@dataclass(frozen=True)
class SyntheticBatch:
    """Tokens and answers of a task, all (B, T) int64."""

    tokens: Tensor
    targets: Tensor
    """Answer that follows each token; ``IGNORED`` if there is none."""
    sources: Tensor
    """Position in the row of the token that the answer repeats, or of the first one that it follows from; −1 if there
    is no answer."""


@dataclass(frozen=True)
class TaskSize:
    """Size of a task; a generator raises ValueError if length or vocabulary are too small for it."""

    length: int = 256
    """Tokens per row."""
    vocab_size: int = 256
    items: int = 8
    """Number of items to remember per row."""
    power_a: float = 1.0
    """MQAR: distances between pair and query follow a power law of exponent a − 1; 1 is uniform."""
    noise: bool = True
    """MQAR: random tokens, which may be keys and values, between the queries; otherwise token 0 (Zoology's
    ``random_non_queries``)."""
    noise_share: float = 0.2
    """Noisy recall: share of the pairs that are noise, of the upper half of the vocabulary."""

    def __post_init__(self) -> None:
        _check(self.items >= 1, "a task needs at least one item", self, "items")


def mqar(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate multi-query associative recall: pairs of key and value, then each key again; the answer is its value.

    As in Zoology, keys are from the lower half of the vocabulary without token 0, and values from the upper half,
    without repetition in a row. Queries are at even positions after the pairs, with random tokens or token 0 between.
    """
    pairs, half = size.items, size.vocab_size // 2
    space = (size.length - 2 * pairs) // 2
    needs = "mqar needs at least one pair, 4 tokens of length and 2 of the vocabulary for each, and power_a above 0"
    fits = 1 <= pairs <= min(space, half - 1) and size.power_a > 0
    _check(fits, needs, size, "items", "length", "vocab_size", "power_a")
    keys = 1 + _drawn(_even(half - 1), rows, pairs, generator)
    values = half + _drawn(_even(size.vocab_size - half), rows, pairs, generator)
    law = (size.power_a - 1) * torch.arange(1, space + 1, dtype=torch.float32, device="cpu").log()
    queries = 2 * pairs + 2 * _drawn(law, rows, pairs, generator)
    tokens = torch.randint(size.vocab_size if size.noise else 1, (rows, size.length), generator=generator, device="cpu")
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    tokens.scatter_(1, queries, keys)
    places = (2 * torch.arange(pairs, device="cpu") + 1).expand(rows, -1)
    return _asked(tokens, queries, values, places)


def selective_copying(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate tokens among noise (id 0), followed by marks (id 1), each answered by the next token in order."""
    items, context = size.items, size.length - size.items
    needs = "selective_copying needs at least one item, 2 tokens of length for each, and 3 of the vocabulary"
    _check(1 <= items <= context and size.vocab_size >= 3, needs, size, "items", "length", "vocab_size")
    places = _drawn(_even(context), rows, items, generator).sort(1).values
    data = torch.randint(2, size.vocab_size, (rows, items), generator=generator, device="cpu")
    tokens = torch.zeros(rows, size.length, dtype=torch.int64, device="cpu")
    tokens.scatter_(1, places, data)
    tokens[:, context:] = 1
    marks = torch.arange(context, size.length, device="cpu").expand(rows, -1)
    return _asked(tokens, marks, data, places)


def induction_heads(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate random tokens with token 0 twice: at a random place before its answer, and at the end as the question.

    ``size.items`` has no effect: there is one item.
    """
    needs = "induction_heads needs a length of at least 4 and a vocabulary of at least 3"
    _check(size.length >= 4 and size.vocab_size >= 3, needs, size, "length", "vocab_size")
    tokens = torch.randint(1, size.vocab_size, (rows, size.length), generator=generator, device="cpu")
    first = torch.randint(size.length - 2, (rows, 1), generator=generator, device="cpu")
    tokens.scatter_(1, first, 0)
    tokens[:, -1] = 0
    last = torch.full((rows, 1), size.length - 1, device="cpu")
    return _asked(tokens, last, tokens.gather(1, first + 1), first + 1)


def recall(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate pairs of a key and its value in the row, again and again; a key that was there is asked for its value.

    As in MAD's in-context recall, keys are the lower half of the vocabulary, values the upper half, and the last pair
    is one that was there. ``size.items`` has no effect.
    """
    return _recall("recall", size, size.vocab_size, 0.0, rows, generator)


def noisy_recall(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate ``recall`` in the lower half of the vocabulary, among pairs of noise from the upper half."""
    return _recall("noisy_recall", size, size.vocab_size // 2, size.noise_share, rows, generator)


def _recall(
    name: str, size: TaskSize, vocab_size: int, noise: float, rows: int, generator: torch.Generator
) -> SyntheticBatch:
    pairs, half = size.length // 2, vocab_size // 2
    needs = f"{name} needs a length of at least 4, at least 2 keys and 2 values, and a noise_share in 0..1"
    _check(pairs >= 2 and half >= 2 and 0 <= noise < 1, needs, size, "length", "vocab_size", "noise_share")
    every = torch.arange(rows, device="cpu")
    quiet = torch.rand(rows, pairs, generator=generator, dtype=torch.float32, device="cpu") >= noise
    quiet[every, torch.randint(pairs - 1, (rows,), generator=generator, device="cpu")] = True
    quiet[:, -1] = True
    keys = torch.randint(half, (rows, pairs), generator=generator, device="cpu")
    keys[:, -1] = keys.gather(1, torch.multinomial(quiet[:, :-1].float(), 1, generator=generator)).squeeze(1)
    meanings = torch.randint(half, vocab_size - vocab_size % 2, (rows, half), generator=generator, device="cpu")
    low = vocab_size if vocab_size < size.vocab_size else 0
    noise_drawn = torch.randint(low, size.vocab_size, (rows, pairs, 2), generator=generator, device="cpu")
    found = torch.where(quiet[..., None], torch.stack([keys, meanings.gather(1, keys)], dim=-1), noise_drawn)
    tokens = torch.zeros(rows, size.length, dtype=torch.int64, device="cpu")
    tokens[:, -2 * pairs :] = found.flatten(1)
    same = (keys[:, :, None] == keys[:, None, :]) & quiet[:, :, None] & quiet[:, None, :]
    places = torch.where(same.tril(-1), torch.arange(pairs, device="cpu"), -1).amax(-1)
    row, pair = (places >= 0).nonzero(as_tuple=True)
    first = size.length - 2 * pairs
    targets, sources = torch.full_like(tokens, IGNORED), torch.full_like(tokens, -1)
    targets[row, first + 2 * pair] = found[row, pair, 1]
    sources[row, first + 2 * pair] = first + 2 * places[row, pair] + 1
    return SyntheticBatch(tokens, targets, sources)


def fuzzy_recall(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate ``recall`` whose keys and values have one to three different tokens; every token of a value is asked.

    A row begins with token 0, which is no key, where a pair does not fit.
    """
    half = (size.vocab_size - 1) // 2
    needs = "fuzzy_recall needs a length of at least 12 and a vocabulary of at least 7"
    _check(size.length >= 12 and half >= 3, needs, size, "length", "vocab_size")

    def motif(first: int) -> tuple[int, ...]:
        count = int(torch.randint(1, 4, (), generator=generator, device="cpu"))
        return tuple((first + torch.randperm(half, generator=generator, device="cpu")[:count]).tolist())

    tokens = torch.zeros(rows, size.length, dtype=torch.int64, device="cpu")
    targets, sources = torch.full_like(tokens, IGNORED), torch.full_like(tokens, -1)
    for row in range(rows):
        values: dict[tuple[int, ...], tuple[int, ...]] = {}
        pairs, length = [], 0
        while length + 6 <= size.length - 6:
            key = motif(1)
            values.setdefault(key, motif(1 + half))
            pairs.append(key)
            length += len(key) + len(values[key])
        pairs.append(pairs[int(torch.randint(len(pairs), (), generator=generator, device="cpu"))])
        place = size.length - length - len(pairs[-1]) - len(values[pairs[-1]])
        seen: dict[tuple[int, ...], int] = {}
        for key in pairs:
            begin, value = place + len(key), values[key]
            tokens[row, place : begin + len(value)] = torch.tensor([*key, *value], device="cpu")
            if key in seen:
                asked = slice(begin - 1, begin - 1 + len(value))
                targets[row, asked] = torch.tensor(value, device="cpu")
                sources[row, asked] = torch.arange(seen[key], seen[key] + len(value), device="cpu")
            seen[key], place = begin, begin + len(value)
    return SyntheticBatch(tokens, targets, sources)


def memorization(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate keys, each followed by a mark, the last id, which is answered by the key's value: the same in all rows.

    The weights must hold the values. Their source is the key.
    """
    half = (size.vocab_size - 1) // 2
    needs = "memorization needs a length of at least 2 and a vocabulary of at least 5"
    _check(size.length >= 2 and half >= 2, needs, size, "length", "vocab_size")
    values = half + torch.randperm(half, generator=torch.Generator().manual_seed(12345), device="cpu")
    keys = torch.randint(half, (rows, size.length // 2), generator=generator, device="cpu")
    tokens = torch.full((rows, size.length), size.vocab_size - 1, dtype=torch.int64, device="cpu")
    tokens[:, 0 : 2 * keys.shape[1] : 2] = keys
    marks = (1 + 2 * torch.arange(keys.shape[1], device="cpu")).expand(rows, -1)
    return _asked(tokens, marks, values[keys], marks - 1)


def parity(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate bits; each is answered by the parity of all bits up to it. ``size.items`` has no effect."""
    return _sums("parity", 2, size, rows, generator)


def counting(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate numbers below ``size.items``; each is answered by the sum of all up to it, modulo ``size.items``."""
    return _sums("counting", size.items, size, rows, generator)


def _sums(name: str, modulus: int, size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    _check_states(name, modulus, size, f"{modulus} numbers")
    tokens = torch.randint(modulus, (rows, size.length), generator=generator, device="cpu")
    return SyntheticBatch(tokens, tokens.cumsum(1) % modulus, torch.zeros_like(tokens))


def permutations(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate permutations of ``size.items`` things; each is answered by the product of all up to it.

    The token of a permutation is its place in lexicographic order. From five things on, no circuit of constant depth
    computes the product (the word problem of S5).
    """
    count = math.factorial(size.items) if size.items <= 8 else LARGEST + 1
    _check_states("permutations", count, size, f"{size.items}! permutations")
    every = torch.tensor(list(orders(range(size.items))), device="cpu")
    order = torch.full((size.items**size.items,), -1, dtype=torch.int64, device="cpu")
    weights = size.items ** torch.arange(size.items, device="cpu")
    order[every @ weights] = torch.arange(count, device="cpu")
    tokens = torch.randint(count, (rows, size.length), generator=generator, device="cpu")
    states, state = [], every[:1].expand(rows, -1)
    for column in tokens.unbind(1):
        state = every[column].gather(1, state)
        states.append(order[state @ weights])
    return SyntheticBatch(tokens, torch.stack(states, dim=1), torch.zeros_like(tokens))


def _check_states(name: str, states: int, size: TaskSize, shown: str) -> None:
    needs = f"{name} needs at least 2 states, a token for each of its {shown}, and a length of at least 1"
    _check(2 <= states <= size.vocab_size and size.length >= 1, needs, size, "items", "vocab_size", "length")


def _check(fits: bool, needs: str, size: TaskSize, *shown: str) -> None:
    if not fits:
        raise ValueError(f"{needs}; got {', '.join(f'{name}={getattr(size, name)}' for name in shown)}.")


Maker = Callable[[TaskSize, int, torch.Generator], SyntheticBatch]
TASKS: Mapping[str, Maker] = {
    task.__name__: task for task in (
        mqar, selective_copying, induction_heads, recall, noisy_recall, fuzzy_recall, memorization, parity, counting,
        permutations,
    )
}  # fmt: skip


def guessing(task: str, size: TaskSize) -> float:
    """Return the accuracy of a uniform guess among the possible answers of a row."""
    shown: dict[str, Callable[[], int]] = {
        "mqar": lambda: size.items, "selective_copying": lambda: size.vocab_size - 2,
        "induction_heads": lambda: size.vocab_size - 1, "recall": lambda: size.vocab_size // 2,
        "noisy_recall": lambda: size.vocab_size // 2 // 2, "fuzzy_recall": lambda: (size.vocab_size - 1) // 2,
        "memorization": lambda: (size.vocab_size - 1) // 2, "parity": lambda: 2, "counting": lambda: size.items,
        "permutations": lambda: math.factorial(size.items),
    }  # fmt: skip
    check_task(task, shown)
    return 1 / shown[task]()


def generator_of(*seed: object) -> torch.Generator:
    """Return a generator of the rows that these parts of a seed name.

    PyTorch's generator on a CPU takes 32 bits of its seed, so sums of large numbers would repeat the rows of others.
    """
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def hits_by_distance(batch: SyntheticBatch, predicted: Tensor, chunk: int) -> dict[int, list[bool]]:
    """Return whether each answer is right, by its distance from the question in chunks; ``predicted`` is (B, T)."""
    rows, places = (batch.targets != IGNORED).nonzero(as_tuple=True)
    distances = places // chunk - batch.sources[rows, places] // chunk
    right = predicted[rows, places] == batch.targets[rows, places]
    return {distance: right[distances == distance].tolist() for distance in distances.unique().tolist()}


def _even(count: int) -> Tensor:
    """Return the logarithms of equal weights."""
    return torch.zeros(count, dtype=torch.float32, device="cpu")


def _drawn(log_weights: Tensor, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Sample (rows, count) positions without replacement, with probabilities proportional to the weights."""
    uniform = torch.rand(rows, len(log_weights), generator=generator, dtype=torch.float32, device="cpu")
    noise = -uniform.clamp(min=1e-20).log()
    return (log_weights - noise.clamp(min=1e-20).log()).topk(count, dim=1).indices


def _asked(tokens: Tensor, questions: Tensor, answers: Tensor, places: Tensor) -> SyntheticBatch:
    targets = torch.full_like(tokens, IGNORED).scatter_(1, questions, answers)
    return SyntheticBatch(tokens, targets, torch.full_like(tokens, -1).scatter_(1, questions, places))
