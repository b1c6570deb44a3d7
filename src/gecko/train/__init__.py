"""Training on one device: a :class:`Run` says everything, :func:`train` does it."""

from gecko.train.checkpoint import latest_checkpoint
from gecko.train.nonfinite import NonFiniteError
from gecko.train.run import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    OptimizerSettings,
    Run,
    SampleSettings,
    ScheduleSettings,
)
from gecko.train.session import TrainResult, train

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "NonFiniteError",
    "OptimizerSettings",
    "Run",
    "SampleSettings",
    "ScheduleSettings",
    "TrainResult",
    "latest_checkpoint",
    "train",
]
