"""The numbers of a run: one JSON object a line, each step once, and the same to TensorBoard where it is installed.

To Weights & Biases too where a run names a project.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from gecko.extras import require
from gecko.files import whole_file

METRICS = "metrics.jsonl"
Kind = Literal["train", "validation"]
Record = dict[str, Any]


class MetricsWriter:
    """Appends records to ``metrics.jsonl``.

    Resumed at ``step``, it first drops what later steps had written; a new run, with ``step`` None, starts
    a new file. So the curve of an interrupted run has every step once. Non-finite numbers are written as null.
    """

    def __init__(
        self, folder: Path, step: int | None, wandb: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        truncate_metrics(path, -1 if step is None else step)
        self._file = path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", 0 if step is None else step + 1)
        self._wandb = None if wandb is None else _weights_and_biases(folder, wandb, settings)

    def write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """One record. ``step`` counts finished optimizer steps."""
        record = {"kind": kind, "step": step, **{name: _finite(value) for name, value in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        scalars = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars})

    def flush(self) -> None:
        """Until the disk has all records: a checkpoint must not outlive those of the steps before it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """All records, in order. A last line cut short by a killed process is left out."""
    records: list[Record] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, must be a JSON object; {error}.") from error
    return records


def seconds_by_step(records: Iterable[Record], tokens_per_step: int) -> dict[int, float]:
    """Spent in training steps by the end of each, without evaluations and checkpoints; 0 at step 0."""
    clock, seconds = {0: 0.0}, 0.0
    for record in records:
        if record["kind"] == "train" and record.get("tokens_per_second"):
            seconds += tokens_per_step / record["tokens_per_second"]
            clock[int(record["step"])] = seconds
    return clock


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the records after ``step``."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    with whole_file(path) as replacement:
        replacement.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _tensorboard(folder: Path, first_step: int) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def _weights_and_biases(folder: Path, project: str, settings: Mapping[str, Any] | None) -> Any:
    """The run of this folder there: the same one when it is resumed. Charts are over ``step``."""
    wandb = require("wandb", "wandb")
    name = folder / "wandb-id"
    if not name.exists():
        with whole_file(name) as temporary:
            temporary.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = wandb.init(
        project=project, name=folder.name, dir=str(folder), id=name.read_text(encoding="utf-8"), resume="allow",
        config=dict(settings or {}),
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    return run
