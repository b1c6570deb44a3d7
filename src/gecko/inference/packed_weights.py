"""Weights of a ``Gecko`` in the form that the C decoder reads, and the addresses of the states that it changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gecko.config import GeckoConfig
from gecko.io.quantization import is_quantized, plain_tensors
from gecko.layers.cema import CEMA
from gecko.layers.feed_forward import FeedForward
from gecko.layers.gated_attention import GatedAttention, MixerState
from gecko.layers.linear import is_bare
from gecko.layers.norms import LayerNorm, RMSNorm, TimestepNorm
from gecko.models.gecko import Block, Gecko
from gecko.ops.backends.cpu import library
from gecko.ops.backends.dispatch import is_watched
from gecko.ops.decoding.cpu import GROUP, REGISTER, Network, Weights
from gecko.ops.rotary import rotary_phases
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory.rules import ChunkSummary
from gecko.state import GeckoState

_DTYPES = (torch.float32, torch.bfloat16)
_MODULES = (
    Gecko, Block, GatedAttention, FeedForward, CEMA, TimestepNorm, RMSNorm, LayerNorm, nn.Linear, nn.Embedding,
    nn.ModuleList,
)  # fmt: skip
"""Classes whose computation the kernels know; a subclass may compute something else."""
_ATTENTIONS = {"sliding_chunk": 0, "chunk": 1, "sliding_window": 2}
_MEMORIES = {"none": 0, "adaptive": 1, "linear": 2}


def decodes_in_c(model: Gecko, state: GeckoState) -> bool:
    """Return whether the C decoder supports the weights and states.

    Weights must be float32, bfloat16 or quantised, and on the CPU. Models with adapters, hooks, modules of other
    classes or sharded weights decode in PyTorch.
    """
    modules = list(model.modules())
    weights = [tensor for parameter in model.parameters() for tensor in plain_tensors(parameter)]
    floats = [(name, x.dtype) for name, x in state.tensors().items() if x.is_floating_point()]
    return (
        not model.sharded and not is_watched() and all(type(module) in _MODULES for module in modules)
        and all(x.device.type == "cpu" for x in weights) and all(x.dtype in _DTYPES for x in model.parameters())
        and all(dtype in (_DTYPES if name.endswith("attention.values") else _DTYPES[:1]) for name, dtype in floats)
        and all(is_bare(module) for module in modules if isinstance(module, nn.Linear))
        and not any(map(_has_hooks, modules)) and library() is not None
    )  # fmt: skip


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class PackedWeights:
    """Weights of one model as the C decoder reads them.

    Weights that have the right form are not copied. The others are: quantised ones in 4 bits, rows that do not fill
    whole registers, and vectors in 16 bits.
    """

    def __init__(self, model: Gecko) -> None:
        self._config = model.config
        embedding = matrix(model.embedding.weight)
        head = embedding if model.config.tie_embedding else matrix(model.head.weight)
        self._ends = {"embedding": embedding, "head": head}
        self._final_norm = _running_norm(model.final_norm)
        self._layers = [
            {**_mixer(block.mixer), **_feed_forward(block.feed_forward, model.config)}
            for block in model.blocks
            if isinstance(block, Block)
        ]
        self._phases = _phases(model.config)

    def with_states(self, state: GeckoState) -> Network:
        """Return the network that changes the rows of ``state`` in place."""
        layers = [_with_state(*both) for both in zip(self._layers, state.mixers, strict=True)]
        rounded = state.mixers[0].attention.values.dtype == torch.bfloat16
        return Network({
            **_numbers(self._config), **self._ends, "final_norm": {**self._final_norm, **_norm_state(state.final_norm)},
            "slots": state.batch_size, "phases": self._phases, "values_are_bfloat16": int(rounded), "layer": layers,
        }, (state.clock.position, state.clock.document_start))  # fmt: skip


def matrix(weight: Tensor, bias: Tensor | None = None) -> Weights:
    """Return a layer's weight (outputs, inputs) and bias as the kernels read them."""
    bias = None if bias is None else _vector(bias)
    if not is_quantized(weight):
        return Weights(_whole_registers(weight.detach()), bias=bias)
    integers, scale = (x.detach() for x in plain_tensors(weight))
    if scale.numel() == len(integers):
        return Weights(_whole_registers(integers), _vector(scale.flatten()), bias)
    return Weights(_packed_halves(integers), _vector(scale), bias)


def _whole_registers(weight: Tensor) -> Tensor:
    """Pad rows with zeros; return the weight itself if nothing is missing."""
    return F.pad(weight, (0, -weight.shape[-1] % REGISTER)).contiguous()


_halves = WeakTensorKeyDictionary()
"""Packed weights by their integers: packing takes long, and nothing trains them."""


def _packed_halves(integers: Tensor) -> Tensor:
    """Pack (outputs, inputs) integers of −8 … 7 into bytes: input i of a group with input i + 16 of it."""
    if integers not in _halves:
        low, high = (integers + 8).to(torch.uint8).unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
        _halves[integers] = (low | high << 4).flatten(1)
    packed: Tensor = _halves[integers]
    return packed


