"""Context parallelism: ranks hold consecutive parts of the same rows, an equal number of whole chunks each.

    group = ContextGroup(mesh["context"].get_group())
    columns = group.slice(sequence_length, config.chunk_size)
    loss = model.loss(tokens[:, columns], targets[:, columns], segment_ids[:, columns], context=group)
    loss.backward()    # then sum the gradients of the parameters over the group

The loss is the mean over the targets of all ranks and is equal on each. Its gradient on one rank is the contribution of
that rank's tokens, so the sum over the group is the gradient that one device would compute. Multiply an average over
the group (FSDP's default) by the group's size. Every rank must make the same calls in the same order.
``prefill_on_ranks`` reads one long text: each rank computes its own chunks, and all ranks get the same state.

Ranks send tensors to later ranks, and gradients back to earlier ones. Starting and waiting are two nodes of the
autograd graph, so computation between them overlaps with the transfer. In the backward pass the wait starts the
transfer of the gradients, and the start waits for it. Autograd runs nodes in reverse order of creation, so all ranks
run the exchanges in the same order.

Activation checkpointing computes a block again in the backward pass. The tensors that arrived in the forward pass are
then used again: ``P2PGroup.keeping`` records them, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.inference.pieces import piece_length, pieces
from gecko.inference.prefill import Prefill, inference
from gecko.models.gecko import Gecko
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
        """Return for each sent tensor those of the ranks ``rank − d``, (distances, …); zeros where there is none."""
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


_FIELDS = ("rows", "tokens", "chunk_size", "segment_ids or none", "state or none", "positions", "document starts")


def call_header(batch: int, length: int, chunk_size: int, segment_ids: Tensor | None, clock: Clock | None) -> Tensor:
    """Return (8,) int64: ``_FIELDS``, which must be equal on all ranks, and whether the state ends inside a chunk."""
    stand = Clock.start(batch) if clock is None else clock
    inside = bool((stand.position % chunk_size).any())
    weights = torch.arange(batch, device="cpu") + 1
    digests = (int((numbers * weights).sum()) for numbers in (stand.position, stand.document_start))
    given = (segment_ids is not None, clock is not None, *digests, inside)
    return torch.tensor([batch, length, chunk_size, *map(int, given)], dtype=torch.int64, device="cpu")


def check_headers(headers: Tensor) -> None:
    """Raise ValueError, the same on every rank, unless ``headers`` (R, 8) are of the same call and of whole chunks."""
    for name, column in zip(_FIELDS, headers.T, strict=False):
        if len(column.unique()) > 1:
            raise ValueError(
                f"all ranks of a context group must make the same call; their {name} are {column.tolist()}. "
                "Rows must be a multiple of ranks × chunk_size long, and divided evenly."
            )
    check_chunks(len(headers), int(headers[0, 1]), int(headers[0, 2]), inside=bool(headers[:, -1].any()))


def check_chunks(ranks: int, length: int, chunk_size: int, *, inside: bool) -> None:
    """Raise ValueError unless ``length`` tokens per rank are whole chunks, or if the state ends ``inside`` one."""
    if length % chunk_size or length < 2:
        raise ValueError(
            f"each rank of a context group must hold whole chunks of {chunk_size} tokens, and 2 tokens at least; got "
            f"{length}. Rows must be a multiple of ranks × chunk_size = {ranks} × {chunk_size} long."
        )
    if inside:
        raise ValueError(
            f"a state that ranks of a context group go on from must stand at a multiple of chunk_size = {chunk_size}; "
            "this one stands inside a chunk. Read up to the chunk's end on one rank first."
        )


def document_record(segment_ids: Tensor, chunk_size: int) -> Tensor:
    """Return (B, 4) for a rank: the ids of its first and last token, and the index of the last document start after the
    first token, among all tokens and among those before the last chunk; −1 if there is none."""
    ids = segment_ids.detach().to("cpu", torch.int64)
    starts = torch.where(ids[:, 1:] != ids[:, :-1], torch.arange(1, ids.shape[1], device="cpu"), -1)
    starts = torch.cat([torch.full_like(ids[:, :1], -1), starts], dim=1)
    # At least one column, also if the rank holds a single chunk.
    earlier = starts[:, : max(1, ids.shape[1] - chunk_size)]
    return torch.stack([ids[:, 0], ids[:, -1], starts.amax(1), earlier.amax(1)], dim=1)


class RowsPart(NamedTuple):
    """One rank's part of the rows of a call; tensors of shape (B,)."""

    clock: Clock
    """Clock before the part's first token."""
    begins: Tensor
    """Whether a document starts at the part's first token."""
    start_before_last: Tensor
    """Position at which the document started that is open just before the part's last chunk."""


