"""Weights of a ``Gecko`` in the form that the decoders in C and Triton read, and the states that they change."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gecko.config import PAPER, GeckoConfig
from gecko.io.quantization import is_quantized, plain_tensors
from gecko.layers import CEMA, BlockRMSNorm, FeedForward, LayerNorm, RMSNorm, StepRMSNorm, TimestepNorm, is_bare
from gecko.layers.gated_attention import GatedAttention, MixerState
from gecko.models.gecko import Block, Gecko
from gecko.ops.backends import dispatch
from gecko.ops.backends.cpu import library
from gecko.ops.chunk_attention import Pattern
from gecko.ops.common import content
from gecko.ops.decoding import GROUP, REGISTER, Record, Weights
from gecko.ops.rotary import rotary_phases
from gecko.ops.timestep_norm import TimestepNormState
from gecko.state import GeckoState

_DTYPES = (torch.float32, torch.bfloat16)
_MODULES = (
    Gecko, Block, GatedAttention, FeedForward, CEMA, TimestepNorm, BlockRMSNorm, StepRMSNorm, RMSNorm, LayerNorm,
    nn.Linear, nn.Embedding, nn.ModuleList,
)  # fmt: skip
"""Classes whose computation the kernels know. A subclass may compute something else, so it must say in ``computes``
which of these it computes."""
_ATTENTIONS = {"sliding_chunk": 0, "chunk": 1, "sliding_window": 2}
_MEMORIES = {"none": 0, "adaptive": 1, "linear": 2}
_GATES = {"none": 0, "attention": 1, "sum": 2}
_ONLY_IN_PYTORCH = (
    "gate_activation", "output_norm", "convolution_width", "unit_vectors", "timestep_eps", "rms_eps",
)  # fmt: skip
"""Fields of a config of which no decoder but ``Gecko.step`` knows another value than the default."""
_NOT_IN_C = "memory_factor", "memory_gate_channels"
"""Those that the decoder in Triton knows too."""


class Network(Protocol):
    """A network and the states of its sequences: ``ops.decoding.cpu.Network`` or ``ops.decoding.triton.Network``."""

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of each of the first sequences and return the logits of the next ones, (rows, vocabulary)."""

    def hidden(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Read one token of each sequence in some ``slots`` and return the input of the head, (rows, D)."""

    def hidden_step(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens as ``step`` does and return the input of the head, (rows, D) float32; only in C."""

    def draw(self, logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int]) -> list[int]:
        """Return one token per row of ``logits``; only in Triton."""


def decoder_of(model: Gecko, state: GeckoState) -> Literal["triton", "cpu"] | None:
    """Return the backend whose kernels decode with these weights and states; None if ``Gecko.step`` must.

    Weights must be float32 or bfloat16, or quantised: to 8 or 4 bits on the CPU, and to 8 bits on a GPU. Models with
    adapters, hooks, modules of other classes or sharded weights decode in PyTorch.
    """
    modules = list(model.modules())
    floats = [(name, x.dtype) for name, x in state.tensors().items() if x.is_floating_point()]
    config = model.config
    known = (
        all(getattr(config, name) == PAPER[name] for name in _ONLY_IN_PYTORCH)
        and config.memory in _MEMORIES
        and not model.sharded and not dispatch.is_watched()
        and all(vars(type(x)).get("computes", type(x)) in _MODULES for x in modules)
        and all(x.dtype in _DTYPES for x in model.parameters())
        and all(dtype in (_DTYPES if ".attention." in name else _DTYPES[:1]) for name, dtype in floats)
        and all(is_bare(x) for x in modules if isinstance(x, nn.Linear))
        and all(x.bias is None for name, x in model.named_modules() if name.endswith(("head", "fc1", "fc2", "fc3")))
        and not any(x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) for x in modules)
    )  # fmt: skip
    if not known:
        return None
    if dispatch.triton_kernels_run_on(model.embedding.weight):
        return "triton" if _triton_decodes(model) else None
    shares_memory = config.memory != "none" and config.num_key_value_heads != config.num_heads
    if shares_memory or any(getattr(config, name) != PAPER[name] for name in _NOT_IN_C):
        return None
    weights = [tensor for parameter in model.parameters() for tensor in plain_tensors(parameter)]
    return "cpu" if all(x.device.type == "cpu" for x in weights) and library("decoding") is not None else None


