"""What plans ask of an architecture."""

from __future__ import annotations

from typing import Protocol

from gecko.baselines import LlamaConfig, ModelConfig
from gecko.plan.gecko import GeckoCounts
from gecko.plan.llama import LlamaCounts
from gecko.plan.units import Flops


class Counts(Protocol):
    """Numbers of a config, counted on the code."""

    def flops(self, length: int) -> dict[str, Flops]:
        """FLOPs a token of a row of ``length``, which is long against a chunk, by part, all layers together."""

    def keys(self, length: int) -> str:
        """In words, how many keys attention computes for a token of such a row."""

    def activations(self, itemsize: int) -> float:
        """Bytes that one block keeps for its backward pass, a token; ``itemsize`` of the dtype that products have.
        Besides there are ``tables`` a call."""

    def tables(self) -> int:
        """Bytes that one block keeps for its backward pass whatever the tokens are, a call."""

    def projections(self) -> int:
        """Numbers that the linear layers of a block put out, a token."""

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """Bytes of what is kept of one row of ``length`` tokens, by part; ``itemsize`` of the weights' dtype."""

    def piece(self) -> int:
        """Tokens of a prompt that are read at once."""

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """Bytes that the busiest of so many context ranks sends in a layer's forward pass, a row; backward, as many."""


def counts_of(config: ModelConfig) -> Counts:
    return LlamaCounts(config) if isinstance(config, LlamaConfig) else GeckoCounts(config)
