"""Document layout of one call, position of the call in the stream, and the exchange with ranks that share its rows.

``Segments`` is computed once per call on the host and passed to every layer. Documents are contiguous, so one number
per token describes them: the position at which its document started. A key belongs to the same document as a later
query exactly if it does not lie before that position.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gecko.runtime.tensors import TensorRecord, to_device

T = TypeVar("T")
Pending = Callable[[], T]
"""Waits for a value that may still be on its way from other ranks, and returns it. Every rank must call it exactly
once, and use all tensors of the value."""


@dataclass(frozen=True)
class ContextExchange:
    """Exchange of one call among R ranks that hold consecutive, equally long runs of whole chunks; one device has none.

    Each rank sends what later ranks need to know about its tokens, computes its initial state from what it receives,
    and then runs the operators as a single device does from that state. Without the other ranks, the initial state is
    the state of the call on rank 0 and the empty state on the others; rank 0 receives zeros. So every rank runs the
    same operations, and in the backward pass all ranks run the same exchanges in reverse order.
    """

    first: bool
    """Whether this is rank 0."""
    counts: Tensor
    """(R − 1, B) int64: tokens on the rank i + 1 places before this one that belong to the document that is open just
    before this rank's first token. Rank 0 includes the tokens of earlier calls."""
    chunks_reach: Tensor
    """(R − 1, B, 2) bool: whether documents of earlier ranks reach this one. [i, b, j]: the document at the end of the
    second to last (j = 0) or last (j = 1) chunk of row b of the rank i + 1 places before is still open in the second to
    last chunk before this rank's first."""
    send: Callable[[Sequence[Tensor], Sequence[Tensor]], Pending[list[Tensor]]]
    """Sends tensors to the next rank, and others to all later ranks, in one batch. The pending tensors are, in the same
    order, those of the previous rank, and those of all earlier ranks, (R − 1, …), the nearest first."""
    keeping: Callable[[Callable[[], Any]], Callable[[], Any]]
    """Takes what makes the contexts of a checkpointed forward pass and of its recomputation, and returns the same, such
    that the recomputation uses the tensors that arrived in the forward pass."""


@dataclass(frozen=True)
class Clock(TensorRecord):
    """Position of each row in its stream: int64 tensors (batch,), always on the CPU, so that a call can be laid out
    without waiting for a device."""

    position: Tensor
    """Tokens read so far."""
    document_start: Tensor
    """Position of the first token of the document being read."""
    segment_id: Tensor
    """Id of that document, given by the caller."""

    @classmethod
    def start(cls, batch: int) -> Clock:
        """Return the clock of a stream before its first token."""
        zeros = torch.zeros(batch, dtype=torch.int64, device="cpu")
        return cls(zeros, zeros, zeros)


class DocumentSpan(NamedTuple):
    """The tokens of one document in one row of a call."""

    row: int
    begin: int
    length: int
    continues: bool
    """Whether the document started in an earlier call, so that its state is used."""


