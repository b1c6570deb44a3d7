"""What an architecture can learn at all: train a small model from scratch on one synthetic task, and test it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gecko.config import GeckoConfig
from gecko.eval.intervals import share
from gecko.eval.results import Report, Results, Score, quiet
from gecko.eval.synthetic import TASKS, SyntheticBatch, TaskSize, as_settings, check_task, guessing, hits_by_distance
from gecko.generation.reading import inference
from gecko.model import Gecko

_TEST_SEED = 2**32
"""Rows of the test are of no training step."""


def _small_model() -> GeckoConfig:
    return GeckoConfig(
        vocab_size=256, num_layers=2, model_dim=64, key_dim=32, value_dim=128, num_heads=1, ffn_dim=128,
        chunk_size=32, timestep_groups=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """A training run; its vocabulary is the task's."""

    size: TaskSize = field(default_factory=TaskSize)
    model: GeckoConfig = field(default_factory=_small_model)
    steps: int = 400
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.1
    """Share of the steps in which the rate rises; then it falls to 0 as a cosine does."""
    test_rows: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1 or self.test_rows < 1:
            raise ValueError(
                f"a diagnosis needs steps of at least 0, batch_size and test_rows of at least 1; got {self.steps}, "
                f"{self.batch_size} and {self.test_rows}."
            )
        if self.model.vocab_size < self.size.vocab_size:
            raise ValueError(
                f"the model must know all tokens of the task; got model.vocab_size={self.model.vocab_size} and "
                f"size.vocab_size={self.size.vocab_size}."
            )


def diagnose(
    task: str, diagnosis: Diagnosis, device: torch.device, *, report: Report = quiet
) -> Results:  # fmt: skip
    """Train on fresh rows every step, then give accuracy on other ones by distance in chunks.

    Raises:
        ValueError: an unknown task, or sizes that do not fit it.
    """
    check_task(task)
    torch.manual_seed(diagnosis.seed)
    model = Gecko(diagnosis.model).to(device)
    losses = _train(task, model, diagnosis, report)
    settings = {
        "task": task, "size": as_settings(diagnosis.size), "steps": diagnosis.steps,
        "batch_size": diagnosis.batch_size, "learning_rate": diagnosis.learning_rate,
        "weight_decay": diagnosis.weight_decay, "warmup": diagnosis.warmup,
        "guessing": guessing(task, diagnosis.size), "config": diagnosis.model.to_dict(),
    }  # fmt: skip
    scores = evaluate_task(task, model, diagnosis.size, diagnosis.test_rows, diagnosis.seed)
    notes = [f"guessing gives {settings['guessing']:.4f}", *_diverged(losses)]
    return Results("diagnose", scores, settings, diagnosis.seed, notes, {"training_losses": losses})


def evaluate_task(task: str, model: Gecko, size: TaskSize, rows: int, seed: int) -> list[Score]:
    """Accuracy of any model over the task's tokens, in all and by distance in chunks."""
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
        # A run's seeds are far apart, so that no two runs see the same rows.
        batch = _batch(task, diagnosis.size, diagnosis.batch_size, diagnosis.seed * 2**33 + step)
        loss = model.loss(batch.tokens.to(device), batch.targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if (step + 1) % every == 0:
            value = loss.item()
            # JSON has no number for others, and how a run diverged is a result too.
            losses.append({"step": step + 1, "loss": value if math.isfinite(value) else None})
            report(f"step {step + 1}: loss {value:.4f}")
    return losses


def _diverged(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note of the first loss that is not finite."""
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