def _triton_decodes(model: Gecko) -> bool:
    """Return whether the Triton decoder supports config and weights: one device, and one kind in every block."""
    config = model.config
    if config.memory not in ("none", "adaptive") or (config.norm == "rms" and config.local_mixing == "cema"):
        return False
    kinds = set()
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            integers, scale = plain_tensors(module.weight) if is_quantized(module.weight) else (module.weight, None)
            kinds.add(integers.dtype if scale is None else "8 bit" if scale.numel() == len(integers) else "4 bit")
    floats = {parameter.dtype for parameter in (model.embedding.weight, model.head.weight)}
    one_device = len({parameter.device for parameter in model.parameters()}) == 1
    return len(kinds) == 1 and kinds <= {"8 bit", *floats} and len(floats) == 1 and one_device


class PackedWeights:
    """Weights of one model as the decoders in C and Triton read them.

    Weights that have the right form are not copied. The others are: quantised ones in 4 bits, rows that do not fill
    whole registers, and vectors in 16 bits.
    """

    def __init__(self, model: Gecko, backend: Literal["triton", "cpu"]) -> None:
        self._config, self._backend = model.config, backend
        embedding = matrix(model.embedding.weight)
        head = embedding if model.head.weight is model.embedding.weight else matrix(model.head.weight)
        self._ends = {"embedding": embedding, "head": head}
        self._final_norm = _norm(model.final_norm, model.config.model_dim)
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self._layers = [{**_mixer(x.mixer), **_feed_forward(x.feed_forward, model.config)} for x in blocks]
        self._turns = _turns(blocks[0].mixer.pattern, model.config)

    def with_states(self, state: GeckoState, rows: int | None = None) -> Network:
        """Return the network that changes the rows of ``state`` in place, at most ``rows`` of them in one call.

        Each tensor is contiguous, or all are views of pages: the bytes from row to row are the same in all.
        """
        layers = [_with_state(*both) for both in zip(self._layers, state.mixers, strict=True)]
        ring = state.mixers[0].attention
        page_bytes = 0 if ring.keys.is_contiguous() else ring.keys.stride(0) * ring.keys.itemsize
        rounded = {
            f"{name}_are_bfloat16": int(getattr(ring, name).dtype == torch.bfloat16) for name in ("keys", "values")
        }
        kernels = importlib.import_module(f"gecko.ops.decoding.{self._backend}")
        network: Network = kernels.Network({
            **_numbers(self._config), **self._ends, "final_norm": {**self._final_norm, **_norm_state(state.final_norm)},
            "rows": rows or state.batch_size, "page_bytes": page_bytes, **self._turns, **rounded,
            "layer": layers,
        }, (state.clock.position, state.clock.document_start))  # fmt: skip
        return network


