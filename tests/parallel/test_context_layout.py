"""The document layout that ranks derive from each other's records equals the layout of the whole rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.parallel.context import document_record, no_documents, parts_of_call, reaching_chunks, reaching_counts
from gecko.segments import Clock, Segments

calls = st.fixed_dictionaries(
    {
        "ranks": st.integers(2, 4), "chunks": st.integers(1, 3), "chunk": st.integers(2, 4),
        "rate": st.sampled_from([0.0, 0.05, 0.3, 1.0]), "seed": st.integers(0, 10**6),
        "read": st.sampled_from([None, 0, 2]), "ids": st.booleans(),
    }
)  # fmt: skip


def call(ranks, chunks, chunk, rate, seed, read, ids):
    """Return the documents of the whole call, the part of each rank, and the segment ids."""
    generator, length, batch = torch.Generator().manual_seed(seed), ranks * chunks * chunk, 3
    segment_ids = (torch.rand(batch, length, generator=generator) < rate).long().cumsum(1) if ids else None
    clock = None
    if read is not None:
        position = torch.full((batch,), read * chunk)
        clock = Clock(position, position // 2, torch.randint(2, (batch,), generator=generator))
    whole = Segments.build(batch, length, segment_ids=segment_ids, clock=clock)
    if segment_ids is None:
        records = no_documents(ranks, batch, clock)
    else:
        records = torch.stack([document_record(part, chunk) for part in segment_ids.chunk(ranks, dim=1)])
    return whole, parts_of_call(length // ranks, chunk, records, clock), segment_ids


@settings(max_examples=200)
@given(drawn=calls)
def test_each_rank_knows_where_it_stands(drawn):
    whole, parts, ids = call(**drawn)
    size = drawn["chunks"] * drawn["chunk"]
    for rank, part in enumerate(parts):
        assert torch.equal(part.clock.position, whole.clock.position + rank * size)
        # Rank 0 of a call without a state has no clock; its first document has the id of its first token.
        fresh = rank == 0 and drawn["read"] is None
        own = None if ids is None else ids[:, rank * size : (rank + 1) * size]
        here = Segments.build(3, size, segment_ids=own, clock=None if fresh else part.clock)
        assert torch.equal(here.document_starts, whole.document_starts[:, rank * size : (rank + 1) * size])
        begins = (
            torch.zeros(3, dtype=torch.bool) if whole.starts is None else torch.from_numpy(whole.starts)[:, rank * size]
        )
        assert torch.equal(part.begins, begins)


@settings(max_examples=200)
@given(drawn=calls)
def test_each_rank_knows_how_far_back_its_document_reaches(drawn):
    whole, parts, _ = call(**drawn)
    chunk, size = drawn["chunk"], drawn["chunks"] * drawn["chunk"]
    start_of_call = int(whole.clock.position[0])
    for rank in range(drawn["ranks"]):
        counts, reach = reaching_counts(parts, rank), reaching_chunks(parts, rank, chunk)
        for row in range(3):
            starts = whole.document_starts[row].tolist()
            for before in range(drawn["ranks"] - 1):
                other = rank - 1 - before
                if other < 0:
                    assert int(counts[before, row]) == 0 and not reach[before, row].any()
                    continue
                running = starts[rank * size - 1]
                held = [t for t in range(other * size, (other + 1) * size) if start_of_call + t >= running]
                earlier = max(0, start_of_call - running) if other == 0 else 0
                assert int(counts[before, row]) == len(held) + earlier
                # The document that holds the last token before the chunk that precedes this rank's part.
                at = rank * size - chunk - 1
                began = starts[at] if at >= 0 else int(whole.clock.document_start[row])
                end = start_of_call + (other + 1) * size
                assert reach[before, row].tolist() == [began < end - chunk, began < end]
