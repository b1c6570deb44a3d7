"""Context parallelism: ranks hold consecutive parts of the same rows, whole attention chunks, as many each.

    group = ContextGroup(mesh["context"].get_group())
    columns = group.slice(sequence_length, config.chunk_size)
    loss = model.loss(tokens[:, columns], targets[:, columns], segment_ids[:, columns], context=group)
    loss.backward()    # gradients of the parameters: to be summed over the group

The loss is the mean over all ranks' targets, the same number on each; its gradient on one rank is what that
rank's tokens contribute, so the sum over the group is that of one device. An average over the group (FSDP's
default) must be multiplied by the group's size. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.handoff import Arriving
from gecko.parallel.exchange import Line, Transfer
from gecko.parallel.layout import (
    Part,
    call_header,
    check_headers,
    document_record,
    no_documents,
    parts_of_call,
    reaching_chunks,
    reaching_counts,
)
from gecko.segments import Clock, Segments
from gecko.state import GeckoState


class ContextGroup:
    """The ranks that share rows, in the order of their parts."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.line = Line(process_group)
        types = {device.type for device in process_group._device_types}
        # Layouts are made on the host; a group without a host backend carries them over the device's.
        self._host = torch.device("cpu") if "cpu" in types else torch.device(next(iter(types)))

    @property
    def rank(self) -> int:
        return self.line.rank

    @property
    def size(self) -> int:
        return self.line.size

    def slice(self, length: int, chunk_size: int) -> slice:
        """The columns of rows of ``length`` tokens that this rank holds.

        Raises:
            ValueError: ``length`` is not so many whole chunks that each rank gets as many.
        """
        if length % (self.size * chunk_size):
            raise ValueError(
                f"rows must be a multiple of ranks × chunk_size = {self.size} × {chunk_size} tokens long, so that each "
                f"rank holds as many whole chunks; got {length}. Change the length or the number of context ranks."
            )
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def segments(
        self, batch: int, length: int, chunk_size: int, *,
        segment_ids: Tensor | None, clock: Clock | None, device: torch.device,
    ) -> Segments:  # fmt: skip
        """The documents of this rank's tokens, at their place in the stream, and the exchange with the others.

        Raises:
            ValueError: the ranks' tokens are not as many whole chunks each, or their calls differ; on all ranks.
        """
        check_headers(self._gather(call_header(batch, length, chunk_size, segment_ids, clock)))
        if segment_ids is None:
            records = no_documents(self.size, batch, clock)
        else:
            records = self._gather(document_record(segment_ids, chunk_size))
        if self.size == 1:
            return Segments.build(batch, length, segment_ids=segment_ids, clock=clock, device=device)
        parts = parts_of_call(length, chunk_size, records, clock)
        counts, reach = reaching_counts(parts, self.rank), reaching_chunks(parts, self.rank, chunk_size)
        handoff = _Handoff(self.line, self.rank == 0, counts.to(device), reach.to(device))
        own = clock if self.rank == 0 else parts[self.rank].clock
        segments = Segments.build(batch, length, segment_ids=segment_ids, clock=own, device=device)
        return replace(segments, handoff=handoff, next_begins=self._next_begins(parts))

    def _next_begins(self, parts: list[Part]) -> Tensor:
        last = self.rank == self.size - 1
        return torch.zeros_like(parts[0].begins) if last else parts[self.rank + 1].begins

    def mean(self, local: Tensor, count: Tensor) -> Tensor:
        """The mean over all ranks' terms, the same number on each, from this rank's mean over ``count`` of them."""
        return _GroupMean.apply(local, count, self.line.group)

    def last_state(self, state: GeckoState) -> GeckoState:
        """The last rank's state after a call, which is that of the whole rows, on every rank."""
        clock = self.from_last([x.to(self._host) for x in state.clock.tensors().values()])
        rest = self.from_last([x for name, x in state.tensors().items() if not name.startswith("clock.")])
        found = iter([*(x.cpu() for x in clock), *rest])
        return state.map(lambda _: next(found))

    def from_last(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The last rank's tensors, on every rank; all ranks have the same shapes and dtypes, on one device."""
        # A copy, because one element is contiguous at any stride, and bytes are seen only at stride 1.
        whole = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in whole])
        dist.broadcast(packed, group=self.line.group, group_src=self.size - 1)
        parts = packed.split([tensor.nbytes for tensor in tensors])
        return [part.clone().view(tensor.dtype).view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _gather(self, values: Tensor) -> Tensor:
        """(R, …): every rank's ``values``, on the host."""
        own = values.to(self._host)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.line.group)
        return torch.stack(found).cpu()


@dataclass(frozen=True)
class _Handoff:
    line: Line
    first: bool
    counts: Tensor
    chunks_reach: Tensor

    def previous(self, x: Tensor) -> Arriving:
        return _Only(Transfer(self.line, [1]).start(x))

    def earlier(self, x: Tensor) -> Arriving:
        return Transfer(self.line, range(1, self.line.size)).start(x)


@dataclass(frozen=True)
class _Only:
    transfer: Transfer

    def wait(self) -> Tensor:
        return self.transfer.wait()[0]


class _GroupMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
        sums = torch.stack([local.double() * count, count.double()])
        dist.all_reduce(sums, group=group)
        total = sums[1].clamp(min=1)
        ctx.share = (count / total).to(local.dtype)
        return (sums[0] / total).to(local.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.share, None, None
