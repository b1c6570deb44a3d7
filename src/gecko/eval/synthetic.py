"""Synthetic tasks of random tokens, and ``diagnose``, which trains and tests a small model on one of them.

A batch has the position of the token that each answer repeats, so that accuracy can be reported by distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.eval.results import Report, Results, Score, quiet, share
from gecko.inference.prefill import inference
from gecko.models.gecko import Gecko
from gecko.ops.loss import IGNORED
from gecko.records import unknown_name


@dataclass(frozen=True)
class SyntheticBatch:
    """Tokens and answers of a task, all (B, T) int64."""

    tokens: Tensor
    targets: Tensor
    """Answer that follows each token; ``IGNORED`` if there is none."""
    sources: Tensor
    """Position in the row of the token that the answer repeats; −1 if there is no answer."""


@dataclass(frozen=True)
class TaskSize:
    """Size of a task."""

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


def mqar(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate multi-query associative recall: pairs of key and value, then each key again; the answer is its value.

    As in Zoology, keys are from the lower half of the vocabulary without token 0, and values from the upper half,
    without repetition in a row. Queries are at even positions after the pairs, with random tokens or token 0 between.

    Raises:
        ValueError: the length or the vocabulary is too small for the pairs.
    """
    pairs, half = size.items, size.vocab_size // 2
    space = (size.length - 2 * pairs) // 2
    if pairs < 1 or space < pairs or pairs > half - 1 or size.power_a <= 0:
        raise ValueError(
            f"mqar needs at least one pair, 4 tokens of length and 2 of the vocabulary for each, and power_a above 0; "
            f"got items={pairs}, length={size.length}, vocab_size={size.vocab_size}, power_a={size.power_a}."
        )
    keys = 1 + _drawn(torch.zeros(half - 1, dtype=torch.float32, device="cpu"), rows, pairs, generator)
    even = torch.zeros(size.vocab_size - half, dtype=torch.float32, device="cpu")
    values = half + _drawn(even, rows, pairs, generator)
    law = (size.power_a - 1) * torch.arange(1, space + 1, dtype=torch.float32, device="cpu").log()
    queries = 2 * pairs + 2 * _drawn(law, rows, pairs, generator)
    tokens = torch.randint(size.vocab_size if size.noise else 1, (rows, size.length), generator=generator, device="cpu")
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    tokens.scatter_(1, queries, keys)
    places = (2 * torch.arange(pairs, device="cpu") + 1).expand(rows, -1)
    return SyntheticBatch(tokens, *_asked(tokens, queries, values, places))


