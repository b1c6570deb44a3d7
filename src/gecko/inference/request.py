"""Requests to the engine and the events that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gecko.config import GeckoConfig
from gecko.inference.prefill import pieces
from gecko.inference.sampling import Sampling
from gecko.state import GeckoState

EndReason = Literal["length", "stop", "cancelled", "error"]
"""``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn. ``cancelled``: by the caller.
``error``: the logits were not finite, or prefill failed."""
_SEEDS = 1 << 64


class QueueFullError(RuntimeError):
    """The queue of waiting requests is full."""


@dataclass(frozen=True, eq=False)
class Request:
    """A sequence to continue; the tokens are those that ``gecko.generate`` returns for the same arguments."""

    prompt: Tensor
    """1-D integer ids; at least one."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end the sequence; they are not returned."""
    logprobs: int | None = None
    """n: return log-probabilities of every new token and of the n most likely tokens at its position, as the model
    predicts them before ``sampling`` is applied. None: return none."""
    state: GeckoState | None = None
    """State of one row before the prompt."""

    @property
    def start_position(self) -> int:
        """Position of the first token of the prompt."""
        return 0 if self.state is None else self.state.position[0]

    def check(self, config: GeckoConfig) -> None:
        """Check the request for a model of ``config``.

        Raises:
            TypeError, ValueError: the prompt is empty or not ids of the model, or a number is out of range.
        """
        if not isinstance(self.prompt, Tensor) or self.prompt.numel() == 0:
            raise ValueError("a prompt must be a tensor of at least one token id; got none. Try the document start.")
        for _ in pieces(config, [self.prompt], self.state, piece=self.prompt.numel()):
            pass
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0; got {self.max_new_tokens}.")
        if not -_SEEDS // 2 <= self.seed < _SEEDS:
            raise ValueError(f"seed must fit in 64 bits; got {self.seed}. Try a smaller one.")
        if self.logprobs is not None and not 0 <= self.logprobs <= config.vocab_size:
            raise ValueError(
                f"logprobs must be None or in 0..{config.vocab_size}, the size of the vocabulary; got {self.logprobs}."
            )
        self.sampling.check_ids(config.vocab_size)


@dataclass(frozen=True)
class Token:
    """Event: a generated token of a request."""

    request_id: int
    token: int
    logprob: float | None = None
    """In nats, before temperature and cuts; None if it was not requested."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the most likely tokens, in descending order."""


@dataclass(frozen=True)
class Finished:
    """Event: a request ended; no events of it follow."""

    request_id: int
    reason: EndReason
    error: str | None
    position: int
    """Tokens of the sequence: before the request, read of its prompt, and generated."""


Event = Token | Finished
