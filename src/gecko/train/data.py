"""Data of a run: tokenizer, training batches and held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from rich.console import Console

from gecko.data import IGNORED, Batch, DataRequest, Tokenizer, check_vocabulary, load_tokenizer, open_training_data
from gecko.data.loader import ROW_LAYOUT
from gecko.parallel.mesh import Ranks
from gecko.train.checkpoint import list_checkpoints
from gecko.train.checkpointer import checkpoints_folder
from gecko.train.evaluate import HeldOut
from gecko.train.metrics import DataRecord, row_layout
from gecko.train.run import Run


class Prefetcher:
    """Makes this rank's rows of each batch, one step ahead in a thread.

    ``rows(i)`` returns group i of the rows; a group has the rows of one rank and step. With n data ranks the batch of a
    step consists of the groups ``step · n`` to ``step · n + n − 1``, so any number of ranks sees the same batches.
    """

    def __init__(self, rows: Callable[[int], Batch], ranks: Ranks) -> None:
        self._rows, self._ranks = rows, ranks
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of ``step``, counted from 0, and start to make those of the next step."""
        ready = self._ahead
        made = ready[1] if ready is not None and ready[0] == step else self._executor.submit(self._make, step)
        batch = made.result()
        self._ahead = (step + 1, self._executor.submit(self._make, step + 1))
        return batch

    def _make(self, step: int) -> Batch:
        return self._rows(step * self._ranks.data_ranks + self._ranks.data_rank)


@dataclass(frozen=True)
class RunData:
    tokenizer: Tokenizer
    rows: Callable[[int], Batch]
    """Returns a group of rows by its index; see :class:`gecko.train.data.Prefetcher`."""
    held_out: HeldOut
    """Rows for the held-out losses during training."""
    final: HeldOut
    """Rows for the held-out loss of the finished model."""
    record: DataRecord
    """Record that each checkpoint gets."""


def load_data(run: Run, ranks: Ranks, console: Console, layout: int = ROW_LAYOUT) -> RunData:
    """Read, tokenize and split the run's source.

    ``layout`` is the row layout that the run started with. Raise ValueError if the source is too small or the tokenizer
    does not fit the model.
    """
    tokenizer = load_tokenizer(run.data.tokenizer)
    check_vocabulary(tokenizer, run.model.vocab_size)
    settings = run.data
    request = DataRequest(
        run.sequence_length, settings.validation_fraction, run.seed, ranks.rank, ranks.world, settings.field, layout
    )
    with console.status(f"reading {', '.join(settings.sources) or settings.source}"):
        data = open_training_data(settings.source, settings.sources, tokenizer, request, validation=settings.validation)
    console.print(f"training: {data.documents:,} documents, {data.tokens:,} tokens of {data.name}")
    of = "" if settings.validation is None else f" of {settings.validation}"
    console.print(f"held out: {data.held_out_documents:,} documents, {data.held_out_tokens:,} tokens{of}")
    rows = run.rows_per_rank(ranks.data_ranks)
    loader = data.loader(run.batch_size, parts=ranks.data_ranks)
    rest = data.held_out(run.evaluation.final_rows * run.sequence_length + 1)
    final = HeldOut.of(rest, run.evaluation.final_rows, run.sequence_length, rows // run.gradient_accumulation_steps)
    record = DataRecord(data.digest, layout)
    return RunData(tokenizer, loader.batch, final.spread(run.evaluation.rows), final, record)


def replayed(run: Run, step: int) -> Iterator[str]:
    """Yield lines that describe the batch of ``step``, counted from 1 as in ``metrics.jsonl``: its rows and documents.

    No checkpoint is needed, because a batch is a function of the seed and the step. If the run has one, its row layout
    is used. Raise ValueError if the run has no such step.
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, as in metrics.jsonl; got {step}.")
    if run.steps is not None and step > run.steps:
        raise ValueError(f"the run has {run.steps} steps; got {step}. Set steps= to look beyond its end.")
    newest = next(iter(list_checkpoints(checkpoints_folder(run))), None)
    data = load_data(run, Ranks(), Console(quiet=True), row_layout(newest))
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
    """Decode ``tokens`` without those that mark the start and the end of a document."""
    borders = (tokenizer.document_start, tokenizer.document_end)
    return tokenizer.decode([token for token in tokens.tolist() if token not in borders])
