"""Training: a ``Run`` holds all settings, ``train`` runs it on one device or as one of several ranks."""

from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.data import replayed
from gecko.train.health import NonFiniteError
from gecko.train.run import Run
from gecko.train.session import TrainResult, train
from gecko.train.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    SampleSettings,
    ScheduleSettings,
    SkipSettings,
)

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
