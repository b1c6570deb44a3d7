"""What a model of some config is made of, and the memory it takes."""

from __future__ import annotations

import torch

from gecko.config import GeckoConfig
from gecko.generation import piece_length
from gecko.model import Gecko
from gecko.state import GeckoState

FLOAT = 4
"""Bytes of a float32, which states, gradients and optimizer moments are."""
WORK_FACTOR = 2
"""Memory in use while one block reads, over what it would keep for a backward pass; measured on the CPU."""
COMPONENTS = ("embedding", "CEMA", "norms", "attention projections", "feed-forward", "head")
STATE_PARTS = ("clock", "timestep norms", "CEMA", "attention window", "working memory")


def parameters_by_component(config: GeckoConfig) -> dict[str, int]:
    """Numbers in every component; of a tied head none. Allocates nothing."""
    with torch.device("meta"):
        model = Gecko(config)
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        counts[_component(name)] += parameter.numel()
    return counts


def state_by_part(config: GeckoConfig) -> dict[str, int]:
    """Bytes of one row's reading state, float32."""
    sizes = dict.fromkeys(STATE_PARTS, 0)
    for name, tensor in GeckoState.empty(config, device="meta").tensors().items():
        sizes[_state_part(name)] += tensor.nbytes
    return sizes


def inference_memory(config: GeckoConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Bytes to read and to decode ``batch`` texts. Beyond one piece, ``length`` changes nothing."""
    piece = min(length, piece_length(config))
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(state_by_part(config).values()),
        "work on a piece of the prompt": WORK_FACTOR * int(piece * block_activations(config)) * dtype.itemsize,
    }


def training_memory(config: GeckoConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing."""
    weights = sum(parameters_by_component(config).values()) * FLOAT
    tokens, per_block = batch * length, block_activations(config)
    if recompute:
        kept = tokens * (config.num_layers * config.model_dim + per_block)
    else:
        kept = tokens * config.num_layers * per_block
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": int(kept) * FLOAT}


def block_activations(config: GeckoConfig) -> float:
    """Numbers that one block keeps for its backward pass, a token; counted on the code, good to about 15 %."""
    key_head, value_head = config.key_head_dim, config.value_head_dim
    kept = 7.0 * config.model_dim + 4 * config.key_dim + 6 * config.value_dim + 9 * config.timestep_groups
    kept += (4 if config.swiglu else 2) * config.ffn_dim
    kept += config.model_dim * config.cema_modes / 32
    if config.memory != "none":
        kept += 6.5 * config.key_dim + config.value_dim
        kept += 3 * config.key_dim * (key_head + value_head) / config.chunk_size
    return kept


def _component(name: str) -> str:
    parts = name.split(".")
    if parts[0] in ("embedding", "head"):
        return parts[0]
    if any("norm" in part for part in parts):
        return "norms"
    if "cema" in parts:
        return "CEMA"
    return "feed-forward" if "feed_forward" in parts else "attention projections"


def _state_part(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "clock":
        return "clock"
    if "attention" in parts:
        return "attention window"
    if "memory" in parts:
        return "working memory"
    return "CEMA" if "cema" in parts else "timestep norms"