def _vector(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _plus_one(weight: Tensor | None, size: int) -> Tensor:
    return torch.ones(size) if weight is None else 1 + _vector(weight)


def _or_zeros(bias: Tensor | None, size: int) -> Tensor:
    return torch.zeros(size) if bias is None else _vector(bias)


def _running_norm(norm: TimestepNorm) -> dict[str, Tensor]:
    assert norm.weight is not None
    return {"scale": 1 + _vector(norm.weight), "shift": _or_zeros(norm.bias, len(norm.weight))}


def _mixer(mixer: GatedAttention) -> dict[str, Any]:
    config = mixer.config
    layers = {name: getattr(mixer, name) for name in ("to_shared", "to_value", "to_gate", "to_hidden", "to_output")}
    return {
        "norm": _running_norm(mixer.norm),
        "cema_tables": _cema_tables(mixer.cema),
        "cema_skip": torch.ones(config.model_dim) if mixer.cema.omega is None else _vector(mixer.cema.omega),
        "cema_norm": _plus_one(mixer.cema_norm.weight, config.model_dim),
        **{name: matrix(layer.weight, layer.bias) for name, layer in layers.items()},
        "qk_scale": (1 + _vector(mixer.scale)) / config.key_head_dim**0.5,
        "qk_shift": _vector(mixer.offset),
    }


def _feed_forward(layer: FeedForward, config: GeckoConfig) -> dict[str, Any]:
    matrices = {name: matrix(getattr(layer, name).weight) for name in ("fc1", "fc2")}
    if layer.fc3 is not None:
        matrices["fc3"] = matrix(layer.fc3.weight)
    return {
        "ffn_norm_scale": _plus_one(layer.norm.weight, config.model_dim),
        "ffn_norm_shift": _or_zeros(layer.norm.bias, config.model_dim),
        "ffn_scale": None if layer.scale is None else _vector(layer.scale),
        **matrices,
    }


def _cema_tables(cema: CEMA) -> Tensor:
    """Return (4, D, padded 2N): h ← table 0 · h + table 1 · (h, parts swapped) + table 2 · x; table 3 · h sums to y.

    With h = (real, imaginary) and q = (a, b): q h = (a, a) · h + (−b, b) · swapped h.
    """
    coefficients = cema.coefficients()
    q = torch.view_as_real(coefficients.factor.to(torch.complex64))
    real, imaginary = q[..., :1], q[..., 1:]
    p = coefficients.input.float().unsqueeze(-1)
    tables = torch.stack([
        torch.cat([real, real], -1), torch.cat([-imaginary, imaginary], -1), torch.cat([p, torch.zeros_like(p)], -1),
        coefficients.readout.float().unflatten(-1, (-1, 2)),
    ]).flatten(2)  # fmt: skip
    return _whole_registers(tables.detach())


def _phases(config: GeckoConfig) -> Tensor:
    """Return the cosine and sine of the angles of positions 0 … 2c − 1, (2c, key / 2, 2)."""
    if config.num_rope_heads == 0:
        return torch.zeros(0)
    positions = torch.arange(2 * config.chunk_size)
    phases = rotary_phases(positions, config.key_head_dim, config.rope_base, torch.float32, torch.device("cpu"))
    return torch.view_as_real(phases).contiguous()


def _numbers(config: GeckoConfig) -> dict[str, int | float]:
    beta_mean, beta_variance = config.timestep_betas or (0.0, 0.0)
    return {
        "layers": config.num_layers, "features": config.model_dim, "heads": config.num_heads,
        "key": config.key_head_dim, "value": config.value_head_dim, "hidden": config.ffn_dim,
        "modes": config.cema_modes, "chunk": config.chunk_size, "groups": config.timestep_groups,
        "norm_groups": config.norm_groups, "vocabulary": config.vocab_size,
        "attention": _ATTENTIONS[config.attention], "memory": _MEMORIES[config.memory],
        "rope_heads": config.num_rope_heads, "swiglu": int(config.swiglu), "two_hop": int(config.two_hop_residual),
        "cumulative": int(config.timestep_betas is None), "beta_mean": beta_mean, "beta_variance": beta_variance,
        "eps": config.norm_eps, "embedding_scale": config.model_dim**0.5 if config.scale_embedding else 1.0,
    }  # fmt: skip


def _with_state(layer: dict[str, Any], state: MixerState) -> dict[str, Any]:
    found = {
        **layer, "norm": {**layer["norm"], **_norm_state(state.norm)}, "cema": state.cema,
        "keys": state.attention.keys, "values": state.attention.values,
    }  # fmt: skip
    if state.memory is not None:
        memory = state.memory
        found |= {
            "memory": memory.memory, "normaliser": memory.normaliser, "previous_resets": memory.previous_resets,
            "previous": _summary(memory.previous), "current": _summary(memory.current),
        }  # fmt: skip
    return found


def _norm_state(state: TimestepNormState) -> dict[str, Tensor]:
    return {"count": state.count, "mean": state.mean, "variance": state.variance}


def _summary(summary: ChunkSummary) -> dict[str, Tensor]:
    return {"weight": summary.weight, "key_sum": summary.key_sum, "value_sum": summary.value_sum}
