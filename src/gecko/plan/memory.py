"""Parameters by component, and the memory of inference and training.

The first part is for a model on one device (``gecko info``), the second for one GPU of many (``gecko plan``). Bytes of
activations are measured: a dry run calls the code on tensors without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from gecko.models import LanguageModel, LlamaConfig, ModelConfig, meta_model
from gecko.parallel.mesh import MeshSizes
from gecko.plan.counts import FLOAT, HALF, counts_of
from gecko.plan.device import CARRIED, COMMUNICATION, GRADIENTS, KEPT, LOSS, OPTIMIZER, OTHER, PARAMETERS, WORK
from gecko.plan.dry_run import block_memory, step_peak
from gecko.train.optimizer import block_matrix_names, matrix_names
from gecko.train.run import Run

COMPONENTS = ("embedding", "CEMA", "norms", "attention projections", "feed-forward", "head")


def parameters_by_component(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each component without allocating them. A tied head counts as zero."""
    counts = dict.fromkeys(COMPONENTS, 0)
    model = meta_model(replace(config, num_layers=1))  # all blocks have the same shapes
    of_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    for name, parameter in model.named_parameters():
        counts[_component(name)] += parameter.numel() * (config.num_layers if id(parameter) in of_blocks else 1)
    if isinstance(config, LlamaConfig):
        del counts["CEMA"]
    return counts


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


def inference_memory(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Return the bytes for prefill and decoding of ``batch`` sequences, by kind.

    For a Gecko they do not depend on ``length`` once it is longer than one piece.
    """
    counts = counts_of(config)
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(counts.state(length, dtype.itemsize).values()),
        "work on a piece of the prompt": block_memory(config, dtype, min(length, counts.piece())).work,
    }


VLLM_MEMORY = 0.9
"""The share of a GPU that vLLM is told to take (``--gpu-memory-utilization``)."""


def serving(config: ModelConfig, memory: int) -> dict[str, int] | None:
    """Return the bytes of the weights and of a sequence's state, and how many sequences fit in ``memory``, in bfloat16.

    The two counts, for ``gecko serve`` and vLLM, assume a reserve. None for a Llama, whose state grows with the text.
    """
    if isinstance(config, LlamaConfig):
        return None
    weights, state, work = inference_memory(config, torch.bfloat16, 1, counts_of(config).piece()).values()
    rest = RESERVE + weights + work
    return {
        "weights_bytes": weights, "row_bytes": state,
        # While the prompts of all rows are read, their states are beside the slots that the rows before had.
        "gecko_serve_rows": max(0, memory - rest) // (2 * state),
        "vllm_rows": max(0, int(VLLM_MEMORY * memory) - rest) // state,
    }  # fmt: skip


def training_memory(config: ModelConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Return the bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing.

    The activations of a block are measured on a piece of a row, and taken to grow with the tokens.
    """
    weights = sum(parameters_by_component(config).values()) * FLOAT
    piece = min(length, counts_of(config).piece())
    block = block_memory(config, torch.float32, piece).kept * batch * length // piece
    inputs = config.num_layers * batch * length * config.model_dim * FLOAT
    kept = inputs + block if recompute else config.num_layers * block
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": kept}


ADAM_MOMENTS = 2
RESERVE = 4 * 10**9
"""Bytes that CUDA, cuBLAS and NCCL take before a model is loaded; an assumption."""
SLACK = 0.05
"""Fraction of the other memory that is lost to fragmentation; an assumption."""
STEP_PARTS = PARAMETERS, GRADIENTS, OPTIMIZER, KEPT, WORK, LOSS, COMMUNICATION, OTHER


def step_memory(run: Run, sizes: MeshSizes) -> tuple[dict[str, int], str]:
    """Return the bytes of one GPU at the peak of a step, by kind, and the name of this moment.

    They are those of a rank that needs most, as a dry run measures them, and a reserve. Raise ImportError if Triton is
    missing.
    """
    # All ranks of the first shard have the largest part of the parameters, the last part of a row follows states.
    peak = step_peak(run, sizes, rank=sizes.context - 1)
    memory = {part: peak.uses.get(part, 0) for part in STEP_PARTS}
    if run.data.carry_state:
        memory[CARRIED] = peak.uses.get(CARRIED, 0)
    memory["reserve"] = RESERVE + int(SLACK * peak.total)
    return memory, peak.moment


def state_memory(config: ModelConfig, divided: int, *, muon: bool = False) -> dict[str, int]:
    """Return the bytes of parameters, gradients and the optimizer's state on the GPU that has most of them.

    They are exact: FSDP splits every parameter along its first dimension among ``divided`` GPUs.
    """
    model = _meta_model(config)
    matrices = block_matrix_names(model) if muon else set()
    sizes = {name: -(-len(p) // divided) * (p.numel() // len(p)) * FLOAT for name, p in model.named_parameters()}
    weights = sum(sizes.values())
    # AdamW has two moments and a step counter per parameter, Muon the momentum of a matrix.
    state = sum(size if name in matrices else ADAM_MOMENTS * size + FLOAT for name, size in sizes.items())
    return {PARAMETERS: weights, GRADIENTS: weights, OPTIMIZER: state}


@dataclass(frozen=True)
class GroupSizes:
    """Bytes of the parameter groups that FSDP gathers together."""

    blocks: int
    """Bytes of all blocks, in the dtypes in which they are gathered."""
    rest: int
    """Bytes of embedding, final norm and head in float32."""
    gradients: int
    """Bytes of all gradients in float32."""


@lru_cache(maxsize=1)
def group_sizes(config: ModelConfig, *, bfloat16: bool) -> GroupSizes:
    """Return the sizes of the groups that are gathered. With ``bfloat16`` the blocks' matrices are in that dtype."""
    model = _meta_model(config)
    blocks = sum(_gathered(block, bfloat16) for block in model.blocks)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    total = sum(p.numel() for p in model.parameters())
    return GroupSizes(blocks, (total - in_blocks) * FLOAT, total * FLOAT)


def _gathered(block: nn.Module, bfloat16: bool) -> int:
    matrices = matrix_names(block)
    return sum(p.numel() * (HALF if bfloat16 and name in matrices else FLOAT) for name, p in block.named_parameters())


@lru_cache(maxsize=1)
def _meta_model(config: ModelConfig) -> LanguageModel:
    return meta_model(config)
