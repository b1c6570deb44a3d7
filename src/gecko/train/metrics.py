"""Records of a run: ``metrics.jsonl``, its copies in TensorBoard and Weights & Biases, and ``sessions.jsonl``.

``metrics.jsonl`` has one JSON object per line, and each step once; ``sessions.jsonl`` a line for each time the run was
started or resumed. Every checkpoint holds a ``DataRecord``, so that a run can be resumed without its sessions.
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gecko.data.packing import ROW_LAYOUT
from gecko.io.files import Fields, Record, as_lines, parse_object, read_lines, whole_file, write_text
from gecko.records import build
from gecko.runtime.process import code_version, require
from gecko.train.run import RECIPE

METRICS = "metrics.jsonl"
FIELDS: Fields = {
    "kind": ("a text", lambda x: isinstance(x, str)),
    "step": ("a whole number from 0 on", lambda x: type(x) is int and x >= 0),
    "loss": ("a number or null", lambda x: x is None or type(x) in (int, float)),
}
"""Fields of every line of ``metrics.jsonl``."""
Kind = Literal["train", "validation"]


class MetricsWriter:
    """Appends records to ``metrics.jsonl``, TensorBoard and Weights & Biases.

    If the run resumes at ``step``, records of later steps are removed first, so that each step occurs once, and a
    warning tells which steps have none. If ``step`` is None, a new file is started. Non-finite numbers become null.
    """

    def __init__(
        self, folder: Path, step: int | None, wandb: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = path = folder / METRICS
        if path.exists():
            kept = [record for record in read_metrics(path) if step is not None and record["step"] <= step]
            found = {record["step"] for record in kept if record["kind"] == "train"}
            if missing := sorted(set(range(1, (step or 0) + 1)) - found):
                warnings.warn(
                    f"{path} has no numbers of {len(missing)} of the {step} steps so far, {missing[0]} to "
                    f"{missing[-1]}: its curve has a hole there",
                    stacklevel=2,
                )
            write_text(path, as_lines(kept))
        # Unbuffered: if a write fails, closing the file must not write the same bytes again.
        self._file = path.open("a+b", buffering=0)
        self._board = Board(folder / "tensorboard", 0 if step is None else step + 1)
        self._wandb = None if wandb is None else _weights_and_biases(folder, wandb, settings)

    def write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Write one record after ``step`` finished steps. Raise OSError that says what to do if that fails."""
        record = {"kind": kind, "step": step, **{name: finite(value) for name, value in values.items()}}
        scalars = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._keep()
        with self._explained(f"the numbers of step {step}"):
            line = (json.dumps(record, allow_nan=False) + "\n").encode()
            while line:
                line = line[self._file.write(line) :]
        self._board.add(scalars, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars})

    def flush(self) -> None:
        """Flush all records to disk. Call it before a save: no checkpoint may exist without the records before it."""
        self._keep()
        with self._explained("the numbers of the last steps"):
            os.fsync(self._file.fileno())

    def _keep(self) -> None:
        """Go on in the file that has replaced ``metrics.jsonl``; if that was deleted, write it again. Raise OSError if
        the folder of the run is gone: a checkpoint would begin a second one."""
        if self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
            return
        if not self._path.exists():
            if not (self._path.parent / RECIPE).exists():
                raise OSError(
                    f"the folder of a run must stay where it is while the run trains; {self._path.parent} was moved or "
                    "deleted. The steps since the last checkpoint are lost. Move it back, and continue with --resume."
                )
            self._file.seek(0)
            with whole_file(self._path) as temporary:
                temporary.write_bytes(self._file.read())
            warnings.warn(f"{self._path} was deleted while the run trains; it is written again", stacklevel=2)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{what} could not be written to {self._path}: {error.strerror or error}. The last checkpoint is "
                "intact. Free some space and continue with --resume."
            ) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[Record]:
    """Return all records in order, without a torn last line; ValueError that names another damaged line."""
    return read_lines(path, FIELDS)


def seconds_by_step(records: Iterable[Record], tokens_before: Callable[[int], int]) -> dict[int, float]:
    """Return the seconds spent in training steps up to each step, without evaluations and checkpoints; 0 at step 0."""
    clock, seconds = {0: 0.0}, 0.0
    for record in records:
        if record["kind"] == "train" and record.get("tokens_per_second"):
            step = int(record["step"])
            seconds += (tokens_before(step) - tokens_before(step - 1)) / record["tokens_per_second"]
            clock[step] = seconds
    return clock


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [finite(item) for item in value] if isinstance(value, list) else value


