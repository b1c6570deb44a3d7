"""Memory of one GPU in a step of training, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from gecko.baselines import LanguageModel, ModelConfig, meta_model
from gecko.ops.loss import GPU_BLOCK_ELEMENTS
from gecko.plan.communication import GroupSizes
from gecko.plan.counts import counts_of
from gecko.plan.footprint import WORK_FACTOR, kept_by_model, tables_of_model
from gecko.plan.units import FLOAT, HALF
from gecko.train import Run
from gecko.train.optimizer import matrix_names

ADAM_MOMENTS = 2
RESERVE = 4 * 10**9
"""What CUDA, cuBLAS and NCCL take before a model is there; an assumption."""
SLACK = 0.05
"""Part of all else that the allocator cannot use, because it lies in pieces; an assumption."""


@dataclass(frozen=True)
class Share:
    """What one GPU does in a step."""

    divided: int
    """GPUs among which parameters, gradients and optimizer state are divided."""
    rows: int
    """Rows computed at once."""
    length: int
    """Tokens of each of them here."""
    context: int
    """GPUs that hold one row together."""
    bfloat16: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def itemsize(self) -> int:
        return HALF if self.bfloat16 else FLOAT


def state_memory(config: ModelConfig, divided: int) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's moments that one GPU keeps: exact, of the GPU that has most.

    FSDP cuts every parameter along its first dimension.
    """
    parameters = list(_meta_model(config).parameters())
    numbers = sum(-(-len(p) // divided) * (p.numel() // len(p)) for p in parameters)
    weights = numbers * FLOAT
    # AdamW counts the steps of every parameter by itself.
    moments = ADAM_MOMENTS * weights + len(parameters) * FLOAT
    return {"parameters": weights, "gradients": weights, "optimizer": moments}


def group_sizes(config: ModelConfig, *, bfloat16: bool) -> GroupSizes:
    """What is gathered together: with bfloat16 the blocks' matrices in it, all else in float32."""
    model = _meta_model(config)
    blocks = sum(_gathered(block, bfloat16) for block in model.blocks)
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    total = sum(p.numel() for p in model.parameters())
    return GroupSizes(blocks, (total - in_blocks) * FLOAT, total * FLOAT)


def step_memory(run: Run, share: Share) -> dict[str, int]:
    """Bytes of one GPU at the fullest moment of a step, by kind; what is not in ``state_memory`` is an estimate."""
    config, groups = run.model, group_sizes(run.model, bfloat16=share.bfloat16)
    counts = counts_of(config)
    kept = share.tokens * kept_by_model(config, share.itemsize, run.activation_checkpointing)
    # Recomputed or not, one block at a time has what it keeps, and as much again for the gradients.
    work = (
        share.tokens
        * counts.activations(share.itemsize)
        * (WORK_FACTOR if run.activation_checkpointing != "none" else WORK_FACTOR - 1)
    )
    head = config.vocab_size * config.model_dim * FLOAT
    memory = {
        **state_memory(config, share.divided),
        "activations kept": int(kept) + tables_of_model(config, run.activation_checkpointing),
        "block in hand": int(work),
        "logits and loss": (FLOAT + HALF) * GPU_BLOCK_ELEMENTS + 2 * share.tokens * config.model_dim * FLOAT + head,
        "communication buffers": _buffers(run, groups, share),
    }
    memory["reserve"] = RESERVE + int(SLACK * sum(memory.values()))
    return memory


def _buffers(run: Run, groups: GroupSizes, share: Share) -> int:
    """Gathered weights, gradients before they are reduced, and what context ranks hand over."""
    block = groups.blocks // run.model.num_layers
    if share.divided == 1:
        # Autocast's copies of the weights in hand, which stay where nothing is recomputed.
        held = 1 if run.activation_checkpointing == "full" else run.model.num_layers
        return held * block if share.bfloat16 else 0
    # Two blocks, the one in hand and the next; its gradients, and the float32 ones that are being sent.
    in_blocks = (groups.gradients - groups.rest) // run.model.num_layers
    buffers = 2 * block + block + in_blocks
    # Embedding and head stay gathered, and so do their gradients till the end.
    buffers += 3 * groups.rest
    if run.accumulation > 1:
        # They are exchanged once a step, so until then every GPU has all of them.
        buffers += in_blocks * run.model.num_layers
    if share.context > 1:
        buffers += 2 * share.rows * counts_of(run.model).context_bytes(share.itemsize, share.context)
    return buffers


def _gathered(block: nn.Module, bfloat16: bool) -> int:
    matrices = matrix_names(block)
    return sum(p.numel() * (HALF if bfloat16 and name in matrices else FLOAT) for name, p in block.named_parameters())


@lru_cache(maxsize=1)
def _meta_model(config: ModelConfig) -> LanguageModel:
    return meta_model(config)