def matrix(weight: Tensor, bias: Tensor | None = None) -> Weights:
    """Return a layer's weight (outputs, inputs) and bias as the kernels read them."""
    bias = None if bias is None else _vector(bias)
    if not is_quantized(weight):
        return Weights(_padded(weight.detach()), bias=bias)
    integers, scale = (x.detach() for x in plain_tensors(weight))
    if scale.numel() == len(integers):
        return Weights(_padded(integers), _vector(scale.flatten()), bias)
    return Weights(_packed_halves(integers), _vector(_padded(scale, REGISTER // GROUP)), bias)


def _padded(weight: Tensor, size: int = REGISTER) -> Tensor:
    """Pad rows with zeros to multiples of ``size``; return the weight itself if nothing is missing."""
    missing = -weight.shape[-1] % size
    return F.pad(weight, (0, missing)) if missing else weight.contiguous()


_halves = WeakTensorKeyDictionary()
"""Content of the integers and their packed form, by the integers: packing takes long."""


def _packed_halves(integers: Tensor) -> Tensor:
    """Pack (outputs, inputs) integers of −8 … 7 into bytes: input i of a group with input i + 16 of it."""
    now, (before, packed) = content([integers]), _halves.get(integers, (None, None))
    if now is None or now != before:
        low, high = (_padded(integers) + 8).to(torch.uint8).unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
        packed = (low | high << 4).flatten(1)
        _halves[integers] = now, packed
    return packed


def _vector(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _plus_one(weight: Tensor | None, size: int) -> Tensor:
    return torch.ones(size, dtype=torch.float32, device="cpu") if weight is None else 1 + _vector(weight)


def _norm(norm: TimestepNorm | LayerNorm | BlockRMSNorm, features: int) -> Record:
    """Return factor and shift of every feature; an RMS norm has no shift, and that of a block another factor."""
    if isinstance(norm, BlockRMSNorm) and norm.weight is not None:
        return {"scale": _vector(norm.weight)}
    found: Record = {"scale": _plus_one(norm.weight, features)}
    if not isinstance(norm, RMSNorm):
        found["shift"] = torch.zeros_like(found["scale"]) if norm.bias is None else _vector(norm.bias)
    return found


def _mixer(mixer: GatedAttention) -> Record:
    config, size = mixer.config, mixer.config.key_head_dim
    found: Record = {
        "norm": _norm(mixer.norm, config.model_dim),
        "memory_factor": None if mixer.memory_factor is None else _vector(mixer.memory_factor),
    }  # fmt: skip
    # Factors of queries and keys have that of the scores.
    if mixer.scale is not None and mixer.offset is not None:
        found |= {"qk_scale": (1 + _vector(mixer.scale)) / size**0.5, "qk_shift": _vector(mixer.offset)}
    else:
        query, key = (None if norm is None else norm.weight for norm in (mixer.query_norm, mixer.key_norm))
        found["query_scale"] = _plus_one(query, config.num_heads * size) / size**0.5
        found["key_scale"] = _plus_one(key, config.num_key_value_heads * size)
    for name in ("shared", "query", "key", "value", "gate", "memory_gate", "hidden", "output"):
        if (layer := getattr(mixer, f"to_{name}")) is not None:
            found[f"to_{name}"] = matrix(layer.weight, layer.bias)
    if mixer.cema is not None and mixer.cema_norm is not None:
        omega = mixer.cema.omega
        found["cema_tables"] = _cema_tables(mixer.cema)
        found["cema_skip"] = _plus_one(None, config.model_dim) if omega is None else _vector(omega)
        found["cema_norm"] = _plus_one(mixer.cema_norm.weight, config.model_dim)
    return found


def _feed_forward(layer: FeedForward, config: GeckoConfig) -> Record:
    norm = _norm(layer.norm, config.model_dim)
    matrices = {name: getattr(layer, name) for name in ("fc1", "fc2", "fc3")}
    return {
        "ffn_norm_scale": norm["scale"], "ffn_norm_shift": norm.get("shift"),
        "ffn_scale": None if layer.scale is None else _vector(layer.scale),
        **{name: matrix(one.weight) for name, one in matrices.items() if one is not None},
    }  # fmt: skip


@torch.no_grad()
def _cema_tables(cema: CEMA) -> Tensor:
    """Return (4, D, 2N rounded up to 16): h ← table 0 · h + table 1 · (h, parts swapped) + table 2 · x, and the sum of
    table 3 · h is y. With h = (real, imaginary) and q = (a, b): q h = (a, a) · h + (−b, b) · swapped h."""
    coefficients = cema.coefficients()
    q = torch.view_as_real(coefficients.factor.to(torch.complex64))
    real, imaginary = q[..., :1], q[..., 1:]
    p = coefficients.input.float().unsqueeze(-1)
    tables = torch.stack([
        torch.cat([real, real], -1), torch.cat([-imaginary, imaginary], -1), torch.cat([p, torch.zeros_like(p)], -1),
        coefficients.readout.float().unflatten(-1, (-1, 2)),
    ]).flatten(2)  # fmt: skip
    return _padded(tables, 16)


def _turns(pattern: Pattern, config: GeckoConfig) -> Record:
    """Return cosine and sine of the angles of positions 0 … 2c − 1, (2c, key / 2, 2)."""
    positions = torch.arange(2 * config.chunk_size, device="cpu")
    frequencies = pattern.frequencies(config.key_head_dim)
    phases = rotary_phases(positions, frequencies, torch.float32, torch.device("cpu"))
    return {"phases": torch.view_as_real(phases).contiguous()}


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
        "key_heads": config.num_key_value_heads, "sinks": config.sinks,
        "separate": int(config.queries_and_keys == "separate"), "unit_queries": int(config.query_key_norm),
        "steps_only": int(config.norm == "rms"), "averages": int(config.local_mixing == "cema"),
        "gate": _GATES[config.gate], "hidden_branch": int(config.hidden_branch),
        "silu_values": int(config.value_activation == "silu"), "memory_gate_channels": config.memory_gate_channels,
    }  # fmt: skip


def _with_state(layer: Record, state: MixerState) -> Record:
    found = {
        **layer, "norm": {**layer["norm"], **_norm_state(state.norm)}, "cema": state.cema,
        "keys": state.attention.keys, "values": state.attention.values,
    }  # fmt: skip
    if state.attention.sinks is not None:
        found |= {"sink_keys": state.attention.sinks.keys, "sink_values": state.attention.sinks.values}
    if state.memory is not None:
        memory = state.memory
        found |= {
            "memory": memory.memory, "normaliser": memory.normaliser, "previous_resets": memory.previous_resets,
            "previous": memory.previous.tensors(), "current": memory.current.tensors(),
        }  # fmt: skip
    return found


def _norm_state(state: TimestepNormState | None) -> dict[str, Tensor]:
    return {} if state is None else state.tensors()
