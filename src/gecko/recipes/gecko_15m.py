"""15 M parameters on bytes: an overnight run on a desktop's CPU, minutes on a GPU."""

from __future__ import annotations

from gecko.config import GeckoConfig
from gecko.train import CheckpointSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings, ScheduleSettings


def gecko_15m() -> Run:
    return Run(
        model=GeckoConfig.preset("gecko-15m"),
        output="runs/gecko_15m",
        batch_size=16,
        sequence_length=4096,
        accumulation=4,
        steps=5000,
        optimizer=OptimizerSettings(learning_rate=2e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.02, final=0.1),
        evaluation=EvaluationSettings(every=250),
        checkpoint=CheckpointSettings(every=500),
        sample=SampleSettings(prompt="def ", tokens=1000),
    )
