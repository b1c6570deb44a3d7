"""125 M parameters on one GPU. Set ``data.source`` and ``data.tokenizer``; the default corpus is far too small."""

from __future__ import annotations

from gecko.config import GeckoConfig
from gecko.train import CheckpointSettings, EvaluationSettings, OptimizerSettings, Run, ScheduleSettings


def gecko_125m() -> Run:
    return Run(
        model=GeckoConfig.preset("gecko-125m"),
        output="runs/gecko_125m",
        batch_size=64,
        sequence_length=8192,
        accumulation=16,
        steps=20_000,
        optimizer=OptimizerSettings(learning_rate=1e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.05, final=0.1),
        precision="bfloat16",
        activation_checkpointing="full",
        evaluation=EvaluationSettings(every=500, final_rows=256),
        checkpoint=CheckpointSettings(every=1000, keep=3),
    )
