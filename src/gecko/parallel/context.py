"""Context parallelism: ranks hold consecutive parts of the same rows, an equal number of whole chunks each.

The loss is the mean over the targets of all ranks and is equal on each; the sum of the ranks' gradients is its
gradient. Every rank must make the same calls in the same order (``docs/context_parallel.md``).

Ranks send tensors to later ranks, and gradients back to earlier ones. Starting and waiting are two nodes of the
autograd graph, so computation between them overlaps with the transfer. In the backward pass the wait starts the
transfer of the gradients, and the start waits for it. Autograd runs nodes in reverse order of creation, so all ranks
run the exchanges in the same order. A block that is computed again in the backward pass uses the tensors that arrived
in the forward pass: ``P2PGroup.keeping`` records them, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gecko.inference.pieces import piece_length, pieces
from gecko.inference.prefill import Prefill, inference
from gecko.models.gecko import Gecko
from gecko.ops.backends.first_order import FirstOrder
from gecko.runtime.tensors import to_device
from gecko.segments import Clock, ContextExchange, Pending, Segments
from gecko.state import GeckoState

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of a checkpointed forward pass and of its recomputation; see ``torch.utils.checkpoint``."""


class P2PGroup:
    """Sends tensors between the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # An exchange is a graph break in a compiled block, because the compiler cannot trace communication. Not wrapped
        # on import, because ``torch.compiler.disable`` imports the compiler, which takes 2 s.
        self.send: Callable[[Sequence[Tensor], Sequence[Sequence[int]]], Transfer] = torch.compiler.disable(self._send)
        self.wait: Callable[..., tuple[Tensor, ...]] = torch.compiler.disable(_Wait.apply)
        self._record: list[Transfer] | None = None
        self._replay: Iterator[Transfer] | None = None

    def _send(self, tensors: Sequence[Tensor], distances: Sequence[Sequence[int]]) -> Transfer:
        """Start one batch: every rank sends its ``tensors[i]`` to the ranks ``rank + d`` for d in ``distances[i]``."""
        transfer = Transfer(self, distances) if self._replay is None else next(self._replay)
        if self._record is not None:
            self._record.append(transfer)
            transfer.keeps = True
        transfer.arriving = _Start.apply(transfer, *tensors)
        return transfer

    def keeping(self, contexts: Contexts) -> Contexts:
        """Return ``contexts`` such that the recomputation uses the tensors that arrived in the forward pass."""

        def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            transfers = list[Transfer]()
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
            for do, tensor, peer in ((dist.isend, out, self.rank + distance), (dist.irecv, into, self.rank - distance)):
                if 0 <= peer < self.size:
                    operations.append(dist.P2POp(do, tensor, group=self.group, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []


class Transfer:
    """One batch of an exchange that has started."""

    def __init__(self, line: P2PGroup, distances: Sequence[Sequence[int]]) -> None:
        self.line, self.distances = line, [list(some) for some in distances]
        self.arriving: tuple[Tensor, ...] = ()
        self.keeps = False
        self.kept: list[Tensor] | None = None
        self._works, self._buffers = list[dist.Work](), (list[Tensor](), list[Tensor]())

    def wait(self) -> list[Tensor]:
        """Return what earlier ranks sent, for each of this rank's tensors (distances, …): index i is of the rank that
        is ``distances[i]`` before this one, and zeros if there is no such rank."""
        arriving, self.arriving = self.arriving, ()  # they refer to this transfer through the graph
        return list(self.line.wait(self, *arriving))

    def post(self, outgoing: list[Tensor], incoming: list[Tensor], *, back: bool) -> None:
        """Start to send and receive ``outgoing`` and ``incoming``, (distances, …) each, in one batch."""
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


class _Start(FirstOrder):
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x.sum(0) for x in ctx.transfer.finish())


class _Wait(FirstOrder):
    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.finish()
        if transfer.keeps:
            transfer.kept = [x.detach() for x in arriving]
        return tuple(x.view_as(x) for x in arriving)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arriving = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in grads]
        ctx.transfer.post([x.contiguous() for x in grads], arriving, back=True)
        return None, *arriving


def rank_layout(
    whole: Segments, ids: Tensor | None, rank: int, size: int, chunk: int
) -> tuple[Segments, Tensor, Tensor]:
    """Cut the rows ``whole`` into ``size`` equal parts. Return the layout of the part of ``rank``, and ``counts`` and
    ``chunks_reach`` of this rank's ``ContextExchange``. ``ids`` are the segment ids of ``whole`` on the CPU, if any."""
    length, position = whole.length // size, whole.clock.position
    begin, end = rank * length, (rank + 1) * length

    def open_before(token: int) -> Tensor:
        """Return the position at which the document started that is open just before a token of the whole rows."""
        return whole.document_starts[:, token - 1] if token else whole.clock.document_start

    start, counts = open_before(begin), torch.zeros(size - 1, whole.batch, dtype=torch.int64, device="cpu")
    reach = torch.zeros(size - 1, whole.batch, 2, dtype=torch.bool, device="cpu")
    for before, other in enumerate(reversed(range(rank))):
        last = position + (other + 1) * length
        # Tokens that rank 0 read in earlier calls count as its own.
        first = position + other * length if other else torch.minimum(start, position)
        counts[before] = (last - torch.maximum(start, first)).clamp(min=0)
        early = open_before(begin - chunk)
        reach[before] = torch.stack([early < last - chunk, early < last], dim=1)
    part, starts = whole.part(begin, end), whole.starts
    if ids is not None:
        clock = replace(part.clock, segment_id=ids[:, begin - 1].clone()) if rank else part.clock
        part = replace(part, clock=clock, last_id=ids[:, end - 1].clone())
    next_begins = torch.zeros(whole.batch, dtype=torch.bool, device="cpu")
    if starts is not None:
        if rank + 1 < size:
            next_begins = torch.from_numpy(starts[:, end].copy())
        part = replace(part, starts=part.starts.copy() if part.starts is not None and part.starts.any() else None)
    return replace(part, next_begins=next_begins), counts, reach


