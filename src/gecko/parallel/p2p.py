"""Point-to-point exchange between the ranks of a group: tensors to later ranks, gradients back to earlier ones.

Starting and waiting are two nodes of the autograd graph, so computation between them overlaps with the transfer. In the
backward pass the wait starts the transfer of the gradient, and the start waits for it. Autograd runs nodes in reverse
order of creation, so all ranks run the exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class P2PGroup:
    """Sends tensors between the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # An exchange is a graph break in a compiled block, because the compiler cannot trace communication. The
        # functions are not wrapped on import, because ``torch.compiler.disable`` imports the compiler, which takes 2 s.
        self.start: Callable[[Tensor, Transfer], Tensor] = torch.compiler.disable(_Start.apply)
        self.wait: Callable[[Tensor, Transfer], Tensor] = torch.compiler.disable(_Wait.apply)

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
    """One exchange: every rank sends its x to the ranks ``rank + distance`` for each distance."""

    def __init__(self, line: P2PGroup, distances: Sequence[int]) -> None:
        self.line, self.distances = line, list(distances)
        self._works: list[dist.Work] = []
        self._kept: tuple[Tensor, ...] = ()

    def start(self, x: Tensor) -> Transfer:
        self._arriving = self.line.start(x, self)
        return self

    def wait(self) -> Tensor:
        """Wait for the tensors of the ranks ``rank − distance`` and return them, (distances, …); zeros for none."""
        return self.line.wait(self._arriving, self)

    def post(self, outgoing: Tensor, incoming: Tensor, *, back: bool) -> None:
        distances = [-distance for distance in self.distances] if back else self.distances
        self._works = self.line.post(outgoing.unbind(0), incoming.unbind(0), distances)
        # The buffers must stay alive until the transfer ends.
        self._kept = (outgoing, incoming)

    def finish(self) -> Tensor:
        """Wait for the transfer and return the received tensors."""
        for work in self._works:
            work.wait()
        arrived = self._kept[1]
        self._works, self._kept = [], ()
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        arriving = x.new_zeros(len(transfer.distances), *x.shape)
        transfer.post(x.contiguous().expand_as(arriving), arriving, back=False)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish().sum(0), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.finish()
        ctx.mark_dirty(arriving)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        arriving = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        ctx.transfer.post(grad.contiguous(), arriving, back=True)
        return arriving, None
