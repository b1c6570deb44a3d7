"""Where documents begin in a call, and where the call stands in the stream.

Computed once per call on the host and handed to every layer. Documents are contiguous, so one
number per token says it all: the position at which its document started. A key is of the same
document as a later query exactly when it does not lie before that position.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gecko.handoff import Handoff
from gecko.records import TensorRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Clock(TensorRecord):
    """Where each row of a stream stands; int64 tensors of shape (batch,), always on the CPU.

    Kept on the host so that a call can be laid out without waiting for a device.
    """

    position: Tensor
    """Tokens read so far."""
    document_start: Tensor
    """Position of the first token of the document being read."""
    segment_id: Tensor
    """The caller's id of that document."""

    @classmethod
    def start(cls, batch: int) -> Clock:
        zeros = torch.zeros(batch, dtype=torch.int64)
        return cls(zeros, zeros, zeros)


class Run(NamedTuple):
    """The tokens of one document in one row of a call."""

    row: int
    begin: int
    length: int
    continues: bool
    """Whether the document began in an earlier call, so that its state carries on."""


@dataclass(frozen=True)
class Segments:
    """Documents of one call of shape (batch, length)."""

    batch: int
    length: int
    clock: Clock
    """Before the call's first token."""
    starts: np.ndarray | None
    """(batch, length) bool, true at the first token of a document; None: every row continues."""
    last_id: Tensor
    device: torch.device
    handoff: Handoff | None = None
    """The exchange with the ranks that hold the earlier tokens of the same rows, where there are such."""
    next_begins: Tensor | None = None
    """(batch,) bool: a document starts at the token after the call's last one; known where another rank holds it."""
    overwrites: bool = False
    """Whether the state before the call is given up: the state after it may be written into its tensors."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        batch: int,
        length: int,
        *,
        segment_ids: Tensor | None = None,
        clock: Clock | None = None,
        device: torch.device | str = "cpu",
        overwrites: bool = False,
    ) -> Segments:
        """Find the document starts: wherever ``segment_ids`` (batch, length) changes along a row.

        Without ids the call continues the document that the clock is in. A stream that has read
        nothing yet starts a document at its first token whatever its id.
        """
        device = torch.device(device)
        fresh = clock is None
        clock = clock or Clock.start(batch)
        if segment_ids is None:
            return cls(batch, length, clock, None, clock.segment_id, device, overwrites=overwrites)
        if segment_ids.shape != (batch, length) or segment_ids.is_floating_point():
            raise ValueError(
                f"segment_ids must be integers of the tokens' shape {(batch, length)}; "
                f"got {segment_ids.dtype} of shape {tuple(segment_ids.shape)}."
            )
        ids = segment_ids.detach().to("cpu", torch.int64)
        before = ids[:, :1] if fresh else clock.segment_id[:, None]
        changed = torch.cat([before, ids[:, :-1]], dim=1) != ids
        starts = changed.numpy() if bool(changed.any()) else None
        return cls(batch, length, clock, starts, ids[:, -1].clone(), device, overwrites=overwrites)

    @cached_property
    def document_starts(self) -> Tensor:
        """(batch, length) int64 on the CPU: position of the first token of each token's document."""
        carried = self.clock.document_start[:, None].expand(self.batch, self.length)
        if self.starts is None:
            return carried
        positions = self.clock.position[:, None] + torch.arange(self.length)
        begun = torch.where(torch.from_numpy(self.starts), positions, torch.tensor(-1)).cummax(dim=1).values
        return torch.where(begun >= 0, begun, carried)

    @cached_property
    def end(self) -> Clock:
        """The clock after the call's last token."""
        return Clock(self.clock.position + self.length, self.document_starts[:, -1].clone(), self.last_id)

    @cached_property
    def steps_in_document(self) -> Tensor:
        """(batch, length) int64: how many tokens of its document the call holds up to each token,
        this one included, and whether it began before the call is for the state to know."""
        if self.starts is None:
            return torch.arange(1, self.length + 1, device=self.device).expand(self.batch, -1)
        begin = np.where(self.starts, np.arange(self.length), 0)
        steps = np.arange(1, self.length + 1) - np.maximum.accumulate(begin, axis=1)
        return torch.from_numpy(steps).to(self.device)

    @cached_property
    def continues(self) -> Tensor:
        """(batch, length) bool: the token's document began before this call."""
        if self.starts is None:
            return torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)
        return torch.from_numpy(~np.maximum.accumulate(self.starts, axis=1)).to(self.device)

    @cached_property
    def start_flags(self) -> Tensor | None:
        """``starts`` as uint8 on the device."""
        return None if self.starts is None else torch.from_numpy(self.starts.astype(np.uint8)).to(self.device)

    @property
    def runs(self) -> list[Run]:
        """The documents of the call, row by row, in order."""
        if self.starts is None:
            return [Run(row, 0, self.length, True) for row in range(self.batch)]
        runs = []
        for row, starts in enumerate(self.starts):
            begins = np.flatnonzero(starts).tolist()
            if not begins or begins[0] != 0:
                begins.insert(0, 0)
            ends = [*begins[1:], self.length]
            for begin, end in zip(begins, ends, strict=True):
                runs.append(Run(row, begin, end - begin, not starts[begin]))
        return runs

    def shared(self, key: Hashable, build: Callable[[], T]) -> T:
        """What ``build`` makes, made once for all layers of this call."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def select(self, rows: list[int]) -> Segments:
        """The same call with only some of its rows."""
        index = torch.tensor(rows)
        clock = self.clock.map(lambda x: x[index])
        starts = None if self.starts is None else self.starts[rows]
        return Segments(len(rows), self.length, clock, starts, self.last_id[index], self.device)


class Context(Protocol):
    """Ranks that share the rows of a call, as the model sees them: ``gecko.parallel.context.ContextGroup``."""

    def segments(
        self, batch: int, length: int, chunk_size: int, *,
        segment_ids: Tensor | None, clock: Clock | None, device: torch.device,
    ) -> Segments:  # fmt: skip
        """The documents of this rank's tokens, with a handoff; ``clock`` is that before rank 0's first token."""

    def mean(self, local: Tensor, count: Tensor) -> Tensor:
        """The mean over all ranks' terms, from the mean over this rank's ``count`` of them."""
