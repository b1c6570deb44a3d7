"""Parameters by component, and the memory of inference and training.

The first part is for a model on one device (``gecko info``), the second for one GPU of many (``gecko plan``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from gecko.models import LanguageModel, LlamaConfig, ModelConfig, meta_model
from gecko.models.common import ActivationCheckpointing
from gecko.ops.loss import GPU_BLOCK_ELEMENTS
from gecko.plan.counts import FLOAT, HALF, counts_of
from gecko.train.optimizer import block_matrix_names, matrix_names
from gecko.train.run import Run

WORK_FACTOR = 2
"""Memory in use during one block's forward pass, relative to its activations for backward; measured on the CPU."""
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
    """Return the bytes of one GPU at the peak of a step, by kind.

    The peak is the largest of a few moments. Kept activations become fewer while gradients become more.
    """
    state = state_memory(run.model, share.divided, muon=run.optimizer.name == "muon")
    most = max(_moments(run, share, state["gradients"]), key=lambda moment: sum(moment.values()))
    memory = {**state, **most}
    if run.data.carry_state:
        memory["carried states"] = carried_memory(run, share)
    memory["reserve"] = RESERVE + int(SLACK * sum(memory.values()))
    return memory


def _moments(run: Run, share: Share, gradients: int) -> Iterator[dict[str, int]]:
    """Yield the bytes besides parameters and optimizer: in the loss, in backward of the second and of the last block,
    and at the end. ``gradients`` are the bytes of all, which accumulation keeps from part to part."""
    config, groups, layers = run.model, group_sizes(run.model, bfloat16=share.bfloat16), run.model.num_layers
    of_block = gradients * (groups.gradients - groups.rest) // groups.gradients // layers
    before = gradients if run.gradient_accumulation_steps > 1 else 0
    kept, head = _kept_on_gpu(run, share), config.vocab_size * config.model_dim * FLOAT
    block, whole_block = groups.blocks // layers, (groups.gradients - groups.rest) // layers
    fixed = _fixed_buffers(run, groups, share)
    work = _work_on_block(run, share)
    gathered, reduced = (0, 0) if share.divided == 1 else (block, whole_block)
    rest = 0 if share.divided == 1 else groups.rest
    yield _moment(before, kept, 0, _loss_memory(run, share), fixed + rest)
    one = kept // layers
    yield _moment(
        max(before, of_block), kept - one if layers > 1 else kept, work, 0,
        fixed + rest + head + gathered + (reduced if layers > 1 else 0),
    )  # fmt: skip
    yield _moment(max(before, of_block * (layers - 1)), one, work, 0, fixed + rest + head + gathered + reduced)
    yield _moment(gradients, 0, 0, 0, fixed + 3 * rest + reduced)


def _moment(gradients: int, kept: int, work: int, loss: int, buffers: int) -> dict[str, int]:
    return {
        "gradients": gradients, "activations kept": kept, "block in hand": work, "logits and loss": loss,
        "communication buffers": buffers,
    }  # fmt: skip


def _kept_on_gpu(run: Run, share: Share) -> int:
    """Return the bytes that all blocks keep for backward."""
    config, counts = run.model, counts_of(run.model)
    stream = config.model_dim * FLOAT
    states = _states_before(run, share) if run.activation_checkpointing == "none" else 0
    per_token = config.num_layers * {
        "none": counts.kernel_activations(share.itemsize, continues=_continues(run, share)),
        "selective": stream + counts.projections() * share.itemsize,
        "full": stream,
    }[run.activation_checkpointing]  # fmt: skip
    return int(share.tokens * (per_token + stream)) + states


def _work_on_block(run: Run, share: Share) -> int:
    """Return the bytes of the block that is differentiated: its activations, if computed again, and gradients."""
    counts = counts_of(run.model)
    work = share.tokens * counts.gradients_in_hand(share.itemsize)
    if run.activation_checkpointing != "none":
        work += share.tokens * counts.kernel_activations(share.itemsize, continues=_continues(run, share))
        work += _states_before(run, share) / run.model.num_layers
    return int(work)


def _states_before(run: Run, share: Share) -> int:
    """Return the bytes of the states before this GPU's tokens in all layers."""
    return _states(run, share) if _continues(run, share) else 0


def _states(run: Run, share: Share) -> int:
    if isinstance(run.model, LlamaConfig):
        return 0
    return share.rows * sum(counts_of(run.model).state(share.length, share.itemsize).values())


def _continues(run: Run, share: Share) -> bool:
    """Return whether documents of a GPU's rows start before them, so that attention reads a chunk before."""
    return share.context > 1 or run.data.carry_state


def _loss_memory(run: Run, share: Share) -> int:
    """Return the bytes of blocks of logits and their gradient, hidden states, the head, and the states after the rows.

    Two blocks of logits are allocated while the next one is computed.
    """
    config, half = run.model, share.itemsize
    logits = min(GPU_BLOCK_ELEMENTS, share.tokens * config.vocab_size)
    several = 2 if share.tokens * config.vocab_size > GPU_BLOCK_ELEMENTS else 1
    head = config.vocab_size * config.model_dim * (FLOAT + 2 * (half if share.bfloat16 else 0))
    return (several * FLOAT + half) * logits + 2 * half * share.tokens * config.model_dim + head + _states(run, share)


def _fixed_buffers(run: Run, groups: GroupSizes, share: Share) -> int:
    """Return the bytes of buffers that exist during the whole step."""
    layers = run.model.num_layers
    if share.divided == 1:
        # Autocast's bf16 copies of the weights: of one block with recomputation, otherwise of all blocks.
        held = 1 if run.activation_checkpointing == "full" else layers
        return held * groups.blocks // layers if share.bfloat16 else 0
    buffers = 0
    if share.context > 1:
        # What arrives in a layer is kept for its backward pass.
        buffers += layers * share.rows * counts_of(run.model).context_bytes(share.itemsize, share.context)
    return buffers


def _gathered(block: nn.Module, bfloat16: bool) -> int:
    matrices = matrix_names(block)
    return sum(p.numel() * (HALF if bfloat16 and name in matrices else FLOAT) for name, p in block.named_parameters())


@lru_cache(maxsize=1)
def _meta_model(config: ModelConfig) -> LanguageModel:
    return meta_model(config)
