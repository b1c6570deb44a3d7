"""1.3 B parameters on Dolma, 2 T tokens, as in the paper: 64 GPUs. Set ``data.source`` to its token shards."""

from __future__ import annotations

from gecko.config import GeckoConfig
from gecko.train import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Run,
    ScheduleSettings,
)

STEPS = 953_674
"""2 T tokens at 2,097,152 a step, which is OLMo-1B's batch: its step 966,000 has seen 2,025 B tokens."""


def gecko_1b() -> Run:
    return Run(
        model=GeckoConfig.preset("gecko-1b"),
        output="runs/gecko_1b",
        data=DataSettings(source="shards/dolma", tokenizer="allenai/OLMo-1B-0724-hf", validation_fraction=1e-5),
        batch_size=64,
        sequence_length=32_768,
        steps=STEPS,
        optimizer=OptimizerSettings(learning_rate=4e-4, weight_decay=0.05),
        schedule=ScheduleSettings(kind="cosine", warmup=2000 / STEPS, final=0.1),
        precision="bfloat16",
        activation_checkpointing="full",
        compile=True,
        parallel=ParallelSettings(replicate=8, shard=8),
        evaluation=EvaluationSettings(every=1000, rows=128, final_rows=1024),
        checkpoint=CheckpointSettings(every=1000, keep=3, keep_every=50_000),
    )
