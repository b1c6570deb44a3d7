"""Parameters, FLOPs, states, exchanged bytes and memory of models, for one device and for one GPU of many.

``counts_of(config)`` returns what is counted on the code: ``GeckoCounts``, also for relatives such as Megalodon, or
``LlamaCounts``. Bytes of activations are measured: a dry run calls the code on tensors without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from gecko.config import GeckoConfig
from gecko.inference import piece_length
from gecko.inference.generate import LLAMA_PIECE
from gecko.models import LlamaConfig, ModelConfig, meta_model
from gecko.ops.scan import SCAN_CHUNK
from gecko.parallel.mesh import MeshSizes
from gecko.plan.device import CARRIED, COMMUNICATION, GRADIENTS, KEPT, LOSS, OPTIMIZER, OTHER, PARAMETERS, WORK
from gecko.plan.dry_run import block_memory, step_peak
from gecko.state import GeckoState
from gecko.train.optimizer import block_matrix_names, matrix_names
from gecko.train.run import Run
from gecko.train.throughput import linear_products

FLOAT, HALF = 4, 2
"""Bytes of a float32 (states, gradients, optimizer moments) and of a bfloat16."""


class Flops(NamedTuple):
    """Floating-point operations; a multiply-add counts as two."""

    forward: float
    total: float


def _with_backward(**parts: float | tuple[float, float]) -> dict[str, Flops]:
    """Return the FLOPs of parts, given forward and backward, or forward alone if backward takes twice as many."""
    both = {name: part if isinstance(part, tuple) else (part, 2 * part) for name, part in parts.items()}
    return {name: Flops(forward, forward + backward) for name, (forward, backward) in both.items()}


STATE_PARTS = ("clock", "timestep norms", "CEMA", "attention window", "working memory")


def state_part(name: str) -> str:
    """Return the one of ``STATE_PARTS`` to which a tensor of a reading state belongs."""
    kinds = {"clock": "clock", "attention": "attention window", "memory": "working memory", "cema": "CEMA"}
    return next((kinds[part] for part in name.split(".") if part in kinds), "timestep norms")


@dataclass(frozen=True)
class GeckoCounts:
    """Numbers of a Gecko."""

    config: GeckoConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """Return the FLOPs per token of the matrix products in the code, by part, for rows of ``length`` tokens.

        Element-wise operations are left out.

        For a layer, with D, Z, V, F the model, key, value and feed-forward widths, z = Z / heads, v = V / heads, G norm
        groups, N modes, c the attention chunk, w the attention window and C = 64 the scan chunk:

            part        forward                             backward
            linear      2 (Z D + 2 V D + D² + V D + 3 F D)  twice (2 F D without the gate of SwiGLU)
            attention   2 w (Z + V)                         2 w (3 Z + 2 V): scores are recomputed
            memory      2 Z (z + 2 v + z v / c)             twice
            CEMA        D (2 C + 8 N)                       twice
            norms       4 G (C + 1)                         4 G (C + 1 + D)
            head        2 D · vocabulary                    twice (once for the model)

        Attention computes whole windows and masks half of one chunk, so it computes more than it needs. MFU counts
        the FLOPs that are needed (``gecko.train.throughput``).
        """
        config = self.config
        layers, model_dim, key_dim, value_dim = config.num_layers, config.model_dim, config.key_dim, config.value_dim
        norms = layers + 1 if config.norm == "timestep" else 0
        averages = layers * model_dim if config.local_mixing == "cema" else 0
        norm, window = 4.0 * config.timestep_groups * (SCAN_CHUNK + 1), self._windows * config.chunk_size
        linear, head = linear_products(config)
        key, value = config.key_head_dim, config.value_head_dim
        products = key + 2 * value + key * value / config.chunk_size
        if config.memory == "orthogonal":  # answers for keys, and the memory before them
            products = 3 * value + 2 * key * value / config.chunk_size
        if config.memory == "linear":
            products += 2  # the normaliser of keys and of queries
        remembered = 0.0 if config.memory == "none" else 2.0 * key_dim * products
        attended = layers * 2.0 * window
        return _with_backward(
            linear=2.0 * linear,
            attention=(attended * (key_dim + value_dim), attended * (3 * key_dim + 2 * value_dim)),
            memory=layers * remembered,
            CEMA=averages * (2.0 * SCAN_CHUNK + 8 * config.cema_modes),
            norms=(norms * norm, norms * (norm + 4 * config.timestep_groups * model_dim)),
            head=2.0 * head,
        )

    def keys(self, length: int) -> str:
        return f"whole windows of {self._windows * self.config.chunk_size:,} keys"

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """Return the bytes of the state by part: float32, except the values in the attention window."""
        sizes = dict.fromkeys(STATE_PARTS, 0)
        value_dtype = torch.bfloat16 if itemsize < FLOAT else torch.float32
        empty = GeckoState.empty(self.config, value_dtype=value_dtype, device="meta")
        for name, tensor in empty.tensors().items():
            sizes[state_part(name)] += tensor.nbytes
        return sizes

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """Return the bytes that the busiest of ``ranks`` context ranks sends in a layer's forward pass, per row.

        The backward pass sends the same number. To the next rank it sends the last attention chunk's z, from which that
        computes the keys, and its values. To every later rank it sends the states of CEMA and of the norm, the sinks,
        the memory's affine map A, B, and two weights. ``benchmarks/context_exchange.py`` measures them.
        """
        config = self.config
        remembers = config.memory != "none"
        heads, key, value = config.num_key_value_heads, config.key_head_dim, config.value_head_dim
        window = config.chunk_size * itemsize * heads * (key + value)
        averages, norm = config.local_mixing == "cema", config.norm == "timestep"
        later = FLOAT * 2 * (config.model_dim * config.cema_modes * averages + config.timestep_groups * norm)
        later += config.sinks * heads * (FLOAT * key + itemsize * value)
        if remembers:
            later += config.key_dim * (FLOAT * (key + 2) + itemsize * value)
        return (window if remembers or config.sinks or self._windows > 1 else 0) + (ranks - 1) * later

    @property
    def _windows(self) -> int:
        """Number of key chunks that each query chunk is multiplied with."""
        return 1 if self.config.attention == "chunk" else 2


@dataclass(frozen=True)
class LlamaCounts:
    """The same numbers of a Llama."""

    config: LlamaConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """Return the FLOPs per token of matrix products, for rows of ``length`` tokens, which are one document.

        Attention is assumed to be a kernel that skips the keys after each query, which are half of all keys, and
        computes scores again in the backward pass.
        """
        attention = 1.0 * self.config.num_layers * length * self.config.model_dim
        linear, head = linear_products(self.config)
        return _with_backward(linear=2.0 * linear, attention=(2 * attention, 5 * attention), head=2.0 * head)

    def keys(self, length: int) -> str:
        return f"{length // 2:,} keys on average"

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """Return the bytes of keys and values after one row of ``length`` tokens."""
        config = self.config
        one = config.num_layers * config.num_key_value_heads * config.head_dim * length * itemsize
        return {"keys": one, "values": one}

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        return 0  # context ranks are not supported


def counts_of(config: ModelConfig) -> GeckoCounts | LlamaCounts:
    return LlamaCounts(config) if isinstance(config, LlamaConfig) else GeckoCounts(config)


def _piece(config: ModelConfig, length: int) -> int:
    """Return the number of tokens per piece in which a prompt of ``length`` tokens is read."""
    return min(length, LLAMA_PIECE if isinstance(config, LlamaConfig) else piece_length(config))


# Memory of a model on one device (``gecko info``).

COMPONENTS = ("embedding", "CEMA", "norms", "attention projections", "feed-forward", "head")
_COMPONENT_OF = {
    "embedding": "embedding", "embed_tokens": "embedding", "head": "head", "lm_head": "head", "cema": "CEMA",
    "feed_forward": "feed-forward", "mlp": "feed-forward",
}  # fmt: skip
"""Component of the parameters of a module with this name, unless it is a norm."""


def parameters_by_component(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of each component without allocating them. A tied head counts as zero."""
    counts = {name: 0 for name in COMPONENTS if name != "CEMA" or not isinstance(config, LlamaConfig)}
    model = meta_model(replace(config, num_layers=1))  # all blocks have the same shapes
    of_blocks = {id(parameter) for parameter in model.blocks.parameters()}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        known = next((_COMPONENT_OF[part] for part in parts if part in _COMPONENT_OF), "attention projections")
        component = "norms" if any("norm" in part for part in parts) else known
        counts[component] += parameter.numel() * (config.num_layers if id(parameter) in of_blocks else 1)
    return counts