def selective_copying(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate tokens scattered among noise (id 0), followed by marks (id 1), each answered by the next token in order.

    Raises:
        ValueError: the length is too small for the tokens and their marks.
    """
    items, context = size.items, size.length - size.items
    if items < 1 or context < items or size.vocab_size < 3:
        raise ValueError(
            f"selective_copying needs at least one item, 2 tokens of length for each, and 3 of the vocabulary; "
            f"got items={items}, length={size.length}, vocab_size={size.vocab_size}."
        )
    places = _drawn(torch.zeros(context, dtype=torch.float32, device="cpu"), rows, items, generator).sort(1).values
    data = torch.randint(2, size.vocab_size, (rows, items), generator=generator, device="cpu")
    tokens = torch.zeros(rows, size.length, dtype=torch.int64, device="cpu")
    tokens.scatter_(1, places, data)
    tokens[:, context:] = 1
    marks = torch.arange(context, size.length, device="cpu").expand(rows, -1)
    return SyntheticBatch(tokens, *_asked(tokens, marks, data, places))


def induction_heads(size: TaskSize, rows: int, generator: torch.Generator) -> SyntheticBatch:
    """Generate random tokens with a special token (id 0) twice: inside, where the answer follows it, and at the end.

    ``size.items`` has no effect: there is one item.

    Raises:
        ValueError: the length or the vocabulary is too small.
    """
    if size.length < 4 or size.vocab_size < 3:
        raise ValueError(
            f"induction_heads needs a length of at least 4 and a vocabulary of at least 3; got {size.length} and "
            f"{size.vocab_size}."
        )
    tokens = torch.randint(1, size.vocab_size, (rows, size.length), generator=generator, device="cpu")
    first = torch.randint(size.length - 2, (rows, 1), generator=generator, device="cpu")
    tokens.scatter_(1, first, 0)
    tokens[:, -1] = 0
    last = torch.full((rows, 1), size.length - 1, device="cpu")
    return SyntheticBatch(tokens, *_asked(tokens, last, tokens.gather(1, first + 1), first + 1))


Maker = Callable[[TaskSize, int, torch.Generator], SyntheticBatch]
TASKS: Mapping[str, Maker] = {
    "mqar": mqar, "selective_copying": selective_copying, "induction_heads": induction_heads,
}  # fmt: skip


def guessing(task: str, size: TaskSize) -> float:
    """Return the accuracy of a uniform guess among the possible answers of a row."""
    shown = {"mqar": size.items, "selective_copying": size.vocab_size - 2, "induction_heads": size.vocab_size - 1}
    return 1 / shown[check_task(task)]


def check_task(task: str) -> str:
    if task not in TASKS:
        raise ValueError(unknown_name("task", task, TASKS))
    return task


def hits_by_distance(batch: SyntheticBatch, predicted: Tensor, chunk: int) -> dict[int, list[bool]]:
    """Return whether each answer is right, by its distance from the question in chunks; ``predicted`` is (B, T)."""
    rows, places = (batch.targets != IGNORED).nonzero(as_tuple=True)
    distances = places // chunk - batch.sources[rows, places] // chunk
    right = predicted[rows, places] == batch.targets[rows, places]
    found: dict[int, list[bool]] = {}
    for distance, hit in zip(distances.tolist(), right.tolist(), strict=True):
        found.setdefault(distance, []).append(hit)
    return dict(sorted(found.items()))


def _drawn(log_weights: Tensor, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Sample (rows, count) positions without replacement, with probabilities proportional to the weights."""
    uniform = torch.rand(rows, len(log_weights), generator=generator, dtype=torch.float32, device="cpu")
    noise = -uniform.clamp(min=1e-20).log()
    return (log_weights - noise.clamp(min=1e-20).log()).topk(count, dim=1).indices


def _asked(tokens: Tensor, questions: Tensor, answers: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    targets = torch.full_like(tokens, IGNORED).scatter_(1, questions, answers)
    sources = torch.full_like(tokens, -1).scatter_(1, questions, places)
    return targets, sources


_TEST_SEED = 2**32
"""Offset of the test's seeds, so that no test row occurs in training."""


def _small_model() -> GeckoConfig:
    return GeckoConfig(
        vocab_size=256, num_layers=2, model_dim=64, key_dim=32, value_dim=128, num_heads=1, ffn_dim=128,
        chunk_size=32, timestep_groups=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """Settings of a diagnosis: the task's size, the model and its training."""

    size: TaskSize = field(default_factory=TaskSize)
    model: GeckoConfig = field(default_factory=_small_model)
    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.1
    """Fraction of the steps with rising learning rate, after which it decays to 0 along a cosine."""
    growth: float = 0.0
    """Fraction of the steps, at the start, with smaller tasks: a quarter of the length and of the items, then half."""
    test_rows: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1 or self.test_rows < 1:
            raise ValueError(
                f"a diagnosis needs steps of at least 0, batch_size and test_rows of at least 1; got {self.steps}, "
                f"{self.batch_size} and {self.test_rows}."
            )
        if not 0 <= self.growth <= 1:
            raise ValueError(f"growth is a fraction of the steps and must be in 0..1; got {self.growth}.")
        if self.model.vocab_size < self.size.vocab_size:
            raise ValueError(
                f"the model must know all tokens of the task; got model.vocab_size={self.model.vocab_size} and "
                f"size.vocab_size={self.size.vocab_size}."
            )

    def size_at(self, step: int) -> TaskSize:
        """Return the size of the task in a step of training."""
        share = 4 if step < self.growth * self.steps / 2 else 2 if step < self.growth * self.steps else 1
        return replace(self.size, length=self.size.length // share, items=max(1, self.size.items // share))


def diagnose(
    task: str, diagnosis: Diagnosis, device: torch.device, *, report: Report = quiet
) -> Results:  # fmt: skip
    """Train a model on new rows in every step, and measure its accuracy on other rows by distance in chunks.

    Raises:
        ValueError: the task is unknown, or the size does not fit it.
    """
    check_task(task)
    torch.manual_seed(diagnosis.seed)
    model = Gecko(diagnosis.model).to(device)
    losses = _train(task, model, diagnosis, report)
    settings = {
        "task": task, "size": dict(vars(diagnosis.size)), "steps": diagnosis.steps,
        "batch_size": diagnosis.batch_size, "learning_rate": diagnosis.learning_rate,
        "weight_decay": diagnosis.weight_decay, "warmup": diagnosis.warmup, "growth": diagnosis.growth,
        "guessing": guessing(task, diagnosis.size), "config": diagnosis.model.to_dict(),
    }  # fmt: skip
    scores = evaluate_task(task, model, diagnosis.size, diagnosis.test_rows, diagnosis.seed)
    notes = [f"guessing gives {settings['guessing']:.4f}", *_diverged(losses)]
    return Results("diagnose", scores, settings, diagnosis.seed, notes, {"training_losses": losses})


def evaluate_task(task: str, model: Gecko, size: TaskSize, rows: int, seed: int) -> list[Score]:
    """Return the accuracy of a model on a task, over all answers and by distance in chunks."""
    chunk = model.config.chunk_size
    found: dict[int, list[bool]] = {}
    for first in range(0, rows, 32):
        batch = _batch(task, size, min(32, rows - first), seed + _TEST_SEED + first)
        with inference(model):
            logits, _ = model(batch.tokens.to(model.embedding.weight.device))
        for distance, hits in hits_by_distance(batch, logits.argmax(-1).cpu(), chunk).items():
            found.setdefault(distance, []).extend(hits)
    every = [hit for hits in found.values() for hit in hits]
    scores = [_score(every, "any")]
    return scores + [_score(hits, distance) for distance, hits in sorted(found.items())]


def _score(hits: list[bool], distance: int | str) -> Score:
    value, interval = share(hits)
    return Score("accuracy", value, len(hits), "answers", interval, {"chunks before the question": distance})


def _train(
    task: str, model: Gecko, diagnosis: Diagnosis, report: Report
) -> list[dict[str, Any]]:  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=diagnosis.learning_rate, betas=(0.9, 0.95), weight_decay=diagnosis.weight_decay
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, diagnosis))
    device, every, losses = model.embedding.weight.device, max(1, diagnosis.steps // 20), []
    for step in range(diagnosis.steps):
        # Seeds of different runs are far apart, so that no two runs see the same rows.
        batch = _batch(task, diagnosis.size_at(step), diagnosis.batch_size, diagnosis.seed * 2**33 + step)
        loss = model.loss(batch.tokens.to(device), batch.targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if (step + 1) % every == 0:
            value = loss.item()
            # JSON has no NaN. A diverged run is a result too.
            losses.append({"step": step + 1, "loss": value if math.isfinite(value) else None})
            report(f"step {step + 1}: loss {value:.4f}")
    return losses


def _diverged(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note on the first loss that is not finite."""
    first = next((point["step"] for point in losses if point["loss"] is None), None)
    if first is None:
        return []
    return [f"training diverged: the loss is not finite at step {first}; try a smaller learning_rate"]


def _rate(step: int, diagnosis: Diagnosis) -> float:
    rise = max(1, round(diagnosis.warmup * diagnosis.steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, diagnosis.steps - rise)))


def _batch(task: str, size: TaskSize, rows: int, seed: int) -> SyntheticBatch:
    return TASKS[task](size, rows, torch.Generator().manual_seed(seed))
