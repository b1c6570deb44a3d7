"""Evaluation of a model: held-out loss, in total and by position in the row, and a sample of its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gecko.data import IGNORED, Batch, TokenizedCorpus, Tokenizer, validation_batches
from gecko.data.chats import ChatCorpus, ChatRows
from gecko.data.text_stream import token_bytes
from gecko.inference import NewToken, stream
from gecko.inference.generate import LlamaStream, prefill_llama
from gecko.models import LanguageModel, Llama
from gecko.parallel.mesh import ALONE, Ranks
from gecko.parallel.sharding import release
from gecko.train.model import without_float8
from gecko.train.run import Precision, Run, is_half
from gecko.train.step import autocast

POSITION_BINS = 128
"""Largest number of bins of the loss by position."""


@dataclass(frozen=True)
class HeldOut:
    """Rows of a held-out corpus, evaluated ``batch_size`` at a time."""

    rows: Batch
    batch_size: int
    row_bytes: Tensor
    """(rows,) bytes of text that the targets of each row stand for."""

    @classmethod
    def of(
        cls, corpus: TokenizedCorpus, rows: int, sequence_length: int, batch_size: int, tokenizer: Tokenizer
    ) -> HeldOut:
        """Return at most ``rows`` rows from the corpus's start. All tokens except documents' first are targets once."""
        (joined,) = validation_batches(corpus.head(rows * sequence_length + 1), rows, sequence_length)
        return cls(joined, batch_size, token_bytes(tokenizer).of_targets(joined))

    @classmethod
    def of_chats(
        cls, corpus: ChatCorpus, rows: int, sequence_length: int, batch_size: int, tokenizer: Tokenizer
    ) -> HeldOut:
        """Return at most ``rows`` rows of whole chats, in random order, for packing begins with the longest chats. The
        targets are the tokens of answers."""
        packed = ChatRows(corpus, sequence_length, seed=0)
        chosen = [packed.row(row) for row in range(min(rows, packed.rows_per_epoch))]
        joined = Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*chosen, strict=True)))
        return cls(joined, batch_size, token_bytes(tokenizer).of_targets(joined))

    def first(self, rows: int) -> HeldOut:
        """Return the first ``rows`` rows, or all."""
        return self._only(torch.arange(min(rows, len(self.rows.tokens)), device="cpu"))

    def spread(self, rows: int) -> HeldOut:
        """Return ``rows`` evenly spaced rows, because neighbouring rows are often parts of one document."""
        available = len(self.rows.tokens)
        return self._only(torch.arange(min(rows, available), device="cpu") * available // min(rows, available))

    def _only(self, chosen: Tensor) -> HeldOut:
        kept = Batch(self.rows.tokens[chosen], self.rows.targets[chosen], self.rows.segment_ids[chosen])
        return HeldOut(kept, self.batch_size, self.row_bytes[chosen])


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean over all held-out targets, in nats per token."""
    nats_per_byte: float
    """The same losses per byte of text that the targets stand for, which is comparable between tokenizers."""
    loss_by_position: list[float | None]
    """Mean loss in bins of ``bin_width`` positions from the row's start; None if no row has a target in the bin."""
    bin_width: int
    tokens: int
    """Number of targets."""
    row_losses: list[float] = field(default_factory=list)
    """Sum of the losses of each row in nats, so that two models can be compared row by row."""
    row_targets: list[int] = field(default_factory=list)
    """Number of targets of each row."""
    arithmetic: str = ""
    """``float32``, or ``bfloat16`` for products in it; empty in early versions, which used the run's precision."""

    @property
    def note(self) -> str:
        """What to say after the loss."""
        textless = math.isnan(self.nats_per_byte) and math.isfinite(self.loss)
        return ", computed in bfloat16" * (self.arithmetic == "bfloat16") + "; the held-out part has no text" * textless