def _weights_and_biases(folder: Path, project: str, settings: Mapping[str, Any] | None) -> Any:
    """Start or continue the run of this folder. Its charts are over ``step``."""
    wandb = require("wandb", "wandb")
    name = folder / "wandb-id"
    if not name.exists():
        write_text(name, uuid.uuid4().hex)
    run = wandb.init(
        project=project, name=folder.name, dir=str(folder), id=name.read_text(encoding="utf-8"), resume="allow",
        config=dict(settings or {}),
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    return run


class Board:
    """Writes scalars by step for TensorBoard; does nothing if TensorBoard is not installed.

    If the file cannot be written, it warns once and writes no more in this session; ``metrics.jsonl`` has all numbers.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._step, self._hook = folder, first_step, threading.excepthook
        self._writer: Any = None
        with suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            # An error of TensorBoard's thread is raised again by the next call, so its traceback is not printed.
            threading.excepthook = self._without_traceback
            with self._guarded():
                self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        self._step = step
        with self._guarded():
            for name, value in scalars.items() if self._writer is not None else ():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._guarded():
            if self._writer is not None:
                self._writer.close()
        threading.excepthook = self._hook

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            warnings.warn(
                f"{self._folder} could not be written at step {self._step} ({error.strerror or error}): TensorBoard "
                "gets no more numbers in this session; metrics.jsonl has them",
                stacklevel=2,
            )

    def _without_traceback(self, failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread" or not isinstance(failure.exc_value, OSError):
            self._hook(failure)


SESSIONS, DATA = "sessions.jsonl", "data.json"


@dataclass(frozen=True)
class DataRecord:
    """Identification of the training data, saved in each checkpoint."""

    digest: str
    """Hash of the token ids of all documents."""
    row_layout: int
    """Version of the rule by which documents become rows; see ``gecko.data.packing.ROW_LAYOUT``."""
    started: str | None = None
    """ISO 8601 time of the start of a run on chats, which chat templates may write."""

    def save(self, folder: Path) -> None:
        (folder / DATA).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, checkpoint: Path) -> DataRecord | None:
        """Return the record of a checkpoint; None if an early version of Gecko wrote the checkpoint without one."""
        path = checkpoint / DATA
        what = "the digest and the row layout of the training data"
        return parse_object(path, what, partial(build, cls)) if path.is_file() else None


def row_layout(checkpoint: Path | None) -> int:
    """Return the row layout of the run of ``checkpoint``, 1 without a ``DataRecord``; that of new runs if it is None.
    ValueError: this version does not know it."""
    if checkpoint is None:
        return ROW_LAYOUT
    record = DataRecord.load(checkpoint)
    layout = 1 if record is None else record.row_layout
    if not 1 <= layout <= ROW_LAYOUT:
        raise ValueError(
            f"{checkpoint} must have a row layout from 1 to {ROW_LAYOUT}; got {layout}. A newer version of Gecko wrote "
            "it: install that version to continue the run."
        )
    return layout


def run_start(checkpoint: Path | None) -> datetime:
    """Return when the run of ``checkpoint`` was started; now for a new run, and where it is not known."""
    record = None if checkpoint is None else DataRecord.load(checkpoint)
    return datetime.now() if record is None or record.started is None else datetime.fromisoformat(record.started)


def record_session(folder: Path, step: int | None, parameters: int, hardware: Mapping[str, str], data: str) -> None:
    """Add a line for this session to ``sessions.jsonl``: it resumes after ``step`` (None: the run starts, and with it a
    new file) on the training data with the digest ``data``."""
    line = {"step": step or 0, **code_version(), "parameters": parameters, "hardware": dict(hardware), "data": data}
    write_text(folder / SESSIONS, as_lines([*([] if step is None else read_sessions(folder)), line]))


def check_same_data(folder: Path, checkpoint: Path, data: str, console: Console) -> None:
    """Raise ValueError if the run was trained on data with a digest other than ``data``.

    The digest is in the checkpoint or, for earlier versions, in the run's sessions; print if neither has it. Row i is a
    function of all documents: with others the run would read some twice, and train on held-out ones.
    """
    record = DataRecord.load(checkpoint)
    sessions = read_sessions(folder) if record is None else []
    known = {session["data"] for session in sessions if "data" in session} if record is None else {record.digest}
    if known - {data}:
        raise ValueError(
            f"the texts and the tokenizer must be those that the run in {folder} was begun with; the names are the "
            "same, but what they hold has changed since. Put back what was there, or start a new run with another "
            "output=; its init_from= takes this one's weights."
        )
    if not known:
        console.print(
            f"cannot check that the texts are those that the run started with: neither {checkpoint} nor "
            f"{folder / SESSIONS} has their digest"
        )


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Return all lines in order; none if an early version of Gecko wrote the run."""
    return read_lines(folder / SESSIONS)
