"""Data of a run: tokenizer, rows, held-out rows, and the batches of its steps, which a thread makes ahead of time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from gecko.data import (
    IGNORED,
    Batch,
    ByteTokenizer,
    DataRequest,
    Tokenizer,
    check_vocabulary,
    document_ids,
    is_shard_folder,
    load_tokenizer,
    open_training_data,
)
from gecko.data.chat import TemplateChat, tuning_format
from gecko.data.chats import ChatCorpus, ChatRows, load_chats, read_chats
from gecko.data.loader import batch_of
from gecko.data.packing import ROW_LAYOUT, CorpusShare, TokenizedCorpus
from gecko.data.sources import check_apart, find_sources, sample_texts
from gecko.data.text_stream import SAMPLE, check_loss
from gecko.data.tokenizers import TEMPLATE
from gecko.data.training_data import parse_source, read_sources
from gecko.data.turns import Turn
from gecko.io.checkpoints import list_checkpoints, model_folder
from gecko.parallel.mesh import Ranks
from gecko.train.evaluate import HeldOut, SamplePrompt
from gecko.train.metrics import DataRecord, row_layout, run_start
from gecko.train.run import Run
from gecko.train.settings import EvaluationSettings

AHEAD = 4
"""Batches that are made ahead of time. A row that takes long to read then delays no step."""


@dataclass(frozen=True)
class RunData:
    tokenizer: Tokenizer
    rows: Callable[[range], Batch]
    """Returns the training rows of the given indices."""
    final: HeldOut
    """Rows for the held-out loss of the finished model."""
    held_out: HeldOut
    """Rows for the held-out losses during training, some of ``final``."""
    record: DataRecord
    """Record that each checkpoint gets."""
    prompt: SamplePrompt
    """Prompt of the sample at the end of the run."""
    chat_template: str | None = None
    """Chat template that each checkpoint gets; None: only what lies beside the tokenizer."""

    def evaluated_by(self, evaluation: EvaluationSettings) -> RunData:
        """Return the data with at most as many held-out rows as ``evaluation`` says."""
        final = self.final.first(evaluation.final_rows)
        return replace(self, final=final, held_out=final.spread(evaluation.rows))


def load_data(run: Run, ranks: Ranks, checkpoint: Path | None = None) -> RunData:
    """Read, tokenize and split the run's source. Each rank tokenizes a share of the texts, and gets all of them.

    Rows and the time of the start are those that the run of ``checkpoint`` was begun with; None: the run is new. All
    ranks call it together. The first raises ValueError if the source is too small, the tokenizer does not fit the
    model, or a newer version wrote the checkpoint; all others SystemExit.
    """
    console = ranks.console
    layout, started = ranks.main(lambda: (row_layout(checkpoint), run_start(checkpoint)))
    if run.data.format == "chat":
        return ranks.run_or_abort_all(lambda: _load_chats(run, ranks, layout, started))
    settings = run.data
    request = DataRequest(
        run.sequence_length, settings.validation_fraction, run.seed, ranks.rank, ranks.world, settings.field, layout,
        run.batch_size if settings.carry_state else None,
    )  # fmt: skip

    def opened() -> RunData:
        data = open_training_data(*given, validation=settings.validation, corpora=corpora)
        console.print(f"training: {data.documents:,} documents, {data.tokens:,} tokens of {data.name}")
        of = f" of {settings.validation}"
        if settings.validation is None:
            of = f", {data.held_out_tokens / (data.tokens + data.held_out_tokens):.2%} of all"
            of += f"; {data.divided:,} of them the end of a document that is trained on" if data.divided else ""
        console.print(f"held out: {data.held_out_documents:,} documents, {data.held_out_tokens:,} tokens{of}")
        rows, length = run.evaluation.final_rows, run.sequence_length
        final = HeldOut.of(data.held_out(rows * length + 1), rows, length, _rows_at_once(run, ranks), tokenizer)
        text = run.sample.prompt
        if text is None:
            # The first one to three words, with the space after them.
            words = re.match(r"\s*((?:\S{1,30}\s+){1,3})", tokenizer.decode(final.rows.tokens[0, :100].tolist()))
            text = "The " if words is None else words[1]
        prompt = SamplePrompt(text, document_ids(tokenizer, text), frozenset({tokenizer.document_end}))
        training, record = partial(batch_of, data.loader(run.batch_size).rows), DataRecord(data.digest, layout)
        return RunData(tokenizer, training, final, final.spread(run.evaluation.rows), record, prompt)

    with console.status(f"reading {', '.join(settings.sources) or settings.source}"):
        tokenizer = ranks.run_or_abort_all(lambda: _load_tokenizer(run, console, layout))
        given = settings.source, settings.sources, tokenizer, request
        corpora: dict[str, Any]
        corpora = ranks.run_or_abort_all(lambda: read_sources(*given, validation=settings.validation))
        for name, found in corpora.items():
            if isinstance(found, CorpusShare):
                corpora[name] = whole_corpus(name, found, ranks)
        return ranks.run_or_abort_all(opened)


def _rows_at_once(run: Run, ranks: Ranks) -> int:
    return run.rows_per_rank(ranks.data_ranks) // run.gradient_accumulation_steps


def _load_tokenizer(run: Run, console: Console, layout: int) -> Tokenizer:
    """Load the run's tokenizer, and check that it fits the model and keeps the texts."""
    settings, tokenizer = run.data, load_tokenizer(run.data.tokenizer)
    check_vocabulary(tokenizer, run.model.vocab_size)
    if 2 * tokenizer.vocab_size < run.model.vocab_size:
        console.print(
            f"the model has {run.model.vocab_size:,} ids, of which the tokenizer {settings.tokenizer!r} uses "
            f"{tokenizer.vocab_size:,}: name the tokenizer with data.tokenizer, or set "
            f"model.vocab_size={-(-tokenizer.vocab_size // 8) * 8}"
        )
    if layout != ROW_LAYOUT or isinstance(tokenizer, ByteTokenizer):
        return tokenizer  # runs of earlier versions continue with what they began with
    names = [parse_source(item)[0] for item in settings.sources] or [settings.source]
    for name in [*names, settings.validation]:
        if name is None or is_shard_folder(name):  # shards were checked when they were tokenized
            continue
        texts: Iterable[str] = (turn.content for _, chat in read_chats(name) for turn in chat.turns)
        if settings.format == "text":
            texts = sample_texts(find_sources(name, field=settings.field)[0][1], SAMPLE)
        if told := check_loss(tokenizer, texts, allowed=settings.allow_loss):
            console.print(f"{name}: {told}")
    return tokenizer


