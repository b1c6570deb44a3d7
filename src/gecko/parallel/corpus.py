"""A corpus that all ranks tokenize together: each rank tokenizes a share of the batches and receives the whole.

The ids are broadcast into the memory of the whole corpus one batch at a time, so that a rank needs no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gecko.data.packing import CorpusShare, TokenizedCorpus
from gecko.parallel.mesh import Ranks


@dataclass(frozen=True)
class _Contents:
    """Contents of a share that its rank sends to the other ranks."""

    texts: str
    """Digest of the tokenizer and the texts that it read."""
    batches: list[NDArray[np.int64]]
    """Lengths of the documents of each of its batches."""


def whole_corpus(source: str, share: CorpusShare, ranks: Ranks) -> TokenizedCorpus:
    """Return the corpus of which each rank has a share: the one that a single process would tokenize.

    All ranks call it together.

    Raises:
        ValueError: on the first rank, if the ranks have different texts or tokenizers, or no text has tokens.
        SystemExit: on all other ranks.
    """
    found = ranks.gather(_Contents(share.texts, [part.lengths for part in share.parts]))
    ranks.run_or_abort_all(lambda: _check(source, found))
    # Batch b of the corpus is number b // world of rank b % world.
    places = [divmod(batch, ranks.world) for batch in range(sum(len(contents.batches) for contents in found))]
    batches = [found[rank].batches[number] for number, rank in places]
    lengths = np.concatenate(batches)
    tokens = np.empty(lengths.sum(), share.dtype)
    begin = 0
    for (number, rank), sizes in zip(places, batches, strict=True):
        ids = tokens[begin : begin + sizes.sum()]
        if rank == ranks.rank:
            ids[:] = share.parts[number].tokens
        ranks.broadcast_into(torch.from_numpy(ids.view(np.uint8)), rank)
        begin += len(ids)
    return TokenizedCorpus.of_whole(tokens, lengths)


def _check(source: str, found: list[_Contents]) -> None:
    """Raise ValueError unless all ranks have the same texts and tokenizer, and one has a document."""
    other = [rank for rank, contents in enumerate(found) if contents.texts != found[0].texts]
    if other:
        raise ValueError(
            f"all ranks must read the same texts from {source!r} and have the same tokenizer; rank {other[0]} has "
            "other ones than rank 0. Give every node the same files, or use a folder that all share."
        )
    if not any(len(lengths) for contents in found for lengths in contents.batches):
        raise ValueError(f"{source!r} must hold at least one document with text; got none.")