class ContextGroup:
    """The ranks that share rows, in the order of their parts."""

    rows: Tensor | None = None
    """(B, ranks × T) segment ids of the whole rows of a call on the CPU, if every rank knows them."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.line = P2PGroup(process_group)
        self.rank, self.size = self.line.rank, self.line.size
        types = {device.type for device in process_group._device_types}
        # Layouts are computed on the CPU. If the group has no CPU backend, they are exchanged on its device.
        self._host = torch.device("cpu") if "cpu" in types else torch.device(next(iter(types)))

    def of_rows(self, segment_ids: Tensor) -> ContextGroup:
        """Return the group for calls on these ``rows``: nothing is then exchanged on the host."""
        known = copy(self)
        known.rows = segment_ids
        return known

    def slice(self, length: int, chunk_size: int) -> slice:
        """Return the columns that this rank holds of rows of ``length`` tokens. Raise ValueError if ``length`` cannot
        be divided into an equal number of whole chunks per rank."""
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
        """Return the documents of this rank's tokens, their positions in the stream, and the exchange with other ranks.

        If the group knows the ``rows``, the ids are those of them. Raise ValueError on all ranks if the ranks hold
        different numbers of chunks or their calls differ, or if the rows have another shape.
        """
        shape = batch, self.size * length
        if self.rows is not None and self.rows.shape != shape:
            raise ValueError(
                f"the segment_ids of the whole rows must have shape {shape}; got {tuple(self.rows.shape)}."
            )
        self._check_call(batch, length, chunk_size, segment_ids, clock)
        ids = self.rows
        if ids is None and segment_ids is not None:
            Segments.build(batch, length, segment_ids=segment_ids)  # which refuses other shapes
            ids = torch.cat(self._gather(segment_ids.detach().to("cpu", torch.int64)).unbind(), dim=1)
        whole = Segments.build(*shape, segment_ids=ids, clock=clock, device=device)
        if self.size == 1:
            return whole
        part, *exchanged = rank_layout(whole, ids, self.rank, self.size, chunk_size)
        counts, reach = (to_device(x, device) for x in exchanged)
        return replace(part, exchange=ContextExchange(self.rank == 0, counts, reach, self._send, self.line.keeping))

    def _check_call(
        self, batch: int, length: int, chunk_size: int, segment_ids: Tensor | None, clock: Clock | None
    ) -> None:
        """Raise ValueError, the same on every rank, unless all make the same call, which is of whole chunks."""
        stand = Clock.start(batch) if clock is None else clock
        inside = bool((stand.position.numpy() % chunk_size).any())
        if self.rows is None:
            weights = np.arange(1, batch + 1)
            call = {
                "rows": batch, "tokens": length, "chunk_size": chunk_size,
                "segment_ids or none": segment_ids is not None, "state or none": clock is not None,
                "positions": (stand.position.numpy() * weights).sum(),
                "document starts": (stand.document_start.numpy() * weights).sum(), "": inside,
            }  # fmt: skip
            found = self._gather(torch.tensor([int(x) for x in call.values()], dtype=torch.int64, device="cpu"))
            inside = bool(found[:, -1].any())
            for name, column in zip(call, found[:, :-1].T, strict=False):
                if len(column.unique()) > 1:
                    raise ValueError(
                        f"all ranks of a context group must make the same call; their {name} are {column.tolist()}. "
                        "Rows must be a multiple of ranks × chunk_size long, and divided evenly."
                    )
        if length % chunk_size or length < 2:
            raise ValueError(
                f"each rank of a context group must hold whole chunks of {chunk_size} tokens, and 2 tokens at least; "
                f"got {length}. Rows must be a multiple of ranks × chunk_size = {self.size} × {chunk_size} long."
            )
        if inside:
            raise ValueError(
                "a state that ranks of a context group go on from must stand at a multiple of chunk_size = "
                f"{chunk_size}; this one stands inside a chunk. Read up to the chunk's end on one rank first."
            )

    def _send(self, to_next: Sequence[Tensor], to_later: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Send as ``ContextExchange.send``."""
        near, nearest, all_later = len(to_next), [1], range(1, self.size)
        sent = self.line.send([*to_next, *to_later], [*([nearest] * near), *([all_later] * len(to_later))])

        def receive() -> list[Tensor]:
            arrived = sent.wait()
            return [*(x[0] for x in arrived[:near]), *arrived[near:]]

        return receive

    def mean(self, local: Tensor, count: Tensor) -> Tensor:
        """Return the mean over the terms of all ranks, identical on each; ``local`` is the mean of this rank's
        ``count`` terms."""
        return _GroupMean.apply(local, count, self.line.group)

    def last_state(self, state: GeckoState, before: Clock | None = None) -> GeckoState:
        """Return, on every rank, the last rank's state after a call: that after the whole rows, which follow the clock
        ``before``."""
        if self.rows is None:
            clock = [x.cpu() for x in self.from_last([x.to(self._host) for x in state.clock.tensors().values()])]
        else:
            end = Segments.build(*self.rows.shape, segment_ids=self.rows, clock=before).end
            clock = list(end.tensors().values())
        rest = self.from_last([x for name, x in state.tensors().items() if not name.startswith("clock.")])
        found = iter([*clock, *rest])
        return state.map(lambda _: next(found))

    def from_last(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the last rank's tensors on every rank. Shapes and dtypes agree on all ranks; all are on one device."""
        # Copy: a tensor of one element is contiguous at any stride, but a view as bytes needs stride 1.
        whole = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in whole])
        dist.broadcast(packed, group=self.line.group, group_src=self.size - 1)
        parts = packed.split([tensor.nbytes for tensor in tensors])
        return [part.clone().view(tensor.dtype).view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _gather(self, values: Tensor) -> Tensor:
        """Return every rank's ``values`` as (R, …) on the CPU."""
        own = values.to(self._host)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.line.group)
        return torch.stack(found).cpu()


