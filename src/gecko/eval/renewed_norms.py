"""Megalodon's released evaluator: norm statistics of the last chunks instead of all that was read.

The release scores a text 2 chunks at a time. Once 8 chunks were read and more text follows, after each such call it
reads the last 6 chunks once more from an empty state, and takes the norms' statistics of that, final norm included;
moving average and attention go on as they were. So the cumulative norm never averages over more than 8 chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.generation.reading import inference, pieces
from gecko.model import Gecko
from gecko.ops.loss import IGNORED
from gecko.state import GeckoState

CHUNKS_A_CALL, FIRST_RENEWAL = 2, 8
KEPT = FIRST_RENEWAL - CHUNKS_A_CALL


def renewed_losses(model: Gecko, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """Losses in nats of all tokens of one text but its first, in pieces of 2 chunks, on the CPU."""
    chunk, device = model.config.chunk_size, model.embedding.weight.device
    state, recent, read = None, torch.empty(0, dtype=torch.int64), 0
    for part, follows in _with_successor(pieces(model.config, tokens, piece=CHUNKS_A_CALL * chunk)):
        targets = torch.cat([part[1:], follows])
        padded = F.pad(targets, (0, len(part) - len(targets)), value=IGNORED)
        with inference(model):
            losses, state = model.token_losses(part[None].to(device), padded[None].to(device), state=state)
            recent, read = torch.cat([recent, part])[-KEPT * chunk :], read + len(part)
            if read >= FIRST_RENEWAL * chunk and len(follows):
                _, renewed = model.hidden(recent[None].to(device))
                state = _with_norms(state, renewed)
        yield losses[0, : len(targets)].cpu()


def _with_norms(state: GeckoState, norms: GeckoState) -> GeckoState:
    mixers = tuple(
        dataclasses.replace(mixer, norm=other.norm) for mixer, other in zip(state.mixers, norms.mixers, strict=True)
    )
    return dataclasses.replace(state, mixers=mixers, final_norm=norms.final_norm)


def _with_successor(parts: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Every part with the first token of the next one, (1,), or none after the last, (0,)."""
    held: Tensor | None = None
    for part in parts:
        if held is not None:
            yield held, part[:1]
        held = part
    if held is not None:
        yield held, held[:0]
