"""Where documents begin on the ranks of a context group: a few numbers of each, exchanged once per call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.segments import Clock

_FIELDS = ("rows", "tokens", "chunk_size", "segment_ids or none", "state or none", "positions", "document starts")


def call_header(batch: int, length: int, chunk_size: int, segment_ids: Tensor | None, clock: Clock | None) -> Tensor:
    """(8,) int64: what must be the same on all ranks, by ``_FIELDS``, and whether the state stands inside a chunk."""
    stand = Clock.start(batch) if clock is None else clock
    inside = bool((stand.position % chunk_size).any())
    given = (segment_ids is not None, clock is not None, _digest(stand.position), _digest(stand.document_start), inside)
    return torch.tensor([batch, length, chunk_size, *map(int, given)], dtype=torch.int64)


def check_headers(headers: Tensor) -> None:
    """Raise ValueError, on every rank alike, where ``headers`` (R, 8) are not one call of whole chunks."""
    for name, column in zip(_FIELDS, headers.T, strict=False):
        if len(column.unique()) > 1:
            raise ValueError(
                f"all ranks of a context group must make the same call; their {name} are {column.tolist()}. "
                "Rows must be a multiple of ranks × chunk_size long, and divided evenly."
            )
    length, chunk_size = int(headers[0, 1]), int(headers[0, 2])
    if length % chunk_size or length < 2:
        raise ValueError(
            f"each rank of a context group must hold whole chunks of {chunk_size} tokens, and 2 tokens at least; got "
            f"{length}. Rows must be a multiple of ranks × chunk_size = {len(headers)} × {chunk_size} long."
        )
    if bool(headers[:, -1].any()):
        raise ValueError(
            f"a state that ranks of a context group go on from must stand at a multiple of chunk_size = {chunk_size}; "
            "this one stands inside a chunk. Read up to the chunk's end on one rank first."
        )


def _digest(numbers: Tensor) -> int:
    return int((numbers * (torch.arange(len(numbers)) + 1)).sum())


def document_record(segment_ids: Tensor, chunk_size: int) -> Tensor:
    """(B, 4): the ids of a rank's first and last token, and the last place after the first at which a document
    starts, among all tokens and among those before the last chunk; −1 where none does."""
    ids = segment_ids.detach().to("cpu", torch.int64)
    starts = torch.where(ids[:, 1:] != ids[:, :-1], torch.arange(1, ids.shape[1]), -1)
    starts = torch.cat([torch.full_like(ids[:, :1], -1), starts], dim=1)
    # One column more in front, so that a rank of one chunk has a column too.
    earlier = starts[:, : max(1, ids.shape[1] - chunk_size)]
    return torch.stack([ids[:, 0], ids[:, -1], starts.amax(1), earlier.amax(1)], dim=1)


@dataclass(frozen=True)
class Part:
    """One rank's part of the rows of a call; tensors of shape (B,)."""

    clock: Clock
    """Before its first token."""
    begins: Tensor
    """Whether a document starts at its first token."""
    start_before_last: Tensor
    """Where the document started that is there before its last chunk."""


def parts_of_call(length: int, chunk_size: int, records: Tensor, clock: Clock | None) -> list[Part]:
    """Every rank's part, from all ranks' records (R, B, 4); ``clock`` before the first, None where nothing was read."""
    now = Clock.start(records.shape[1]) if clock is None else clock
    parts: list[Part] = []
    for first_id, last_id, last_start, early_start in (record.unbind(1) for record in records):
        fresh = clock is None and not parts
        begins = torch.zeros_like(first_id, dtype=torch.bool) if fresh else first_id != now.segment_id
        start = torch.where(begins, now.position, now.document_start)
        # The first token is before the last chunk only where there are two.
        start_early = start if length > chunk_size else now.document_start
        before_last = torch.where(early_start >= 0, now.position + early_start, start_early)
        parts.append(Part(now, begins, before_last))
        start = torch.where(last_start >= 0, now.position + last_start, start)
        now = Clock(now.position + length, start, last_id)
    return parts


def no_documents(size: int, batch: int, clock: Clock | None) -> Tensor:
    """The records of ranks whose rows go on without a document's start."""
    ids = torch.zeros(batch, dtype=torch.int64) if clock is None else clock.segment_id
    none = torch.full_like(ids, -1)
    return torch.stack([ids, ids, none, none], dim=1).expand(size, -1, -1)


def reaching_counts(parts: list[Part], rank: int) -> Tensor:
    """``Handoff.counts`` of a rank."""
    start = parts[rank].clock.document_start
    counts = torch.zeros(len(parts) - 1, len(start), dtype=torch.int64)
    for before in range(rank):
        # What rank 0 had read in earlier calls counts as its own.
        begin = parts[before].clock.position if before else torch.minimum(start, parts[0].clock.position)
        held = parts[before + 1].clock.position - torch.maximum(start, begin)
        counts[rank - 1 - before] = held.clamp(min=0)
    return counts


def reaching_chunks(parts: list[Part], rank: int, chunk_size: int) -> Tensor:
    """``Handoff.chunks_reach`` of a rank."""
    reach = torch.zeros(len(parts) - 1, len(parts[0].begins), 2, dtype=torch.bool)
    for before in range(rank):
        start, end = parts[rank - 1].start_before_last, parts[before + 1].clock.position
        reach[rank - 1 - before] = torch.stack([start < end - chunk_size, start < end], dim=1)
    return reach