def inference_memory(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, int]:
    """Return the bytes for prefill and decoding of ``batch`` sequences, by kind.

    For a Gecko they do not depend on ``length`` once it is longer than one piece.
    """
    return {
        "weights": sum(parameters_by_component(config).values()) * dtype.itemsize,
        "states": batch * sum(counts_of(config).state(length, dtype.itemsize).values()),
        "work on a piece of the prompt": block_memory(config, dtype, _piece(config, length)).work,
    }


def training_memory(config: ModelConfig, batch: int, length: int, *, recompute: bool) -> dict[str, int]:
    """Return the bytes of one training step in float32 with AdamW; ``recompute``: with activation checkpointing.

    The activations of a block are measured on a piece of a row, and taken to grow with the tokens.
    """
    weights = sum(parameters_by_component(config).values()) * FLOAT
    piece = _piece(config, length)
    block = block_memory(config, torch.float32, piece).kept * batch * length // piece
    inputs = config.num_layers * batch * length * config.model_dim * FLOAT
    kept = inputs + block if recompute else config.num_layers * block
    return {"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": kept}


# Memory of one GPU of many (``gecko plan``).

VLLM_MEMORY = 0.9
"""The share of a GPU that vLLM is told to take (``--gpu-memory-utilization``)."""
RESERVE = 4 * 10**9
"""Bytes that CUDA, cuBLAS and NCCL take before a model is loaded; an assumption."""
SLACK = 0.05
"""Fraction of the other memory that is lost to fragmentation; an assumption."""


