"""Options of the server, which ``gecko serve`` takes as they stand here. Nothing that is imported here takes time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from gecko.io.files import found_at
from gecko.records import Positive, Range, check, option

DEFAULT_ROWS = 16
MOST_ROWS, FEWEST_ROWS = 64, 4
ROWS_BYTES = 2 << 30
"""Memory that the states of all rows may take where their number is not given."""
WINDOW_DTYPES = ("float32", "bfloat16")
_MEGABYTE = 1 << 20


def rows_in_memory(state_bytes: int) -> int:
    """Return the number of rows for a model whose state of one sequence has ``state_bytes``."""
    return max(FEWEST_ROWS, min(MOST_ROWS, ROWS_BYTES // state_bytes))


AboveZero = Annotated[int, Range("must be above 0 and finite", above=0)]


@dataclass(frozen=True)
class Limits:
    """Limits beyond which the server refuses requests. Raise ValueError if a number is out of range."""

    rows: AboveZero = DEFAULT_ROWS
    """Maximum number of requests in prefill or decoding."""
    queue: Annotated[int, Range("must be at least 0 (no request waits)", least=0)] = option(256, min=0)
    """Requests that may wait; further ones get status 429."""
    body_bytes: AboveZero = option(16 << 20, "--max-body", unit=_MEGABYTE, min=1, metavar="MB")
    """Limit for the body of a request; status 413 above."""
    memory_bytes: AboveZero = option(256 << 20, "--request-memory", unit=_MEGABYTE, min=1, metavar="MB")
    """Limit for all requests together; status 503 above."""
    header_seconds: Positive = 10
    """Seconds for the header of a request to arrive; 408 after that."""
    body_seconds: Positive = 30
    """Seconds for the body to arrive after the header; 408 after that."""
    prompt_tokens: AboveZero = option(4_000_000, "--max-prompt-tokens", min=1)
    """Limit for the tokens of a prompt; status 400 above."""
    new_tokens: AboveZero = option(4096, "--max-new-tokens", min=1)
    """Limit for the tokens that a request may ask for; status 400 above."""
    seconds: Positive = option(600, "--max-seconds")
    """Time limit of a request; it ends with the tokens generated until then."""

    def __post_init__(self) -> None:
        check(self)
        if self.memory_bytes < self.body_bytes:
            raise ValueError(
                f"memory_bytes must be at least body_bytes, {self.body_bytes}; got {self.memory_bytes}. "
                "Raise --request-memory, or lower --max-body."
            )


@dataclass(frozen=True)
class Options:
    """Options of the server. Raise FileNotFoundError if there is no folder of states, ValueError if the dtype of the
    windows is unknown."""

    host: str = option("127.0.0.1")
    """Address to listen on; 0.0.0.0 accepts other machines."""
    allowed_hosts: list[str] = option([], "--allowed-host", metavar="NAME")
    """Additional host name that clients may use, for example behind a proxy."""
    name: str | None = option(show_default="last part of MODEL")
    """Name of the model in the API."""
    limits: Limits = field(default_factory=Limits)
    prefix_cache_bytes: int = option(256 << 20, "--prefix-cache", unit=_MEGABYTE, min=0, metavar="MB")
    """Memory for the states of shared prompt prefixes; 0 for none."""
    window_dtype: str | None = option(show_default="float32")
    """Dtype of the attention windows while text is generated: bfloat16 takes half their memory and less time, and
    rounds. For models on the CPU."""
    states: Path | None = option(metavar="FOLDER")
    """Folder of reading states that requests may name: "state": "book"."""
    states_bytes: int = option(0, "--states-disk", unit=_MEGABYTE, min=0, metavar="MB")
    """Limit for the states folder; clients may save and delete states if above 0."""
    response_bytes: int = option(1 << 30, "--response-memory", unit=_MEGABYTE, min=0, metavar="MB")
    """Memory for responses that can be continued; 0 for none."""
    api_key: str | None = None
    """Key that clients must send."""
    grace_seconds: float = option(30, "--grace", min=0)
    """Seconds that running requests get after SIGTERM."""

    def __post_init__(self) -> None:
        if self.window_dtype not in (None, *WINDOW_DTYPES):
            raise ValueError(f"--window-dtype must be one of {', '.join(WINDOW_DTYPES)}; got {self.window_dtype!r}.")
        if self.states is not None and not self.states.is_dir():
            there = f"{self.states}: {found_at(self.states)}" if self.states.exists() else f"there is no {self.states}"
            raise FileNotFoundError(f"--states must be a folder with reading states (NAME.state); {there}.")