def parts_of_call(length: int, chunk_size: int, records: Tensor, clock: Clock | None) -> list[RowsPart]:
    """Return every rank's part, from the records (R, B, 4) of all ranks and the ``clock`` before the first rank's
    tokens, which is None if nothing was read."""
    now = Clock.start(records.shape[1]) if clock is None else clock
    parts: list[RowsPart] = []
    for first_id, last_id, last_start, early_start in (record.unbind(1) for record in records):
        fresh = clock is None and not parts
        begins = torch.zeros_like(first_id, dtype=torch.bool) if fresh else first_id != now.segment_id
        start = torch.where(begins, now.position, now.document_start)
        # The first token is before the last chunk only if there are at least two chunks.
        start_early = start if length > chunk_size else now.document_start
        before_last = torch.where(early_start >= 0, now.position + early_start, start_early)
        parts.append(RowsPart(now, begins, before_last))
        start = torch.where(last_start >= 0, now.position + last_start, start)
        now = Clock(now.position + length, start, last_id)
    return parts


def no_documents(size: int, batch: int, clock: Clock | None) -> Tensor:
    """Return the records (R, B, 4) of ranks in whose rows no document starts."""
    ids = torch.zeros(batch, dtype=torch.int64, device="cpu") if clock is None else clock.segment_id
    none = torch.full_like(ids, -1)
    return torch.stack([ids, ids, none, none], dim=1).expand(size, -1, -1)


def reaching_counts(parts: list[RowsPart], rank: int) -> Tensor:
    """Return ``ContextExchange.counts`` of a rank."""
    start = parts[rank].clock.document_start
    counts = torch.zeros(len(parts) - 1, len(start), dtype=torch.int64, device="cpu")
    for before in range(rank):
        # Tokens that rank 0 read in earlier calls count as its own.
        begin = parts[before].clock.position if before else torch.minimum(start, parts[0].clock.position)
        held = parts[before + 1].clock.position - torch.maximum(start, begin)
        counts[rank - 1 - before] = held.clamp(min=0)
    return counts


def reaching_chunks(parts: list[RowsPart], rank: int, chunk_size: int) -> Tensor:
    """Return ``ContextExchange.chunks_reach`` of a rank."""
    reach = torch.zeros(len(parts) - 1, len(parts[0].begins), 2, dtype=torch.bool, device="cpu")
    for before in range(rank):
        start, end = parts[rank - 1].start_before_last, parts[before + 1].clock.position
        reach[rank - 1 - before] = torch.stack([start < end - chunk_size, start < end], dim=1)
    return reach


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
        """Return the group for calls on these ``rows``: every rank then computes the layout of all, and nothing is
        exchanged on the host."""
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
        if self.rows is not None:
            if self.rows.shape != (batch, self.size * length):
                raise ValueError(
                    f"the segment_ids of the whole rows must have shape {(batch, self.size * length)}; "
                    f"got {tuple(self.rows.shape)}."
                )
            inside = clock is not None and bool((clock.position.numpy() % chunk_size).any())
            check_chunks(self.size, length, chunk_size, inside=inside)
            ids = self.rows.chunk(self.size, dim=1)
            records, segment_ids = torch.stack([document_record(part, chunk_size) for part in ids]), ids[self.rank]
        else:
            check_headers(self._gather(call_header(batch, length, chunk_size, segment_ids, clock)))
            if segment_ids is None:
                records = no_documents(self.size, batch, clock)
            else:
                records = self._gather(document_record(segment_ids, chunk_size))
        if self.size == 1:
            return Segments.build(batch, length, segment_ids=segment_ids, clock=clock, device=device)
        parts = parts_of_call(length, chunk_size, records, clock)
        counts, reach = reaching_counts(parts, self.rank), reaching_chunks(parts, self.rank, chunk_size)
        counts, reach = to_device(counts, device), to_device(reach, device)
        exchange = ContextExchange(self.rank == 0, counts, reach, self._send, self.line.keeping)
        own = clock if self.rank == 0 else parts[self.rank].clock
        segments = Segments.build(batch, length, segment_ids=segment_ids, clock=own, device=device)
        begins = [*(part.begins for part in parts), torch.zeros_like(parts[0].begins)]
        return replace(segments, exchange=exchange, next_begins=begins[self.rank + 1])

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
                last, state = _read_call(model, some, state, group if shared else None)
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


def _read_call(
    model: Gecko, tokens: Tensor, state: GeckoState | None, group: ContextGroup | None
) -> tuple[Tensor, GeckoState]:
    """Return the last token's hidden vector, the input of the head (1, 1, D), and the state after it."""
    columns = slice(None) if group is None else group.slice(len(tokens), model.config.chunk_size)
    part = tokens[columns].unsqueeze(0).to(model.embedding.weight.device)
    hidden, state = model.hidden(part, state=state, context=group)
    if group is None:
        return hidden[:, -1:], state
    return group.from_last([hidden[:, -1:]])[0], group.last_state(state)
