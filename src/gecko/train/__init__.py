"""Training: a :class:`Run` holds all settings, :func:`train` runs it on one device or as one of several ranks."""

from gecko.train.checkpoint import latest_checkpoint
from gecko.train.data import replayed
from gecko.train.health import NonFiniteError
from gecko.train.run import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    Run,
    SampleSettings,
    ScheduleSettings,
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
