"""Point-to-point exchange between the ranks of a group: tensors to later ranks, gradients back to earlier ones.

Starting and waiting are two nodes of the autograd graph, so computation between them overlaps with the transfer. In the
backward pass the wait starts the transfer of the gradients, and the start waits for it. Autograd runs nodes in reverse
order of creation, so all ranks run the exchanges in the same order.

Activation checkpointing computes a block again in the backward pass. The tensors that arrived in the forward pass are
then used again: ``P2PGroup.keeping`` records them, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of a checkpointed forward pass and of its recomputation; see ``torch.utils.checkpoint``."""


class P2PGroup:
    """Sends tensors between the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # An exchange is a graph break in a compiled block, because the compiler cannot trace communication. The
        # functions are not wrapped on import, because ``torch.compiler.disable`` imports the compiler, which takes 2 s.
        self._start: Callable[..., Transfer] = torch.compiler.disable(self._started)
        self.wait: Callable[..., tuple[Tensor, ...]] = torch.compiler.disable(_Wait.apply)
        self._record: list[Transfer] | None = None
        self._replay: Iterator[Transfer] | None = None

    def send(self, tensors: Sequence[Tensor], distances: Sequence[Sequence[int]]) -> Transfer:
        """Start one batch: every rank sends its ``tensors[i]`` to the ranks ``rank + d`` for d in ``distances[i]``."""
        return self._start(tensors, distances)

    def _started(self, tensors: Sequence[Tensor], distances: Sequence[Sequence[int]]) -> Transfer:
        transfer = Transfer(self, distances) if self._replay is None else next(self._replay)
        if self._record is not None:
            self._record.append(transfer)
            transfer.keeps = True
        transfer.arriving = _Start.apply(transfer, *tensors)
        return transfer

    def keeping(self, contexts: Contexts) -> Contexts:
        """Return ``contexts`` such that the recomputation uses the tensors that arrived in the forward pass."""

        def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            transfers: list[Transfer] = []
            forward, again = contexts()
            return self._within(forward, transfers, None), self._within(again, None, transfers)

        return both

    @contextmanager
    def _within(
        self, inner: AbstractContextManager[Any], record: list[Transfer] | None, replay: list[Transfer] | None
    ) -> Iterator[None]:
        before = self._record, self._replay
        self._record, self._replay = record, None if replay is None else iter(replay)
        try:
            with inner:
                yield
        finally:
            self._record, self._replay = before

    def post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], distances: Sequence[int]) -> list[dist.Work]:
        """Start sending ``outgoing[i]`` to the rank ``self.rank + distances[i]`` and receiving ``incoming[i]`` from the
        rank ``self.rank − distances[i]``, if these ranks exist."""
        operations = []
        for out, into, distance in zip(outgoing, incoming, distances, strict=True):
            if 0 <= self.rank + distance < self.size:
                operations.append(dist.P2POp(dist.isend, out, group=self.group, group_peer=self.rank + distance))
            if 0 <= self.rank - distance < self.size:
                operations.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=self.rank - distance))
        return dist.batch_isend_irecv(operations) if operations else []


class Transfer:
    """One batch of an exchange that has started."""

    def __init__(self, line: P2PGroup, distances: Sequence[Sequence[int]]) -> None:
        self.line, self.distances = line, [list(some) for some in distances]
        self.arriving: tuple[Tensor, ...] = ()
        self.keeps = False
        self.kept: list[Tensor] | None = None
        self._works: list[dist.Work] = []
        self._buffers: tuple[list[Tensor], list[Tensor]] = [], []

    def wait(self) -> list[Tensor]:
        """Return for each sent tensor those of the ranks ``rank − d``, (distances, …); zeros where there is none."""
        arriving, self.arriving = self.arriving, ()  # they refer to this transfer through the graph
        return list(self.line.wait(self, *arriving))

    def post(self, outgoing: list[Tensor], incoming: list[Tensor], *, back: bool) -> None:
        """Send and receive ``outgoing`` and ``incoming``, (distances, …) each, in one batch."""
        sign = -1 if back else 1
        self._works = self.line.post(
            [out for x in outgoing for out in x.unbind(0)], [into for x in incoming for into in x.unbind(0)],
            [sign * distance for some in self.distances for distance in some],
        )  # fmt: skip
        # The buffers must stay alive until the transfer ends.
        self._buffers = outgoing, incoming

    def finish(self) -> list[Tensor]:
        """Wait for the transfer and return the received tensors."""
        for work in self._works:
            work.wait()
        arrived = self._buffers[1]
        self._works, self._buffers = [], ([], [])
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        if transfer.kept is not None:
            return tuple(x.detach() for x in transfer.kept)
        distances = [len(some) for some in transfer.distances]
        arriving = [x.new_zeros(count, *x.shape) for x, count in zip(tensors, distances, strict=True)]
        outgoing = [x.contiguous().expand_as(into) for x, into in zip(tensors, arriving, strict=True)]
        transfer.post(outgoing, arriving, back=False)
        return tuple(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x.sum(0) for x in ctx.transfer.finish())


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.finish()
        if transfer.keeps:
            transfer.kept = [x.detach() for x in arriving]
        return tuple(x.view_as(x) for x in arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arriving = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in grads]
        ctx.transfer.post([x.contiguous() for x in grads], arriving, back=True)
        return None, *arriving
