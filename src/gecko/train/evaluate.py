"""Held-out loss, in total and by position in the row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.data import IGNORED, Batch, TokenizedCorpus, validation_batches
from gecko.model import Gecko
from gecko.parallel.fsdp import release
from gecko.parallel.mesh import Ranks
from gecko.train.run import Precision
from gecko.train.step import autocast

_ALONE = Ranks()
POSITION_BINS = 128
"""At most so many points of the loss by position are kept."""


@dataclass(frozen=True)
class HeldOut:
    """Rows of a held-out corpus, read ``batch_size`` at a time."""

    rows: Batch
    batch_size: int
    bytes_per_token: float
    """Bytes of text over targets."""

    @classmethod
    def of(cls, corpus: TokenizedCorpus, rows: int, sequence_length: int, batch_size: int) -> HeldOut:
        """The corpus from its start, at most ``rows`` rows: every token but a document's first is a target once."""
        head = corpus.head(rows * sequence_length + 1)
        batches = list(validation_batches(head, batch_size, sequence_length))
        joined = Batch(
            torch.cat([batch.tokens for batch in batches]),
            torch.cat([batch.targets for batch in batches]),
            torch.cat([batch.segment_ids for batch in batches]),
        )
        return cls(joined, batch_size, head.num_bytes / joined.scored_tokens)

    def spread(self, rows: int) -> HeldOut:
        """``rows`` of these rows, from all over: neighbouring rows are often of one document."""
        available = len(self.rows.tokens)
        chosen = torch.arange(min(rows, available)) * available // min(rows, available)
        kept = Batch(self.rows.tokens[chosen], self.rows.targets[chosen], self.rows.segment_ids[chosen])
        return HeldOut(kept, self.batch_size, self.bytes_per_token)

    def batches(self, device: torch.device, ranks: Ranks = _ALONE) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's tokens, targets and segment ids, (at most ``batch_size``, T) each, on ``device``.

        As many for every rank: rows without targets are added where they do not come out even.
        """
        missing = -len(self.rows.tokens) % (self.batch_size * ranks.data_ranks) if ranks.world > 1 else 0
        fills = ((self.rows.tokens, 0), (self.rows.targets, IGNORED), (self.rows.segment_ids, 0))
        padded = [nn.functional.pad(column, (0, 0, 0, missing), value=value) for column, value in fills]
        pieces = list(zip(*(column.split(self.batch_size) for column in padded), strict=True))
        here = ranks.columns(self.rows.tokens.shape[1])
        for tokens, targets, segment_ids in pieces[ranks.data_rank :: ranks.data_ranks]:
            yield tokens[:, here].to(device), targets[:, here].to(device), segment_ids[:, here].to(device)


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean over all held-out targets, nats a token."""
    nats_per_byte: float
    """The same for a byte of text: comparable between tokenizers."""
    loss_by_position: list[float | None]
    """Mean over the rows at ``bin_width`` positions each, from the row's start; None where no row has a target."""
    bin_width: int
    tokens: int
    """Targets."""


@torch.no_grad()
def evaluate(model: Gecko, held_out: HeldOut, precision: Precision, ranks: Ranks = _ALONE) -> Evaluation:
    """The loss of ``model`` on the held-out rows, by all ranks together; sums in float64."""
    device = next(model.parameters()).device
    length = held_out.rows.targets.shape[1]
    total = torch.zeros(length, dtype=torch.float64, device=device)
    count = torch.zeros(length, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    here = ranks.columns(length)
    for tokens, targets, segment_ids in held_out.batches(device, ranks):
        with autocast(precision, device):
            losses, _ = model.token_losses(tokens, targets, segment_ids, context=ranks.context)
        total[here] += losses.sum(dim=0, dtype=torch.float64)
        count[here] += (targets != IGNORED).sum(dim=0)
    release(model)
    model.train(was_training)
    total, count = ranks.sum(torch.stack([total, count]).cpu())
    return _summary(total, count, held_out.bytes_per_token)


def _summary(total: Tensor, count: Tensor, bytes_per_token: float) -> Evaluation:
    """``total`` loss and ``count`` of targets, (T,) each."""
    width = -(-len(total) // POSITION_BINS)
    bins = zip(_binned(total, width).tolist(), _binned(count, width).tolist(), strict=True)
    by_position = [loss / targets if targets else None for loss, targets in bins]
    targets = int(count.sum())
    loss = float(total.sum()) / targets
    return Evaluation(loss, loss / bytes_per_token, by_position, width, targets)


def _binned(values: Tensor, width: int) -> Tensor:
    return nn.functional.pad(values, (0, -len(values) % width)).view(-1, width).sum(dim=1)
