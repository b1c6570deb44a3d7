"""Helpers of tests of whole runs: compare results, and stop a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gecko.io.checkpoints import checkpoint_step, list_checkpoints
from gecko.train import Run, TrainResult, train
from gecko.train.finish import REPORT
from gecko.train.metrics import METRICS, read_metrics
from gecko.train.step import SpikeRule, Verdict
from gecko.train.trainer import Trainer

_TIMES = ("seconds", "tokens_per_second", "mfu", "memory_gib", "data_seconds")


def plain_report(run: Run, *facts: Any) -> Path:
    """Write a report without pictures, which take as long as a run of twelve steps."""
    path = run.folder / REPORT
    path.write_text(repr(facts), encoding="utf-8")
    return path


def curve(run: Run) -> list[dict[str, Any]]:
    records = read_metrics(run.folder / METRICS)
    return [{name: value for name, value in record.items() if name not in _TIMES} for record in records]


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the training steps of a run."""
    return [record for record in read_metrics(folder / METRICS) if record["kind"] == "train"]


def saved_steps(run: Run) -> list[int]:
    """Return the steps of a run's checkpoints, the oldest first."""
    return sorted(map(checkpoint_step, list_checkpoints(run.checkpoints_folder)))


def losses(run: Run) -> np.ndarray:
    """Return steps and losses of all records, after a check that every step was recorded once."""
    records = read_metrics(run.folder / METRICS)
    assert [record["step"] for record in steps_in(run.folder)] == list(range(1, len(records) + 1))[: run.steps]
    return np.array([(record["step"], record["loss"]) for record in records])


def same_end(one: TrainResult, other: TrainResult) -> bool:
    """Return whether weights, optimizer states and carried states are bitwise equal."""
    carried = ["lanes.safetensors"] if one.run.data.carry_state else []
    for name in ("model.safetensors", "optimizer.safetensors", *carried):
        left, right = load_file(one.checkpoint / name), load_file(other.checkpoint / name)
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


def everything(folder: Path, but: str = "") -> dict[Path, bytes]:
    """Return the content of every file of a folder, except files directly in folders named ``but``."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != but}


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
    """Call ``stop`` inside the given step of the next run, once."""
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        if self.next_step == step:
            monkeypatch.setattr(Trainer, "_step", original)
            stop()
        original(self)

    monkeypatch.setattr(Trainer, "_step", stepping)


def killed(step: int, run: Run, **options: Any) -> None:
    """Train the run until it ends inside the given step as a kill would end it, without a save."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(step, patch, die)
        train(run, **options)


def skip(steps: set[int], monkeypatch: pytest.MonkeyPatch, cause: str = "a spike") -> None:
    """Make the given steps count as spikes."""
    start, now = Trainer._start, [0]

    def starting(self: Trainer, number: int) -> Any:
        now[0] = number
        return start(self, number)

    def verdict(*_: Any) -> torch.Tensor:
        return torch.tensor(Verdict.LOSS_SPIKE if now[0] in steps else Verdict.TAKEN)

    monkeypatch.setattr(Trainer, "_start", starting)
    monkeypatch.setattr(SpikeRule, "_verdict", verdict)
    monkeypatch.setattr(SpikeRule, "_explain", lambda *_: cause)


def die() -> None:
    """Raise KeyboardInterrupt. For ``stop_after``: it ends the run as a kill would, without a save."""
    raise KeyboardInterrupt