def serving(config: ModelConfig, memory: int) -> dict[str, int] | None:
    """Return the bytes of the weights and of a sequence's state, and how many sequences fit in ``memory``, in bfloat16.

    The two counts, for ``gecko serve`` and vLLM, assume a reserve. None for a Llama, whose state grows with the text.
    """
    if isinstance(config, LlamaConfig):
        return None
    weights, state, work = inference_memory(config, torch.bfloat16, 1, piece_length(config)).values()
    rest = RESERVE + weights + work
    return {
        "weights_bytes": weights, "row_bytes": state,
        # While the prompts of all rows are read, their states are beside the slots that the rows before had.
        "gecko_serve_rows": max(0, memory - rest) // (2 * state),
        "vllm_rows": max(0, int(VLLM_MEMORY * memory) - rest) // state,
    }  # fmt: skip


def step_memory(run: Run, sizes: MeshSizes) -> tuple[dict[str, int], str]:
    """Return the bytes of one GPU at the peak of a step, by kind, and the name of this moment.

    They are those of a rank that needs most, as a dry run measures them, and a reserve.
    """
    # All ranks of the first shard have the largest part of the parameters, the last part of a row follows states.
    peak = step_peak(run, sizes, rank=sizes.context - 1)
    parts = PARAMETERS, GRADIENTS, OPTIMIZER, KEPT, WORK, LOSS, COMMUNICATION, OTHER, *[CARRIED] * run.data.carry_state
    reserve = RESERVE + int(SLACK * peak.total)
    return {part: peak.uses.get(part, 0) for part in parts} | {"reserve": reserve}, peak.moment


def state_memory(config: ModelConfig, divided: int, *, muon: bool = False) -> dict[str, int]:
    """Return the bytes of parameters, gradients and the optimizer's state on the GPU that has most of them.

    They are exact: FSDP splits every parameter along its first dimension among ``divided`` GPUs.
    """
    model = meta_model(config)
    matrices = block_matrix_names(model) if muon else set()
    sizes = {name: -(-len(p) // divided) * (p.numel() // len(p)) * FLOAT for name, p in model.named_parameters()}
    weights = sum(sizes.values())
    # AdamW has two moments and a step counter per parameter, Muon the momentum of a matrix.
    state = sum(size if name in matrices else 2 * size + FLOAT for name, size in sizes.items())
    return {PARAMETERS: weights, GRADIENTS: weights, OPTIMIZER: state}


class GroupSizes(NamedTuple):
    """Bytes of all blocks, in the dtypes in which FSDP gathers them, of the rest and of all gradients in float32."""

    blocks: int
    rest: int
    gradients: int


@lru_cache(maxsize=1)
def group_sizes(config: ModelConfig, *, bfloat16: bool) -> GroupSizes:
    """Return the sizes of the groups that are gathered. With ``bfloat16`` the blocks' matrices are in that dtype."""
    model = meta_model(config)

    def gathered(block: nn.Module) -> int:
        halved = matrix_names(block) if bfloat16 else set()
        return sum(p.numel() * (HALF if name in halved else FLOAT) for name, p in block.named_parameters())

    in_blocks, total = (sum(p.numel() for p in part.parameters()) for part in (model.blocks, model))
    return GroupSizes(sum(map(gathered, model.blocks)), (total - in_blocks) * FLOAT, total * FLOAT)