def with_numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``results.json`` with NaN in place of null, which stands for losses without a number."""

    def number(value: Any) -> Any:
        return [number(item) for item in value] if isinstance(value, list) else math.nan if value is None else value

    losses = ("loss", "nats_per_byte", "row_losses")
    return {name: number(value) if name in losses else value for name, value in results.items()}


@torch.no_grad()
def evaluate(
    model: LanguageModel, held_out: HeldOut, precision: Precision, ranks: Ranks = ALONE,
    beat: Callable[[], None] = lambda: None,
) -> Evaluation:  # fmt: skip
    """Return the loss of ``model`` on the held-out rows, in float32 and summed in float64. All ranks call it together.

    Ranks that gather a model's matrices in bfloat16 for training have no others, and compute with those.
    ``beat()`` is called before each batch.
    """
    device, length, at_once = next(model.parameters()).device, held_out.rows.targets.shape[1], held_out.batch_size
    rows, every, here = len(held_out.rows.targets), at_once * ranks.data_ranks, ranks.columns(length)
    # All ranks compute as many batches. If the rows cannot be divided evenly, rows without targets are added.
    missing = -rows % every if ranks.world > 1 else 0
    fills = ((held_out.rows.tokens, 0), (held_out.rows.targets, IGNORED), (held_out.rows.segment_ids, 0))
    columns = [nn.functional.pad(column[:, here], (0, 0, 0, missing), value=value) for column, value in fills]
    by_position = torch.zeros(2, length, dtype=torch.float64, device=device)
    by_row = torch.zeros(2, rows + missing, dtype=torch.float64, device=device)
    used: Precision = precision if ranks.world > 1 else "float32"
    was_training = model.training
    model.eval()
    for first in range(ranks.data_rank * at_once, rows + missing, every):
        beat()
        tokens, targets, segment_ids = (column[first : first + at_once].to(device) for column in columns)
        with without_float8(model, precision), autocast(used, device):
            losses, _ = model.token_losses(tokens, targets, segment_ids, context=ranks.context)
        found = torch.stack([losses.double(), (targets != IGNORED).double()])
        by_position[:, here] += found.sum(dim=1)
        by_row[:, first : first + len(targets)] += found.sum(dim=2)
    release(model)
    model.train(was_training)
    by_position, by_row = ranks.sum(by_position.cpu()), ranks.sum(by_row[:, :rows].cpu())
    width = -(-length // POSITION_BINS)
    bins = nn.functional.pad(by_position, (0, -length % width)).unflatten(1, (-1, width)).sum(dim=2)
    means = [loss / number if number else None for loss, number in bins.T.tolist()]
    (total, number), text_bytes = by_position.sum(dim=1).tolist(), int(held_out.row_bytes.sum())
    row_losses, row_targets = by_row.tolist()
    return Evaluation(
        total / number, total / text_bytes if text_bytes else math.nan, means, width, int(number), row_losses,
        list(map(int, row_targets)), "bfloat16" if is_half(used) else "float32",
    )  # fmt: skip


@dataclass(frozen=True)
class SamplePrompt:
    """The sample's prompt, its tokens, those that end the sample, and the text between both in the sample's file."""

    text: str
    ids: Tensor
    stops: frozenset[int]
    end: str = ""


def sample_text(run: Run, model: LanguageModel, tokenizer: Tokenizer, prompt: SamplePrompt) -> str:
    """Generate and return the continuation of a prompt."""
    options: dict[str, Any] = {
        "max_new_tokens": run.sample.tokens, "temperature": run.sample.temperature, "seed": run.seed,
        "stop_tokens": prompt.stops,
    }  # fmt: skip
    with without_float8(model, run.precision):
        if isinstance(model, Llama):
            new: Iterable[NewToken] = LlamaStream(model, prefill_llama(model, [prompt.ids]), **options)
        else:
            new = stream(model, prompt.ids, **options)
        return tokenizer.decode([token for _, token in new])