@dataclass(frozen=True)
class Segments:
    """Documents of one call of shape (batch, length)."""

    batch: int
    length: int
    clock: Clock
    """Clock before the first token of the call."""
    starts: np.ndarray | None
    """(batch, length) bool, true at the first token of a document. None: no document starts in the call."""
    last_id: Tensor
    device: torch.device
    exchange: ContextExchange | None = None
    """Exchange with the ranks that hold earlier tokens of the same rows, if there are any."""
    next_begins: Tensor | None = None
    """(batch,) bool: a document starts at the token after the last one of the call. Known if another rank holds it."""
    ends: Tensor | None = None
    """(batch,) int64 on the CPU: tokens of each row that count; the others are padding. None: all tokens count."""
    at_start: bool = False
    """Whether all rows are known to be at their first token, so that the clock need not be looked at."""
    keeps_state: bool = True
    """Whether the state after the call is used. If not, operators may return any state of the right shapes."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    builders: dict[Hashable, Callable[[Segments], Any]] = field(default_factory=dict, repr=False, compare=False)
    """Functions that ``shared`` has called, by key, in order."""

    @classmethod
    def build(
        cls, batch: int, length: int, *, segment_ids: Tensor | None = None, clock: Clock | None = None,
        device: torch.device | str = "cpu", lengths: Tensor | None = None,
    ) -> Segments:  # fmt: skip
        """Find the document starts: wherever ``segment_ids`` (batch, length) changes along a row.

        Without ids the call continues the document of the clock. The first token of a stream always starts a
        document, whatever its id. Tokens of a row after its entry in ``lengths`` (batch,), which excludes ids and
        gradients, are padding: the state after the call is that after the tokens before them. Raise ValueError if there
        are no tokens, or ids or lengths are not integers of these shapes, or out of range.
        """
        if length < 1:
            raise ValueError(f"a call must have at least one token per row; got {length}. Skip it and keep the state.")
        device, fresh = torch.device(device), clock is None
        clock = clock or Clock.start(batch)
        if segment_ids is None:
            ends = None
            if lengths is not None:
                ends = lengths.detach().to("cpu", torch.int64).contiguous()
                if ends.shape != (batch,) or lengths.is_floating_point() or ends.min() < 1 or ends.max() > length:
                    got = lengths.tolist()
                    raise ValueError(f"lengths must be {batch} integers in 1..{length}, one per row; got {got}.")
                ends = None if bool((ends == length).all()) else ends
                if ends is not None and torch.is_grad_enabled():
                    raise ValueError("padded rows are read without gradients only. Use torch.inference_mode().")
            return cls(batch, length, clock, None, clock.segment_id, device, ends=ends, at_start=fresh)
        if lengths is not None:
            raise ValueError("lengths and segment_ids exclude each other; got both. Pad rows of one document each.")
        if segment_ids.shape != (batch, length) or segment_ids.is_floating_point():
            raise ValueError(
                f"segment_ids must be integers of the tokens' shape {(batch, length)}; "
                f"got {segment_ids.dtype} of shape {tuple(segment_ids.shape)}."
            )
        ids = segment_ids.detach().to("cpu", torch.int64)
        before = ids[:, :1] if fresh else clock.segment_id[:, None]
        changed = (torch.cat([before, ids[:, :-1]], dim=1) != ids).numpy()
        return cls(batch, length, clock, changed if changed.any() else None, ids[:, -1].clone(), device, at_start=fresh)

    @cached_property
    def document_starts(self) -> Tensor:
        """(batch, length) int64 on the CPU: position at which the document of each token started."""
        carried = self.clock.document_start[:, None].expand(self.batch, self.length)
        if self.starts is None:
            return carried
        positions = self.clock.position[:, None] + torch.arange(self.length, device="cpu")
        begun = positions.masked_fill(torch.from_numpy(~self.starts), -1).cummax(dim=1).values
        return torch.where(begun >= 0, begun, carried)

    @cached_property
    def end(self) -> Clock:
        """Clock after the last token of the call."""
        read = self.length if self.ends is None else self.ends
        return Clock(self.clock.position + read, self.document_starts[:, -1].clone(), self.last_id)

    @cached_property
    def steps_in_document(self) -> Tensor:
        """(batch, length) int64: number of tokens of the document in this call, up to and including each token. Tokens
        of earlier calls are counted in the state."""
        if self.starts is None:
            return torch.arange(1, self.length + 1, device=self.device).expand(self.batch, -1)

        def steps(starts: np.ndarray) -> np.ndarray:
            index = np.arange(starts.shape[1])
            return index + 1 - np.maximum.accumulate(np.where(starts, index, 0), axis=1)

        return self._placed("steps in document", steps)

    @cached_property
    def continues(self) -> Tensor:
        """(batch, length) bool: the document of the token started before this call."""
        if self.starts is None:
            return torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)
        return self._placed("continues", lambda starts: ~np.maximum.accumulate(starts, axis=1))

    @cached_property
    def start_flags(self) -> Tensor | None:
        """``starts`` as uint8 on the device."""
        return None if self.starts is None else self._placed("start flags", lambda starts: starts.astype(np.uint8))

    def _placed(self, key: str, build: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        """Return ``build(starts)`` on the device, which is ``shared``."""

        def place(segments: Segments) -> Tensor:
            assert segments.starts is not None, "a document must start in the call"
            return to_device(torch.from_numpy(build(segments.starts)), segments.device)

        return self.shared(key, place)

    @property
    def spans(self) -> list[DocumentSpan]:
        """Documents of the call, row by row, in order."""
        starts = np.zeros((self.batch, self.length), dtype=bool) if self.starts is None else self.starts
        begins = starts.copy()
        begins[:, 0] = True
        first = np.flatnonzero(begins)
        columns = *divmod(first, self.length), np.diff(first, append=starts.size), ~starts.flat[first]
        return [DocumentSpan(*span) for span in zip(*(column.tolist() for column in columns), strict=True)]

    def shared(self, key: Hashable, build: Callable[[Segments], T]) -> T:
        """Return ``build(self)``, which runs once for all layers of this call. It must hold no tensors: a captured step
        runs it again for the documents of other batches."""
        if key not in self._shared:
            self._shared[key] = build(self)
            self.builders[key] = build
        return self._shared[key]

    def once(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the result of ``build``, which runs once for all layers and depends on no documents."""
        if key not in self._shared:
            self._shared[key] = build()
        return self._shared[key]

    def initial(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return an empty state. All layers share it if the state after the call, which may hold it, is not used."""
        return build() if self.keeps_state else self.once(key, build)

    def unread(self) -> Segments:
        """Return this layout with what was built for it and without its documents, which raise RuntimeError if read."""
        starts: Any = None if self.starts is None else _Unread()
        return replace(self, starts=starts, _shared={key: self._shared[key] for key in self.builders}, builders={})

    def select(self, rows: list[int]) -> Segments:
        """Return the layout of the given rows alone."""
        index = torch.tensor(rows, device="cpu")
        clock, starts = self.clock.map(lambda x: x[index]), None if self.starts is None else self.starts[rows]
        ends = None if self.ends is None else self.ends[index]
        return Segments(len(rows), self.length, clock, starts, self.last_id[index], self.device, ends=ends)

    def part(self, begin: int, end: int) -> Segments:
        """Return the layout of tokens ``begin`` to ``end`` − 1 of all rows, which hold no padding."""
        start = self.document_starts[:, begin - 1] if begin else self.clock.document_start
        return replace(
            self, length=end - begin, starts=None if self.starts is None else self.starts[:, begin:end],
            clock=replace(self.clock, position=self.clock.position + begin, document_start=start),
            at_start=self.at_start and begin == 0, _shared={}, builders={},
        )  # fmt: skip

    def unpadded(self) -> Segments:
        """Return this layout without the padding at its end; all rows must have the same length."""
        assert self.ends is not None, "there must be padding"
        return replace(self, length=int(self.ends[0]), ends=None)


class _Unread:
    """In the place of ``Segments.starts``: everything that reads it fails."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("documents are read outside of what Segments.shared builds, which a captured step cannot do")

    __getattr__ = __getitem__ = __array__ = __bool__ = __len__ = __iter__ = __invert__ = _fail


class Context(Protocol):
    """Ranks that share the rows of a call, implemented by ``gecko.parallel.context.ContextGroup``."""

    def segments(
        self, batch: int, length: int, chunk_size: int, *,
        segment_ids: Tensor | None, clock: Clock | None, device: torch.device,
    ) -> Segments:  # fmt: skip
        """Return the layout of this rank's tokens, with an exchange; ``clock`` is that before rank 0's first token."""

    def mean(self, local: Tensor, count: Tensor) -> Tensor:
        """Return the mean over the terms of all ranks, from the mean over this rank's ``count`` terms."""
