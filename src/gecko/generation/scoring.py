"""How well a text of any length is predicted, token by token, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gecko.generation.reading import inference, pieces
from gecko.model import Gecko
from gecko.ops.loss import token_cross_entropy
from gecko.state import GeckoState


class Scored(NamedTuple):
    losses: Tensor
    """Cross-entropy of every token of a piece in nats; of a text's first token there is none."""
    state: GeckoState
    """Of one row, after the piece."""


def score(
    model: Gecko, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Iterator[Scored]:
    """Read one text, piece by piece; arguments and errors as for ``read``, but there may be no token at all."""
    device = model.embedding.weight.device
    state = None if state is None else state.to(device)
    last = None
    for part in pieces(model.config, tokens, state, piece=piece):
        with inference(model):
            hidden, state = model.hidden(part.unsqueeze(0).to(device), state=state)
            before = hidden[0, :-1] if last is None else torch.cat([last, hidden[0, :-1]])
            targets = part[1:] if last is None else part
            losses = hidden.new_empty(0)
            if len(targets):
                losses = token_cross_entropy(before, model.head.weight, targets.to(device))
            last = hidden[0, -1:]
        yield Scored(losses, state)
