"""Training: a ``Run`` holds all settings, ``train`` runs it on one device or as one of several ranks.

The functions that run are imported on first use: settings and plans need neither checkpoints nor reports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gecko.train.run import Run
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

if TYPE_CHECKING:
    from gecko.train.checkpoints import latest_checkpoint
    from gecko.train.data import replayed
    from gecko.train.health import NonFiniteError
    from gecko.train.session import TrainResult, train
else:
    _MODULES = {
        "NonFiniteError": "health", "TrainResult": "session", "latest_checkpoint": "checkpoints", "replayed": "data",
        "train": "session",
    }  # fmt: skip

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


__all__ = [
    "CheckpointSettings", "DataSettings", "EvaluationSettings", "NonFiniteError", "OptimizerSettings",
    "ParallelSettings", "Run", "SampleSettings", "ScheduleSettings", "SkipSettings", "TrainResult",
    "latest_checkpoint", "replayed", "train",
]  # fmt: skip
