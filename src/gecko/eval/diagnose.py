"""``gecko eval diagnose``: train a small model on a synthetic task from scratch, and test it by distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch

from gecko.config import GeckoConfig
from gecko.eval.results import Report, Results, Score, check_task, quiet, share_by_row
from gecko.eval.synthetic import TASKS, SyntheticBatch, TaskSize, generator_of, guessing, hits_by_distance
from gecko.inference.prefill import inference
from gecko.models import LanguageModel, LlamaConfig, ModelConfig, build_model, parse_config
from gecko.records import Count, CountFromZero, Fraction, NotNegative, Parsed, Positive, check

SMALL: dict[str, ModelConfig] = {
    "gecko": GeckoConfig(
        vocab_size=256, num_layers=2, model_dim=64, key_dim=32, value_dim=128, num_heads=1, ffn_dim=128, chunk_size=32,
        timestep_groups=4,
    ),
    "llama": LlamaConfig(vocab_size=256, num_layers=2, model_dim=64, num_heads=1, ffn_dim=168),
}  # fmt: skip
"""The model of a diagnosis by architecture, before overrides."""
PIECE = 32
"""Tokens of a piece by which distances are reported for a model without chunks."""


@dataclass(frozen=True)
class Diagnosis:
    """Settings of a diagnosis: the task's size, the model and its training."""

    size: TaskSize = field(default_factory=TaskSize)
    model: Annotated[ModelConfig, Parsed(parse_config)] = SMALL["gecko"]
    steps: CountFromZero = 400
    batch_size: Count = 32
    learning_rate: Positive = 3e-3
    weight_decay: NotNegative = 0.1
    warmup: Fraction = 0.1
    """Fraction of the steps with rising learning rate, after which it decays to 0 along a cosine."""
    growth: Fraction = 0.0
    """Fraction of the steps, at the start, with smaller tasks: a quarter of the length and of the items, then half."""
    test_rows: Count = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        if self.model.vocab_size < self.size.vocab_size:
            raise ValueError(
                f"the model must know all tokens of the task; got model.vocab_size={self.model.vocab_size} and "
                f"size.vocab_size={self.size.vocab_size}."
            )

    def size_at(self, step: int) -> TaskSize:
        """Return the size of the task in a step of training."""
        share = 4 if step < self.growth * self.steps / 2 else 2 if step < self.growth * self.steps else 1
        return replace(self.size, length=self.size.length // share, items=max(1, self.size.items // share))


def diagnose(task: str, diagnosis: Diagnosis, device: torch.device, *, report: Report = quiet) -> Results:
    """Train a model on new rows in every step, and measure its accuracy on other rows by distance in chunks.

    Raises:
        ValueError: the task is unknown, or the size does not fit it.
    """
    check_task(task, TASKS)
    torch.manual_seed(diagnosis.seed)
    model = build_model(diagnosis.model).to(device)
    losses = _train(task, model, diagnosis, report)
    names = ("steps", "batch_size", "learning_rate", "weight_decay", "warmup", "growth")
    settings = {
        "task": task, "size": dict(vars(diagnosis.size)), **{name: getattr(diagnosis, name) for name in names},
        "guessing": guessing(task, diagnosis.size), "config": diagnosis.model.to_dict(),
    }  # fmt: skip
    scores = evaluate_task(task, model, diagnosis.size, diagnosis.test_rows, diagnosis.seed)
    notes = [f"guessing gives {settings['guessing']:.4f}"]
    if first := next((point["step"] for point in losses if point["loss"] is None), None):
        notes.append(f"training diverged: the loss is not finite at step {first}; try a smaller learning_rate")
    return Results("diagnose", scores, settings, diagnosis.seed, notes, {"training_losses": losses})


def evaluate_task(task: str, model: LanguageModel, size: TaskSize, rows: int, seed: int) -> list[Score]:
    """Return the accuracy of a model on a task, over all answers and by distance in chunks."""
    chunk, device = model.config.chunk_size or PIECE, next(model.parameters()).device
    whole, found = list[list[bool]](), dict[int, list[list[bool]]]()
    for first in range(0, rows, 32):
        batch = TASKS[task](size, min(32, rows - first), generator_of("test", seed, first))
        with inference(model):
            output = model(batch.tokens.to(device))
        predicted = (output[0] if isinstance(output, tuple) else output).argmax(-1).cpu()
        for row in range(len(predicted)):
            of_row = (x[row, None] for x in (batch.tokens, batch.targets, batch.sources))
            hits = hits_by_distance(SyntheticBatch(*of_row), predicted[row, None], chunk)
            whole.append([hit for every in hits.values() for hit in every])
            for distance, every in hits.items():
                found.setdefault(distance, []).append(every)
    scores: list[Score] = []
    places: list[tuple[int | str, list[list[bool]]]] = [("any", whole), *sorted(found.items())]
    for place, answers in places:
        value, interval = share_by_row(answers)
        where = {"chunks before the question": place}
        scores.append(Score("accuracy", value, sum(map(len, answers)), "answers", interval, where))
    return scores


def _train(task: str, model: LanguageModel, diagnosis: Diagnosis, report: Report) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=diagnosis.learning_rate, betas=(0.9, 0.95), weight_decay=diagnosis.weight_decay
    )
    rise = max(1, round(diagnosis.warmup * diagnosis.steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, diagnosis.steps - rise)))

    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    device, every, losses = next(model.parameters()).device, max(1, diagnosis.steps // 20), []
    for step in range(diagnosis.steps):
        generator = generator_of("train", diagnosis.seed, step)
        batch = TASKS[task](diagnosis.size_at(step), diagnosis.batch_size, generator)
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
