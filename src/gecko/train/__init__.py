"""Training: a :class:`Run` says everything, :func:`train` does it, on one device or as one of many ranks."""

from gecko.train.checkpoint import latest_checkpoint
from gecko.train.nonfinite import NonFiniteError
from gecko.train.replay import replayed
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
