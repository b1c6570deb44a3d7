"""7 B parameters, 2 T tokens, 32K context, as in the paper: 256 GPUs. Set ``data.source`` and ``data.tokenizer``."""

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

STEPS = 476_837
"""2 T tokens at 4,194,304 a step."""


def gecko_7b() -> Run:
    return Run(
        model=GeckoConfig.preset("gecko-7b"),
        output="runs/gecko_7b",
        # Llama 2's tokenizer has its own licence: get the file from its makers.
        data=DataSettings(
            source="shards/pretraining", tokenizer="tokenizers/llama2/tokenizer.model", validation_fraction=1e-5
        ),
        batch_size=128,
        sequence_length=32_768,
        steps=STEPS,
        optimizer=OptimizerSettings(learning_rate=3.5e-4),
        schedule=ScheduleSettings(kind="cosine", warmup=2500 / STEPS, final=0.1),
        precision="bfloat16",
        activation_checkpointing="full",
        compile=True,
        # Data parallel 128 (32 × 4) × context 2; the 8 GPUs of a node share one copy of the parameters.
        parallel=ParallelSettings(replicate=32, shard=4, context=2),
        evaluation=EvaluationSettings(every=1000, rows=128, final_rows=1024),
        checkpoint=CheckpointSettings(every=500, keep=3, keep_every=25_000),
    )
