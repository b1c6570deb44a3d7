"""What a run reads in one of its steps, as text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.console import Console

from gecko.data import IGNORED, Tokenizer
from gecko.parallel.mesh import Ranks
from gecko.train.run import Run
from gecko.train.texts import load_data


def replayed(run: Run, step: int) -> Iterator[str]:
    """Lines about the batch of ``step``, counted from 1 as in ``metrics.jsonl``: each row, and in it each document.

    It takes no checkpoint: a batch is a function of the seed and its number. ValueError for a step that there is not.
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, as in metrics.jsonl; got {step}.")
    if run.steps is not None and step > run.steps:
        raise ValueError(f"the run has {run.steps} steps; got {step}. Set steps= to look beyond its end.")
    data = load_data(run, Ranks(), Console(quiet=True))
    batch = data.rows(step - 1)
    yield f"step {step}: {len(batch.tokens)} rows of {batch.tokens.shape[1]} tokens, {batch.scored_tokens} targets"
    for number, (tokens, targets, segments) in enumerate(
        zip(batch.tokens, batch.targets, batch.segment_ids, strict=True)
    ):
        yield f"row {number}: {int((targets != IGNORED).sum())} targets"
        for segment in segments.unique_consecutive().tolist():
            here = torch.nonzero(segments == segment).flatten()
            yield f"  tokens {int(here[0])} to {int(here[-1])}: {_text(data.tokenizer, tokens[here])!r}"


def _text(tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    """Without the tokens at a document's borders."""
    borders = (tokenizer.document_start, tokenizer.document_end)
    return tokenizer.decode([token for token in tokens.tolist() if token not in borders])