def _load_chats(run: Run, ranks: Ranks, layout: int, started: datetime) -> RunData:
    """Read, tokenize and split chats. Rows hold whole chats; the loss is on the assistant's answers."""
    console = ranks.console
    tokenizer = _load_tokenizer(run, console, layout)
    chat_format = tuning_format(tokenizer, template_folder(run), started)
    training, held_out, digest, divided = _split_chats(run, chat_format, console, layout)
    console.print(
        f"training: {len(training):,} chats, {training.num_tokens:,} tokens, of which {training.trained_tokens:,} are "
        f"of answers, of {run.data.source}"
    )
    console.print(
        f"held out: {'the end of ' * divided}{len(held_out):,} chats, {held_out.trained_tokens:,} tokens of answers; "
        f"conversations are written by {chat_format.source}"
    )
    rows = ChatRows(training, run.sequence_length, run.seed)
    if rows.rows_per_epoch < run.batch_size:
        raise ValueError(
            f"one batch takes {run.batch_size} rows, and the chats fill {rows.rows_per_epoch} rows of "
            f"{run.sequence_length} tokens. Give more chats, or set batch_size={rows.rows_per_epoch}."
        )
    at_once, text = _rows_at_once(run, ranks), run.sample.prompt or "Hello."
    final = HeldOut.of_chats(held_out, run.evaluation.final_rows, run.sequence_length, at_once, tokenizer)
    ids = torch.tensor(chat_format.encode([Turn("user", text)]), device="cpu")
    return RunData(
        tokenizer, partial(batch_of, rows), final, final.spread(run.evaluation.rows),
        DataRecord(digest, layout, started.isoformat()), SamplePrompt(text, ids, chat_format.stop_ids, "\n\n"),
        chat_format.text,
    )  # fmt: skip


def template_folder(run: Run) -> Path:
    """Return the folder of the template that a run was begun with, or else of the model that it starts from."""
    own = run.tokenizer_folder
    return own if run.init_from is None or (own / TEMPLATE).is_file() else model_folder(run.init_from)


def _split_chats(
    run: Run, chat_format: TemplateChat, console: Console, layout: int
) -> tuple[ChatCorpus, ChatCorpus, str, bool]:
    """Return training and held-out chats, cut to the length of a row, the digest of all chats, and whether a chat was
    divided between both. ``layout`` is the version of the rule that divides them."""
    settings, room = run.data, run.sequence_length + 1
    for source in filter(None, (settings.source, settings.validation)):
        if is_shard_folder(source):
            raise ValueError(f"data.format=chat takes JSON Lines of chats; {source} is a folder of token shards.")
    with console.status(f"reading {settings.source}"):
        corpora = [load_chats(settings.source, chat_format)]
        if settings.validation is None:
            parts = corpora[0] if layout < 3 else corpora[0].cut(room)
            training, held_out = parts.split(settings.validation_fraction, run.seed, layout)
        else:
            check_apart(settings.validation, [settings.source])
            corpora.append(load_chats(settings.validation, chat_format))
            training, held_out = corpora
    lengths = [len(tokens) for corpus in corpora for tokens in corpus.tokens]
    if long := sum(length > room for length in lengths):
        console.print(
            f"{long:,} of {len(lengths):,} chats are longer than a row of {room - 1:,} tokens; what follows is left "
            f"out. sequence_length={max(lengths) - 1} takes all of every chat"
        )
    divided = len(training) + len(held_out) > sum(map(len, corpora))
    return training.cut(room), held_out.cut(room), " ".join(corpus.digest() for corpus in corpora), divided


