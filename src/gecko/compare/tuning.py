"""The learning rate of each recipe, from short runs with several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gecko.compare.folder import evaluation_of
from gecko.compare.plan import Plan, Planned, rate_name
from gecko.compare.pool import State


@dataclass(frozen=True)
class Trial:
    """One short run."""

    recipe: str
    learning_rate: float
    state: State
    nats_per_byte: float | None
    """Held-out loss; None where the run has none, or none that is finite."""
    tokens: int
    """Held-out targets that it is of."""


def trials_of(planned: Sequence[Planned], states: Mapping[str, State]) -> list[Trial]:
    return [_trial(one, states[one.label]) for one in planned]


def tuned_rates(plan: Plan, trials: Sequence[Trial]) -> dict[str, float]:
    """The rate with the lowest held-out loss, of recipes whose short runs have all ended; divergence is the worst.

    Without tuning, each recipe's own.
    """
    if plan.tuning is None:
        return {name: run.optimizer.learning_rate for name, run in plan.recipes.items()}
    rates = {}
    for recipe in plan.recipes:
        tried = [trial for trial in trials if trial.recipe == recipe]
        finite = [trial for trial in tried if trial.nats_per_byte is not None]
        if finite and all(trial.state in ("finished", "diverged") for trial in tried):
            rates[recipe] = min(finite, key=lambda trial: trial.nats_per_byte or math.inf).learning_rate
    return rates


def edge_notes(plan: Plan, rates: Mapping[str, float]) -> list[str]:
    """Which of the rates found are the lowest or the highest of those tried: the best may lie beyond."""
    if plan.tuning is None:
        return []
    tried = plan.tuning.learning_rates
    ends = {min(tried): "lowest", max(tried): "highest"}
    return [
        f"{recipe}: the best learning rate, {rate_name(rate)}, is the {ends[rate]} of those tried; a better one may "
        "lie beyond it"
        for recipe, rate in rates.items()
        if rate in ends
    ]


def _trial(one: Planned, state: State) -> Trial:
    evaluation = evaluation_of(one.run)
    if evaluation is None:
        return Trial(one.recipe, one.run.optimizer.learning_rate, state, None, 0)
    loss = evaluation.nats_per_byte if math.isfinite(evaluation.nats_per_byte) else None
    return Trial(one.recipe, one.run.optimizer.learning_rate, state, loss, evaluation.tokens)
