"""What a model of some config is made of, and the memory it takes."""

from __future__ import annotations

import torch

from gecko.baselines import LlamaConfig, ModelConfig, meta_model
from gecko.plan.counts import counts_of
from gecko.plan.units import FLOAT
from gecko.recomputation import ActivationCheckpointing

WORK_FACTOR = 2
"""Memory in use while one block reads, over what it would keep for a backward pass; measured on the CPU."""
COMPONENTS = ("embedding", "CEMA", "norms", "attention projections", "feed-forward", "head")


def parameters_by_component(config: ModelConfig) -> dict[str, int]:
    """Numbers in every component; of a tied head none. Allocates nothing."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in meta_model(config).named_parameters():
        counts[_component(name)] += parameter.numel()
    if isinstance(config, LlamaConfig):
        del counts["CEMA"]
    return counts


def inference_memory(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Bytes to read and to decode ``batch`` texts. For a Gecko, ``length`` changes nothing beyond one piece."""
    counts = counts_of(config)
    piece = min(length, counts.piece())
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(counts.state(length, dtype.itemsize).values()),
        "work on a piece of the prompt": WORK_FACTOR * int(piece * counts.activations(dtype.itemsize)),
    }


def training_memory(config: ModelConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing."""
    weights = sum(parameters_by_component(config).values()) * FLOAT
    mode: ActivationCheckpointing = "full" if recompute else "none"
    kept = batch * length * kept_by_model(config, FLOAT, mode) + tables_of_model(config, mode)
    if recompute:
        kept += batch * length * counts_of(config).activations(FLOAT)
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": int(kept)}


def kept_by_model(config: ModelConfig, itemsize: int, recompute: ActivationCheckpointing) -> float:
    """Bytes that all blocks keep for the backward pass, a token, with each way of recomputing activations."""
    if recompute == "none":
        return config.num_layers * counts_of(config).activations(itemsize)
    kept = config.model_dim * FLOAT
    if recompute == "selective":
        kept += counts_of(config).projections() * itemsize
    return config.num_layers * kept


def tables_of_model(config: ModelConfig, recompute: ActivationCheckpointing) -> int:
    """Bytes that are kept besides, whatever the tokens: of all blocks, or of the one that is computed again."""
    return counts_of(config).tables() * (config.num_layers if recompute == "none" else 1)


def _component(name: str) -> str:
    parts = name.split(".")
    if "embedding" in parts or "embed_tokens" in parts:
        return "embedding"
    if parts[0] in ("head", "lm_head"):
        return "head"
    if any("norm" in part for part in parts):
        return "norms"
    if "cema" in parts:
        return "CEMA"
    return "feed-forward" if "feed_forward" in parts or "mlp" in parts else "attention projections"
