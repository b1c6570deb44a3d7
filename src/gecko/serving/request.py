"""What the engine is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from gecko.config import GeckoConfig
from gecko.generation import Sampling
from gecko.generation.reading import pieces
from gecko.state import GeckoState

EndReason = Literal["length", "stop", "cancelled", "error"]
"""``length``: as many tokens as asked for. ``stop``: a stop token came. ``error``: the logits were not finite, or
the prompt could not be read."""
_SEEDS = 1 << 64


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


@dataclass(frozen=True, eq=False)
class Request:
    """One text to continue. Its tokens are those that ``gecko.generate`` makes of the same arguments."""

    prompt: Tensor
    """1-D integer ids, at least one."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end the text; they are not returned."""
    log_probabilities: int | None = None
    """None: none. n: those of every new token and of the n likeliest ones in its place, by the model: before anything
    in ``sampling`` changes them."""
    state: GeckoState | None = None
    """Of one row: what was read before the prompt."""

    @property
    def begins_at(self) -> int:
        """Position of the prompt's first token."""
        return 0 if self.state is None else self.state.position[0]

    def check(self, config: GeckoConfig) -> None:
        """Raises TypeError or ValueError for what no model of ``config`` can do."""
        if not isinstance(self.prompt, Tensor) or self.prompt.numel() == 0:
            raise ValueError("a prompt must be a tensor of at least one token id; got an empty one, or none.")
        for _ in pieces(config, [self.prompt], self.state, piece=self.prompt.numel()):
            pass
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0; got {self.max_new_tokens}.")
        if not -_SEEDS // 2 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be a number of 64 bits; got {self.seed}.")
        if self.log_probabilities is not None and not 0 <= self.log_probabilities <= config.vocab_size:
            raise ValueError(
                f"log_probabilities must be None, or of how many of the {config.vocab_size} ids to tell; "
                f"got {self.log_probabilities}."
            )
        self.sampling.check_ids(config.vocab_size)


@dataclass(frozen=True)
class Token:
    """A new token of a request."""

    request_id: int
    token: int
    log_probability: float | None = None
    """In nats, by the model, before temperature and cuts; None where it was not asked for."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """(id, log-probability), the likeliest first."""


@dataclass(frozen=True)
class Finished:
    """The last event of a request."""

    request_id: int
    reason: EndReason
    error: str | None
    position: int
    """Tokens of the text: those before the request, those of its prompt that were read, and the new ones."""


Event = Token | Finished
