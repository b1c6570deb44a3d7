"""The text of a run: its tokenizer, training rows and held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from gecko.data import Batch, DataRequest, Tokenizer, check_vocabulary, load_tokenizer, open_training_data
from gecko.parallel.mesh import Ranks
from gecko.train.evaluate import HeldOut
from gecko.train.run import Run


@dataclass(frozen=True)
class RunData:
    tokenizer: Tokenizer
    rows: Callable[[int], Batch]
    """The rows of one rank and step, by their number among all of them; see :class:`gecko.train.batches.Batches`."""
    held_out: HeldOut
    """For the losses on the way, ..."""
    final: HeldOut
    """... and for that of the finished model."""
    digest: str
    """Of all its documents as ids."""


def load_data(run: Run, ranks: Ranks, console: Console) -> RunData:
    """Read, tokenize and split the run's source; ValueError where it is too small or the tokenizer does not fit."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    check_vocabulary(tokenizer, run.model.vocab_size)
    settings = run.data
    request = DataRequest(
        run.sequence_length, settings.validation_fraction, run.seed, ranks.rank, ranks.world, settings.field
    )
    with console.status(f"reading {', '.join(settings.sources) or settings.source}"):
        data = open_training_data(settings.source, settings.sources, tokenizer, request, validation=settings.validation)
    console.print(f"training: {data.documents:,} documents, {data.tokens:,} tokens of {data.name}")
    of = "" if settings.validation is None else f" of {settings.validation}"
    console.print(f"held out: {data.held_out_documents:,} documents, {data.held_out_tokens:,} tokens{of}")
    rows = run.rows_per_rank(ranks.data_ranks)
    loader = data.loader(run.batch_size, parts=ranks.data_ranks)
    rest = data.held_out(run.evaluation.final_rows * run.sequence_length + 1)
    final = HeldOut.of(rest, run.evaluation.final_rows, run.sequence_length, rows // run.accumulation)
    return RunData(tokenizer, loader.batch, final.spread(run.evaluation.rows), final, data.digest)
