"""Requests to the engine and the events that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from gecko.config import GeckoConfig
from gecko.inference.grammar import Constraint
from gecko.inference.pieces import pieces
from gecko.inference.sampling import Sampling, check_seed
from gecko.state import GeckoState

EndReason = Literal["length", "stop", "cancelled", "error", "constraint"]
"""``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn, or the constraint is fulfilled.
``cancelled``: by the caller. ``error``: the logits were not finite, or prefill failed. ``constraint``: the constraint
allows no further token, or became too complex."""


class QueueFullError(RuntimeError):
    """The queue of waiting requests is full."""


class EndState(NamedTuple):
    """State of a sequence at its end."""

    state: GeckoState
    """Has read the prompt and the new tokens but ``pending_token``."""
    pending_token: int | None
    position: int
    """Tokens of the sequence, with the pending one."""


class KeptStates:
    """States on the CPU that the engine leaves for the caller of a request, each before its next event."""

    prompt: GeckoState | None = None
    end: EndState | None = None
    """None if the request was cancelled or failed."""


@dataclass(frozen=True, eq=False)
class Request:
    """A sequence to continue. With ``min_new_tokens`` 0, the tokens are those that ``gecko.generate`` returns for the
    same arguments."""

    prompt: Tensor
    """1-D integer ids; at least one. None are needed where a ``Prefill`` has read the prompt."""
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
    min_new_tokens: int = 0
    """Number of tokens before which no stop token is drawn."""
    prompt_logprobs: int | None = None
    """n: return an event ``PromptRead`` with log-probabilities of the prompt's tokens and of the n most likely tokens
    at their places. The whole prompt is then read, without the prefix cache."""
    constraint: Constraint | None = None
    keep: KeptStates | None = None
    """Receives states of the sequence; None: they are dropped."""

    @property
    def start_position(self) -> int:
        """Position of the first token of the prompt."""
        return 0 if self.state is None else self.state.position[0]

    def check(self, config: GeckoConfig) -> None:
        """Raise TypeError or ValueError if the prompt is empty or not ids of a model of ``config``, or a number is out
        of range."""
        if not isinstance(self.prompt, Tensor) or self.prompt.numel() == 0:
            raise ValueError("a prompt must be a tensor of at least one token id; got none. Try the document start.")
        for _ in pieces(config, [self.prompt], self.state, piece=self.prompt.numel()):
            pass
        check_new_tokens(self.max_new_tokens, self.sampling, config)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in 0..{self.max_new_tokens}, max_new_tokens; got {self.min_new_tokens}."
            )
        if self.min_new_tokens and (self.stop_tokens | self.sampling.excluded).issuperset(range(config.vocab_size)):
            raise ValueError(
                "stop_tokens and logit_bias must leave a token to draw before min_new_tokens; got the whole vocabulary."
            )
        check_seed(self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= config.vocab_size:
                raise ValueError(
                    f"{name} must be None or in 0..{config.vocab_size}, the size of the vocabulary; got {count}."
                )
        if self.constraint is not None and self.constraint.vocab_size != config.vocab_size:
            raise ValueError(
                f"a constraint must be compiled for the model's vocabulary of {config.vocab_size}; "
                f"got one for {self.constraint.vocab_size}."
            )


def check_new_tokens(max_new_tokens: int, sampling: Sampling, config: GeckoConfig) -> None:
    """Raise ValueError if the number of tokens or an id of the logit bias is out of range for a model of ``config``."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0; got {max_new_tokens}.")
    sampling.check_ids(config.vocab_size)


@dataclass(frozen=True)
class Token:
    """Event: a generated token of a request."""

    request_id: int
    token: int
    logprob: float | None = None
    """In nats, before temperature and cuts; None if it was not requested."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the most likely tokens, in descending order."""


class PromptScores(NamedTuple):
    """Log-probabilities in nats of the n tokens of a prompt, given the tokens before them; the first one has none."""

    tokens: Tensor
    """(n,) int64."""
    logprobs: Tensor
    """(n − 1,) float64, of the tokens after the first."""
    top_ids: Tensor
    """(n − 1, k) int64, the most likely tokens at these places, in descending order."""
    top_logprobs: Tensor
    """(n − 1, k) float64."""


@dataclass(frozen=True, eq=False)
class PromptRead:
    """Event: the log-probabilities of a prompt, if they were requested; it comes before the first generated token."""

    request_id: int
    scores: PromptScores


@dataclass(frozen=True)
class Finished:
    """Event: a request ended; no events of it follow."""

    request_id: int
    reason: EndReason
    error: str | None
    position: int
    """Tokens of the sequence: before the request, read of its prompt, and generated."""
    stop_token: Token | None = None
    """The stop token, if log-probabilities were requested."""


Event = Token | PromptRead | Finished
