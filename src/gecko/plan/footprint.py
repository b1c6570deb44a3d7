"""What a model of some config is made of, and the memory it takes."""

from __future__ import annotations

from typing import Literal

import torch

from gecko.config import GeckoConfig
from gecko.generation import piece_length
from gecko.model import Gecko
from gecko.ops.scan_plan import SCAN_CHUNK
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
        sizes[state_part(name)] += tensor.nbytes
    return sizes


def inference_memory(config: GeckoConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Bytes to read and to decode ``batch`` texts. Beyond one piece, ``length`` changes nothing."""
    piece = min(length, piece_length(config))
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(state_by_part(config).values()),
        "work on a piece of the prompt": WORK_FACTOR * int(piece * block_activations(config, dtype.itemsize)),
    }


def training_memory(config: GeckoConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing."""
    weights = sum(parameters_by_component(config).values()) * FLOAT
    kept = batch * length * kept_by_model(config, FLOAT, "full" if recompute else "none")
    if recompute:
        kept += batch * length * block_activations(config, FLOAT)
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": int(kept)}


def kept_by_model(config: GeckoConfig, itemsize: int, recompute: Literal["none", "selective", "full"]) -> float:
    """Bytes that all blocks keep for the backward pass, a token, with each way of recomputing activations."""
    if recompute == "none":
        return config.num_layers * block_activations(config, itemsize)
    kept = config.model_dim * FLOAT
    if recompute == "selective":
        branches = 2 if config.swiglu else 1
        outputs = config.key_dim + 2 * config.value_dim + 3 * config.model_dim + branches * config.ffn_dim
        kept += outputs * itemsize
    return config.num_layers * kept


def block_activations(config: GeckoConfig, itemsize: int) -> float:
    """Bytes that one block keeps for its backward pass, a token; ``itemsize`` of the dtype that products have.

    Counted on the code: the residual stream, norms, averages, queries, keys and the memory are float32 always.
    Besides there are ``block_tables`` a call.
    """
    model_dim, key_dim, value_dim = config.model_dim, config.key_dim, config.value_dim
    # In float32 a tensor is kept once for all its products; autocast makes a copy for each.
    residual = 4 * FLOAT + (3 * FLOAT if itemsize == FLOAT else 6 * itemsize)
    kept = float(residual * model_dim + 6 * itemsize * value_dim)
    windows = 1 if config.attention == "chunk" else 2
    kept += FLOAT * ((3 + windows) * key_dim + 9 * config.timestep_groups)
    kept += (4 if config.swiglu else 2) * itemsize * config.ffn_dim
    kept += 2 * FLOAT * model_dim * config.cema_modes / SCAN_CHUNK
    if config.memory != "none":
        kept += FLOAT * ((5 if config.memory == "adaptive" else 4) * key_dim + value_dim)
        kept += FLOAT * key_dim * (3 * config.key_head_dim + 4 * config.value_head_dim) / config.chunk_size
    return kept


def block_tables(config: GeckoConfig) -> int:
    """Bytes of the tables of powers that one block's moving average keeps for its backward pass, a call."""
    return config.model_dim * SCAN_CHUNK * (14 * FLOAT * config.cema_modes + FLOAT * SCAN_CHUNK)


def _component(name: str) -> str:
    parts = name.split(".")
    if parts[0] in ("embedding", "head"):
        return parts[0]
    if any("norm" in part for part in parts):
        return "norms"
    if "cema" in parts:
        return "CEMA"
    return "feed-forward" if "feed_forward" in parts else "attention projections"


def state_part(name: str) -> str:
    """Which of ``STATE_PARTS`` a tensor of a reading state belongs to."""
    parts = name.split(".")
    if parts[0] == "clock":
        return "clock"
    if "attention" in parts:
        return "attention window"
    if "memory" in parts:
        return "working memory"
    return "CEMA" if "cema" in parts else "timestep norms"
