"""The demo: about a million parameters that learn Python's standard library in minutes, on two CPU cores."""

from __future__ import annotations

from gecko.config import GeckoConfig
from gecko.train import CheckpointSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings, ScheduleSettings


def tiny() -> Run:
    return Run(
        model=GeckoConfig.preset("tiny"),
        output="runs/tiny",
        batch_size=4,
        sequence_length=1024,
        minutes=6.0,
        precision="auto",
        optimizer=OptimizerSettings(learning_rate=8e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.03),
        evaluation=EvaluationSettings(every=100),
        checkpoint=CheckpointSettings(every=200),
        sample=SampleSettings(prompt="def ", tokens=800),
    )
