"""The learning rate of a step, as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from gecko.train.settings import ScheduleSettings


def learning_rate_factor(schedule: ScheduleSettings, step: int, steps: int) -> float:
    """What the peak rate is multiplied with in step ``step`` of ``0 .. steps - 1``; in ``[final, 1]`` after warm-up.

    Warm-up climbs in a straight line from ``1 / warmup_steps`` to 1. Then with p from 0 towards 1 over
    the decaying part: ``cosine`` is ``final + (1 - final) (1 + cos πp) / 2``, ``wsd`` stays at 1
    and ends with ``1 - (1 - final) p``.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step must lie in 0..{steps - 1}; got {step}.")
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "cosine":
        progress = (step - warmup) / (steps - warmup)
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    decay = round(schedule.decay * steps)
    progress = max(0, step - (steps - decay)) / max(1, decay)
    return 1 - (1 - schedule.final) * progress