class _GroupMean(FirstOrder):
    @staticmethod
    def forward(ctx: Any, local: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
        sums = torch.stack([local.double() * count, count.double()])
        dist.all_reduce(sums, group=group)
        total = sums[1].clamp(min=1)
        ctx.share = (count / total).to(local.dtype)
        return (sums[0] / total).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.share, None, None


def prefill_on_ranks(
    model: Gecko, tokens: Iterable[Tensor], group: ContextGroup, state: GeckoState | None = None, *,
    piece: int | None = None,
) -> Prefill:  # fmt: skip
    """Read a prompt as ``gecko.inference.read`` does, shared by the ranks of a group. Every rank gets the same result.

    All ranks pass the same tokens and state. The tokens at both ends that do not fill a chunk on every rank, fewer than
    ranks × chunk_size at each end, are read by every rank. Raise TypeError or ValueError as ``read`` does.

    Args:
        piece: tokens per rank and call, a multiple of ``chunk_size``; None: ``piece_length(model.config)``. The last
            rank's state is sent to all after each ranks × piece tokens.
    """
    size, chunk = piece_length(model.config) if piece is None else piece, model.config.chunk_size
    if size < 1 or size % chunk:
        raise ValueError(f"piece must be a multiple of chunk_size = {chunk}; got {size}.")
    last, seen = None, torch.zeros(model.config.vocab_size, dtype=torch.bool, device="cpu")
    with inference(model):
        for part in pieces(model.config, tokens, state, piece=group.size * size):
            seen[part] = True
            for shared, some in _shares(part, 0 if state is None else state.position[0], group.size * chunk, chunk):
                columns = group.slice(len(some), chunk) if shared else slice(None)
                here = some[columns].unsqueeze(0).to(model.embedding.weight.device)
                hidden, state = model.hidden(here, state=state, context=group if shared else None)
                last = hidden[:, -1:]
                if shared:
                    (last,), state = group.from_last([last]), group.last_state(state)
        if last is None or state is None:
            raise ValueError("a prompt must hold at least one token, also after a reading state.")
        return Prefill(state, model.head(last)[0, 0], seen.to(last.device))


def _shares(part: Tensor, position: int, unit: int, chunk: int) -> Iterable[tuple[bool, Tensor]]:
    """Split ``part`` into the tokens up to the next chunk, those that fill whole chunks on all ranks, and the rest.
    Return each that is not empty with whether the ranks share it."""
    before = min(-position % chunk, len(part))
    whole = (len(part) - before) // unit * unit
    shares = zip((False, True, False), part.tensor_split((before, before + whole)), strict=True)
    return [(shared, some) for shared, some in shares if len(some)]
