"""Iterator over the tokens that continue prefilled sequences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, cast

import torch

from gecko.inference.batch import DecodingBatch, DecodingSequence
from gecko.inference.prefill import Prefill, inference, read
from gecko.inference.request import EndState, check_new_tokens
from gecko.inference.sampling import Sampling
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

FinishReason = Literal["length", "stop"]
"""``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn, or ``TokenStream.stop`` called."""


class NewToken(NamedTuple):
    """A generated token and the index of its sequence."""

    row: int
    token: int


class TokenStream:
    """Iterator over the tokens that continue prefilled sequences; each step yields its tokens in the order of rows.

    The sequences are decoded in one batch, each at its own position, and leave the batch when they are finished. The
    tokens of a sequence depend on its own prefill and seed only. A stop token is neither yielded nor read.

    Args:
        prefills: one per row.
        seeds: one per row; a row draws one random number per token.
        max_new_tokens: maximum number of tokens per row, at least 0.

    Raises:
        ValueError: a number is out of range; while iterating, logits are not finite.
    """

    def __init__(
        self,
        model: Gecko,
        prefills: Sequence[Prefill],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:
        check_new_tokens(max_new_tokens, sampling, model.config)
        self._model, self._rows = model, len(prefills)
        self._finished: dict[int, EndState] = {}
        self._reasons: dict[int, FinishReason] = {}
        stops = frozenset(stop_tokens)
        with inference(model):
            self._batch = DecodingBatch(model, len(prefills))
            for row, (prefill, seed) in enumerate(zip(prefills, seeds, strict=True)):
                position = prefill.state.position[0]
                sequence = DecodingSequence(row, sampling, seed, max_new_tokens, stops, position)
                self._batch.add(sequence, prefill)
            if max_new_tokens == 0:
                self._retire(dict.fromkeys(range(self._rows), "length"))

    def __iter__(self) -> Iterator[NewToken]:
        while self._batch.sequences:
            yield from self._step()

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """One per row; None if the row is not finished."""
        return [self._reasons.get(row) for row in range(self._rows)]

    @property
    def state(self) -> GeckoState:
        """State of every row after all of its tokens so far; one model call per row reads its last token."""
        with inference(self._model):
            active = {one.key: self._batch.end(slot) for slot, one in enumerate(self._batch.sequences)}
            rows = self._finished | active
            stacked = GeckoState.stack([self._final_state(rows[row]) for row in range(self._rows)])
        # Tensors cloned outside inference mode can take part in autograd.
        return stacked.map(torch.clone)

    def stop(self, row: int) -> None:
        """Finish a row; no effect if it is finished already."""
        with inference(self._model):
            self._retire({slot: "stop" for slot, one in enumerate(self._batch.sequences) if one.key == row})

    def _step(self) -> list[NewToken]:
        """Generate the next token of every active row; only this reads the tokens of the step before."""
        with inference(self._model):
            self._batch.decode()
            for slot, message in self._batch.broken().items():
                raise ValueError(f"row {self._batch.sequences[slot].key}: {message}")
            drawn = self._batch.draw()
            self._retire({slot: cast(FinishReason, end.reason) for slot, (_, end) in enumerate(drawn) if end})
        return sorted(NewToken(token.request_id, token.token) for token, _ in drawn if token)

    def _retire(self, finished: dict[int, FinishReason]) -> None:
        """Remove the sequences in some slots."""
        # In descending order, so that the sequence that moves into a freed slot is one that stays.
        for slot in sorted(finished, reverse=True):
            row = self._batch.sequences[slot].key
            self._finished[row], self._reasons[row] = self._batch.end(slot), finished[slot]
            self._batch.remove(slot)

    def _final_state(self, row: EndState) -> GeckoState:
        if row.pending_token is None:
            return row.state
        return read(self._model, [torch.tensor([row.pending_token], device="cpu")], row.state).state
