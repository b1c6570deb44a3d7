"""Training: a ``Run`` holds all settings, ``train`` runs it on one device or as one of several ranks."""

from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.data import replayed
from gecko.train.health import NonFiniteError
from gecko.train.optimizers.settings import OptimizerSettings, ScheduleSettings
from gecko.train.run import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ParallelSettings,
    Run,
    SampleSettings,
    SkipSettings,
)
from gecko.train.session import TrainResult, train

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "NonFiniteError",
    "OptimizerSettings",
    "ParallelSettings",
    "Run",
    "SampleSettings",
    "ScheduleSettings",
    "SkipSettings",
    "TrainResult",
    "latest_checkpoint",
    "replayed",
    "train",
]