def batch_of_step(run: Run, rows: Callable[[range], Batch], step: int, ranks: Ranks) -> Batch:
    """Return this rank's rows of ``step``, counted from 0, cut into the shorter ones of this step.

    The ranks divide the rows of a step, which do not depend on the number of ranks.
    """
    count = (run.rows_before(step + 1) - run.rows_before(step)) // ranks.data_ranks
    first = run.rows_before(step) + ranks.data_rank * count
    batch, length = rows(range(first, first + count)), run.length_at(step)
    return Batch(*(x.reshape(-1, length) for x in (batch.tokens, batch.targets, batch.segment_ids)))


class Prefetcher:
    """Makes this rank's rows of each batch in a thread, ``AHEAD`` steps ahead; ``rows`` returns those of a range.

    With ``pinned``, tokens and targets are in memory from which a GPU copies while the host continues.
    """

    def __init__(self, run: Run, rows: Callable[[range], Batch], ranks: Ranks, *, pinned: bool = False) -> None:
        self._run, self._rows, self._ranks, self._pinned = run, rows, ranks, pinned
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next = 0
        self._ahead: deque[Future[Batch]] = deque()
        """Batches from ``_next`` on."""

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of ``step``, counted from 0, and start to make those of the next steps."""
        if step != self._next:
            for made in self._ahead:
                made.cancel()
            self._ahead.clear()
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._executor.submit(self._make, step + len(self._ahead)))
        self._next = step + 1
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Make no more batches, for which the process would wait when it ends."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, step: int) -> Batch:
        made = batch_of_step(self._run, self._rows, step, self._ranks)
        return Batch(made.tokens.pin_memory(), made.targets.pin_memory(), made.segment_ids) if self._pinned else made


def replayed(run: Run, step: int) -> Iterator[str]:
    """Yield lines that describe the batch of ``step``, counted from 1 as in ``metrics.jsonl``: its rows and documents.

    No checkpoint is needed, because a batch is a function of the seed and the step. If the run has one, its row layout
    is used. Raise ValueError if the run has no such step.
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, as in metrics.jsonl; got {step}.")
    if run.steps is not None and step > run.steps:
        raise ValueError(f"the run has {run.steps} steps; got {step}. Set steps= to look beyond its end.")
    newest = next(iter(list_checkpoints(run.checkpoints_folder)), None)
    data = load_data(run, Ranks(), newest)
    batch = batch_of_step(run, data.rows, step - 1, Ranks())
    borders = data.tokenizer.document_start, data.tokenizer.document_end
    yield f"step {step}: {len(batch.tokens)} rows of {batch.tokens.shape[1]} tokens, {batch.scored_tokens} targets"
    columns = zip(batch.tokens, batch.targets, batch.segment_ids, strict=True)
    for number, (tokens, targets, segments) in enumerate(columns):
        yield f"row {number}: {int((targets != IGNORED).sum())} targets"
        for segment in segments.unique_consecutive().tolist():
            here = torch.nonzero(segments == segment).flatten()
            text = data.tokenizer.decode([token for token in tokens[here].tolist() if token not in borders])
            yield f"  tokens {int(here[0])} to {int(here[-1])}: {text!r}"


def whole_corpus(source: str, share: CorpusShare, ranks: Ranks) -> TokenizedCorpus:
    """Return the corpus of which each rank has a share: the one that a single process would tokenize.

    All ranks call it together. The ids are broadcast into the memory of the whole corpus one batch at a time, so that a
    rank needs no second copy. ValueError: the ranks have different texts or tokenizers, or no text has tokens.
    """
    found = ranks.gather((share.texts, [part.lengths for part in share.parts]))
    other = [rank for rank, (texts, _) in enumerate(found) if texts != found[0][0]]

    def check() -> None:
        if other:
            raise ValueError(
                f"all ranks must read the same texts from {source!r} and have the same tokenizer; rank {other[0]} has "
                "other ones than rank 0. Give every node the same files, or use a folder that all share."
            )
        if not any(len(lengths) for _, batches in found for lengths in batches):
            raise ValueError(f"{source!r} must hold at least one document with text; got none.")

    ranks.run_or_abort_all(check)
    # Batch b of the corpus is number b // world of rank b % world.
    places = [divmod(batch, ranks.world) for batch in range(sum(len(lengths) for _, lengths in found))]
    batches = [found[rank][1][number] for number, rank in places]
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
