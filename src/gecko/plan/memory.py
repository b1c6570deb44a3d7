"""Parameters by component, and the memory of inference and training.

The first part is for a model on one device (``gecko info``), the second for one GPU of many (``gecko plan``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from gecko.models import LanguageModel, LlamaConfig, ModelConfig, meta_model
from gecko.models.gecko import ActivationCheckpointing
from gecko.ops.loss import GPU_BLOCK_ELEMENTS
from gecko.plan.counts import FLOAT, HALF, counts_of
from gecko.train import Run
from gecko.train.optimizers.build import block_matrix_names, matrix_names

WORK_FACTOR = 2
"""Memory in use during one block's forward pass, relative to its activations for backward; measured on the CPU."""
COMPONENTS = ("embedding", "CEMA", "norms", "attention projections", "feed-forward", "head")


def parameters_by_component(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each component without allocating them. A tied head counts as zero."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in meta_model(config).named_parameters():
        counts[_component(name)] += parameter.numel()
    if isinstance(config, LlamaConfig):
        del counts["CEMA"]
    return counts


def inference_memory(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Return the bytes for prefill and decoding of ``batch`` sequences, by kind.

    For a Gecko they do not depend on ``length`` once it is longer than one piece.
    """
    counts = counts_of(config)
    piece = min(length, counts.piece())
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(counts.state(length, dtype.itemsize).values()),
        "work on a piece of the prompt": WORK_FACTOR * int(piece * counts.activations(dtype.itemsize)),
    }


def training_memory(config: ModelConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Return the bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing."""
    weights = sum(parameters_by_component(config).values()) * FLOAT
    mode: ActivationCheckpointing = "full" if recompute else "none"
    kept = batch * length * kept_by_model(config, FLOAT, mode) + tables_of_model(config, mode)
    if recompute:
        kept += batch * length * counts_of(config).activations(FLOAT)
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": int(kept)}


def kept_by_model(config: ModelConfig, itemsize: int, recompute: ActivationCheckpointing) -> float:
    """Return the bytes per token that all blocks keep for backward with this activation checkpointing."""
    if recompute == "none":
        return config.num_layers * counts_of(config).activations(itemsize)
    kept = config.model_dim * FLOAT
    if recompute == "selective":
        kept += counts_of(config).projections() * itemsize
    return config.num_layers * kept


def tables_of_model(config: ModelConfig, recompute: ActivationCheckpointing) -> int:
    """Return the bytes of the tables of all blocks, or of the one block that is recomputed."""
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


ADAM_MOMENTS = 2
RESERVE = 4 * 10**9
"""Bytes that CUDA, cuBLAS and NCCL take before a model is loaded; an assumption."""
SLACK = 0.05
"""Fraction of the other memory that is lost to fragmentation; an assumption."""


@dataclass(frozen=True)
class Share:
    """Share of a step that one GPU computes."""

    divided: int
    """GPUs among which parameters, gradients and optimizer state are divided."""
    rows: int
    """Rows per forward pass."""
    length: int
    """Tokens of each row on this GPU."""
    context: int
    """GPUs among which the tokens of a row are divided."""
    bfloat16: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def itemsize(self) -> int:
        return HALF if self.bfloat16 else FLOAT


@dataclass(frozen=True)
class GroupSizes:
    """Bytes of the parameter groups that FSDP gathers together."""

    blocks: int
    """Bytes of all blocks, in the dtypes in which they are gathered."""
    rest: int
    """Bytes of embedding, final norm and head in float32."""
    gradients: int
    """Bytes of all gradients in float32."""


def state_memory(config: ModelConfig, divided: int, *, muon: bool = False) -> dict[str, int]:
    """Return the bytes of parameters, gradients and the optimizer's state on the GPU that has most of them.

    They are exact: FSDP splits every parameter along its first dimension.
    """
    model = _meta_model(config)
    matrices = block_matrix_names(model) if muon else set()
    sizes = {name: -(-len(p) // divided) * (p.numel() // len(p)) * FLOAT for name, p in model.named_parameters()}
    weights = sum(sizes.values())
    # AdamW has two moments and a step counter per parameter, Muon the momentum of a matrix.
    state = sum(size if name in matrices else ADAM_MOMENTS * size + FLOAT for name, size in sizes.items())
    return {"parameters": weights, "gradients": weights, "optimizer": state}


def carried_memory(run: Run, share: Share) -> int:
    """Return the bytes of the states of this GPU's lanes (``data.carry_state``): those before a step and after it."""
    lanes = share.rows * run.gradient_accumulation_steps
    return 2 * lanes * sum(counts_of(run.model).state(run.sequence_length, FLOAT).values())


def group_sizes(config: ModelConfig, *, bfloat16: bool) -> GroupSizes:
    """Return the sizes of the groups that are gathered. With ``bfloat16`` the blocks' matrices are in that dtype."""
    model = _meta_model(config)
    blocks = sum(_gathered(block, bfloat16) for block in model.blocks)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    total = sum(p.numel() for p in model.parameters())
    return GroupSizes(blocks, (total - in_blocks) * FLOAT, total * FLOAT)


def step_memory(run: Run, share: Share) -> dict[str, int]:
    """Return the peak bytes of one GPU in a step, by kind. Those that are not in ``state_memory`` are estimates."""
    config, groups = run.model, group_sizes(run.model, bfloat16=share.bfloat16)
    counts = counts_of(config)
    kept = share.tokens * kept_by_model(config, share.itemsize, run.activation_checkpointing)
    # The block that is differentiated has its activations, and gradients of the same size.
    work = (
        share.tokens
        * counts.activations(share.itemsize)
        * (WORK_FACTOR if run.activation_checkpointing != "none" else WORK_FACTOR - 1)
    )
    head = config.vocab_size * config.model_dim * FLOAT
    memory = {
        **state_memory(config, share.divided, muon=run.optimizer.name == "muon"),
        "activations kept": int(kept) + tables_of_model(config, run.activation_checkpointing),
        "block in hand": int(work),
        "logits and loss": (FLOAT + HALF) * GPU_BLOCK_ELEMENTS + 2 * share.tokens * config.model_dim * FLOAT + head,
        "communication buffers": _buffers(run, groups, share),
    }
    if run.data.carry_state:
        memory["carried states"] = carried_memory(run, share)
    memory["reserve"] = RESERVE + int(SLACK * sum(memory.values()))
    return memory


def _buffers(run: Run, groups: GroupSizes, share: Share) -> int:
    """Return the bytes of gathered weights, of gradients before reduction, and of the context exchange."""
    block = groups.blocks // run.model.num_layers
    if share.divided == 1:
        # Autocast's bf16 copies of the weights: of one block with recomputation, otherwise of all blocks.
        held = 1 if run.activation_checkpointing == "full" else run.model.num_layers
        return held * block if share.bfloat16 else 0
    # Two gathered blocks (the current and the next), one block of gradients, and float32 gradients being reduced.
    in_blocks = (groups.gradients - groups.rest) // run.model.num_layers
    buffers = 2 * block + block + in_blocks
    # Embedding, head and their gradients stay gathered until the end of the step.
    buffers += 3 * groups.rest
    if share.context > 1:
        # What arrives in a layer is kept for its backward pass; in hand are one layer's sends and gradients.
        layers = run.model.num_layers + 2
        buffers += layers * share.rows * counts_of(run.model).context_bytes(share.itemsize, share.context)
    return buffers


def _gathered(block: nn.Module, bfloat16: bool) -> int:
    matrices = matrix_names(block)
    return sum(p.numel() * (HALF if bfloat16 and name in matrices else FLOAT) for name, p in block.named_parameters())


@lru_cache(maxsize=1)
def _meta_model(config: ModelConfig) -> LanguageModel:
    return meta_model(config)
