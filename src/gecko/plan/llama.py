"""What a Llama computes and keeps."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.baselines import LlamaConfig
from gecko.generation.llama import PIECE_TOKENS
from gecko.plan.units import FLOAT, Flops, twice_backward


@dataclass(frozen=True)
class LlamaCounts:
    config: LlamaConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """In products of matrices. For a layer, with D, K, F the widths of the model, of all keys and of the
        feed-forward, and T the tokens of a row, which is one document:

            part        forward                    backward
            linear      2 (2 D² + 2 K D + 3 F D)   twice
            attention   2 T D                      5 T D: scores are computed again
            head        2 D · vocabulary           twice (once for the model)

        Attention is taken to be a kernel that skips the keys after a query, which are half of them.
        """
        config, width = self.config, self.config.model_dim
        maps = 2 * width + 2 * config.key_value_dim + 3 * config.ffn_dim
        attention = 1.0 * config.num_layers * length * width
        return {
            "linear": twice_backward(config.num_layers * 2.0 * width * maps),
            "attention": Flops(2 * attention, 5 * attention),
            "head": twice_backward(2.0 * width * config.vocab_size),
        }

    def keys(self, length: int) -> str:
        return f"{length // 2:,} keys on average"

    def activations(self, itemsize: int) -> float:
        """The residual stream and norms are float32 always."""
        config = self.config
        # Besides those: queries and what attention gives, and the inputs of the other maps. In float32 an input is
        # kept once for all maps; autocast makes a copy for each.
        others = 4 if itemsize == FLOAT else 7
        kept = (4 * FLOAT + others * itemsize) * config.model_dim
        kept += 2 * itemsize * config.key_value_dim + 4 * itemsize * config.ffn_dim
        return float(kept + FLOAT * (config.num_heads + 2))

    def tables(self) -> int:
        return 0

    def projections(self) -> int:
        return 3 * self.config.model_dim + 2 * self.config.key_value_dim + 2 * self.config.ffn_dim

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        one = self.config.num_layers * self.config.key_value_dim * length * itemsize
        return {"keys": one, "values": one}

    def piece(self) -> int:
        return PIECE_TOKENS

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """Ranks do not share rows."""
        return 0
