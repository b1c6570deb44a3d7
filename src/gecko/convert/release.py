"""Read the reference releases, and convert their config and weights by tables of names. No code in their files is run.

A release is a folder with ``config.json`` and either ``consolidated.pth`` or, of the authors' later models, a folder
``full_model.tpNN`` for every tensor-parallel rank, which PyTorch's distributed checkpoints wrote. Gecko's release
converts in both directions. Megalodon's has the same names and converts to Gecko only, and so does Gekko, the authors'
later design.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.convert.distributed_files import read_distributed
from gecko.io.files import read_object
from gecko.records import unknown_name

CONFIG, WEIGHTS, PARTS = "config.json", "consolidated.pth", ("full_model.tp", "sharded_model.tp")
_BY_COLUMN = ("embed.weight", ".wo.weight", ".fc2.weight")
"""Ends of the names of weights of which a tensor-parallel rank holds columns; of the others it holds rows."""

FIELDS = {
    "vocab_size": "vocab_size", "num_layers": "num_layers", "model_dim": "model_dim", "z_dim": "key_dim",
    "value_dim": "value_dim", "num_heads": "num_heads", "ffn_hidden_dim": "ffn_dim", "cema_ndim": "cema_modes",
    "chunk_size": "chunk_size", "timenorm_num_groups": "timestep_groups", "layernorm_num_groups": "norm_groups",
    "norm_eps": "norm_eps", "norm_affine": "norm_affine", "rope_base": "rope_base", "num_rope_heads": "rope_heads",
    "swiglu": "swiglu", "rescale_nffn": "ffn_scale", "scale_emb": "scale_embedding", "share_emb": "tie_embedding",
    "two_hop_residual": "two_hop_residual",
}  # fmt: skip
"""Field of the reference config → field of this package. The two timenorm_betas become ``timestep_betas``."""

MEGALODON = {
    "attention": "chunk", "memory": "none", "timestep_betas": None, "cema_skip": "learned", "two_hop_residual": True,
}  # fmt: skip
"""Fields that are missing in configs of Megalodon's release. Such configs are recognised by ``norm_num_groups``."""

MEGALODON_DEFAULTS = {"swiglu": False, "rope_base": 10_000.0}
"""Defaults of Megalodon's release that differ from Gecko's; it writes a missing base as null."""

TOP = {
    "embed.weight": "embedding.weight", "output.final_norm.weight": "final_norm.weight",
    "output.final_norm.bias": "final_norm.bias", "output.output.weight": "head.weight",
}  # fmt: skip
FEED_FORWARD = {
    "nffn.norm.weight": "feed_forward.norm.weight", "nffn.norm.bias": "feed_forward.norm.bias",
    "nffn.fc1.weight": "feed_forward.fc1.weight", "nffn.fc2.weight": "feed_forward.fc2.weight",
    "nffn.fc3.weight": "feed_forward.fc3.weight",
}  # fmt: skip
BLOCK = {
    "mega.timenorm.weight": "mixer.norm.weight", "mega.timenorm.bias": "mixer.norm.bias",
    "mega.cema.alpha": "mixer.cema.alpha", "mega.cema.delta": "mixer.cema.delta",
    "mega.cema.theta": "mixer.cema.theta", "mega.cema.gamma": "mixer.cema.gamma",
    "mega.cema.omega": "mixer.cema.omega", "mega.rmsnorm.weight": "mixer.cema_norm.weight",
    "mega.wz.weight": "mixer.to_shared.weight", "mega.wz.bias": "mixer.to_shared.bias",
    "mega.wv.weight": "mixer.to_value.weight", "mega.wv.bias": "mixer.to_value.bias",
    "mega.wr.weight": "mixer.to_gate.weight", "mega.wr.bias": "mixer.to_gate.bias",
    "mega.wh1.weight": "mixer.to_hidden.weight", "mega.wh1.bias": "mixer.to_hidden.bias",
    "mega.wh2.weight": "mixer.to_output.weight", "mega.gamma": "mixer.scale", "mega.beta": "mixer.offset",
    **FEED_FORWARD, "nffn.alpha": "feed_forward.scale",
}  # fmt: skip

_IRRELEVANT = (
    "efficient_attn", "init_mode", "memory_efficient_norm", "dropout", "hidden_dropout", "attention_dropout",
    "layerwise_ckpt", "custom_bwd", "loss_parallel",
)  # fmt: skip
"""Reference fields without effect on weights or on outputs in evaluation."""
_PRIORS = ("prior_count", "prior_mean", "prior_var", "prior_logv")

GEKKO_FIELDS = {
    "vocab_size": "vocab_size", "num_layers": "num_layers", "model_dim": "model_dim", "num_heads": "num_heads",
    "ffn_hidden_dim": "ffn_dim", "chunk_size": "chunk_size", "causal_conv_width": "convolution_width",
    "attn_gate_func": "gate_activation", "apply_bias_term": "gate_bias", "timenorm_num_groups": "timestep_groups",
    "layernorm_num_groups": "norm_groups", "timenorm_eps": "timestep_eps", "layernorm_eps": "norm_eps",
    "rmsnorm_eps": "rms_eps", "rope_base": "rope_base", "swiglu": "swiglu", "scale_emb": "scale_embedding",
}  # fmt: skip
"""Field of a Gekko's config → field of this package. ``_gekko_config`` reads sizes of heads, betas and the rule."""

_GEKKO_ONLY: dict[str, tuple[Any, ...]] = {
    "arch": ("gekko",), "attn_act_func": ("softmax",), "residual_func": ("base", "add"), "apply_rmsnorm": (False,),
    "causal_conv_weight_normalization": (True,), "norm_affine": (True,), "num_experts": (0,), "num_values": (0,),
    "num_dense_layers": (None,), "awm_orthogonal_update": (False, True),
}  # fmt: skip
"""Fields of which a Gecko block computes only these values; the first is meant where the field is missing."""
_GEKKO_SIZES = ("num_kv_heads", "head_dim", "v_head_dim", "rope_head_dim", "timenorm_beta1", "timenorm_beta2")
_GEKKO_IRRELEVANT = (
    *_IRRELEVANT, "output_size", "ddp_backend", "qknorm", "apply_attn_gate", "num_activated_values",
    "num_activated_experts", "num_shared_experts", "expert_inter_dim", "residual_heads", "fused_block",
)  # fmt: skip
"""Fields without effect on a Gekko's outputs in evaluation, as are those of ``_GEKKO_WORDS``."""
_GEKKO_WORDS = ("init_", "moe_", "recompute_"), ("_backend",)
"""How more of them start and end."""

GEKKO_BLOCK = {
    "gda.timenorm.weight": "mixer.norm.weight", "gda.timenorm.bias": "mixer.norm.bias",
    "gda.wq.weight": "mixer.to_query.weight", "gda.wk.weight": "mixer.to_key.weight",
    "gda.wv.weight": "mixer.to_value.weight", "gda.wv.bias": "mixer.to_value.bias",
    "gda.wr.weight": "mixer.to_gate.weight", "gda.wr.bias": "mixer.to_gate.bias",
    "gda.wo.weight": "mixer.to_output.weight", "gda.taps": "mixer.taps",
    "gda.query_norm.weight": "mixer.query_norm.weight", "gda.key_norm.weight": "mixer.key_norm.weight",
    **FEED_FORWARD,
}  # fmt: skip
"""Names of a Gekko. ``gda.taps`` joins q_conv, k_conv and v_conv."""


def read_release(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config fields and the parameters of a release, for ``gecko.convert.from_reference``.

    ``source`` is the folder, or a weights file in it, which may have any name. No code in it runs.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: the weights are in several files, or a file has other content.
    """
    source = Path(source).expanduser()
    if parts := _parts(source):
        return _read_config(source / CONFIG), joined([read_distributed(part) for part in parts])
    weights = source if source.is_file() else _find_weights(source)
    return _read_config(weights.with_name(CONFIG)), _read_weights(weights)


def _find_weights(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"SOURCE must be a folder with {WEIGHTS} and {CONFIG}, or a .pth file; there is no {folder}."
        )
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    found = sorted(folder.glob("*.pth"))
    if not found:
        raise FileNotFoundError(
            f"{folder} must hold {WEIGHTS} or {PARTS[0]}00, the release's weights; it has no .pth file."
        )
    if len(found) > 1:
        raise ValueError(
            f"{folder} must hold the weights in one {WEIGHTS}; it has {len(found)} .pth files, from {found[0].name} to "
            f"{found[-1].name}. Consolidate them with the release's own script for one model-parallel rank, or name "
            "one."
        )
    return found[0]


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"the release's {CONFIG} must lie beside the weights; there is no {path}.")
    config = read_object(path, "the release's config")
    config = config.get("model", config)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object under 'model', if it has one; got a {type(config).__name__}.")
    if "model_type" in config:
        raise ValueError(f"{path} is of a {config['model_type']!r} folder, not of a reference release.")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} must hold tensors as torch.save writes them, and nothing else; it holds something that could be "
            "code, and was not opened."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} must be a file written by torch.save; it could not be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{path} must hold parameters by name; it holds a {type(state).__name__} of other things.")
    return state


def _parts(folder: Path) -> list[Path]:
    """Return the folders of all tensor-parallel ranks in ``folder``; none if it holds no distributed checkpoint."""
    for prefix in PARTS:
        found = sorted(folder.glob(f"{prefix}*")) if folder.is_dir() else []
        wanted = [folder / f"{prefix}{rank:02d}" for rank in range(len(found))]
        if found != wanted:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{folder} must hold {prefix}00 and those of all other ranks; it has {names}.")
        if found:
            return found
    return []


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters of which tensor-parallel ranks hold ``parts``. Raise ValueError if the parts have different
    names, or shapes that do not fit together."""
    for rank, part in enumerate(parts):
        if other := part.keys() ^ parts[0].keys():
            raise ValueError(f"all tensor ranks must hold the same names; ranks 0 and {rank} differ in {min(other)}.")
    whole = {}
    for name in parts[0]:
        of_ranks = [part[name] for part in parts]
        try:  # numbers, such as the counts of priors, are on every rank
            axis = int(name.endswith(_BY_COLUMN))
            whole[name] = torch.cat(of_ranks, axis) if of_ranks[0].dim() else torch.stack(of_ranks)
        except (RuntimeError, IndexError) as error:
            shapes = [tuple(x.shape) for x in of_ranks]
            raise ValueError(f"the parts of {name} must fit together; they have shapes {shapes}.") from error
    return whole


def from_reference(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Convert config and weights of a reference release to those of ``Gecko``.

    Complex parameters become (real, imaginary) pairs. Rotary tables and the empty priors of norms are dropped.

    Raises:
        ValueError: a field or parameter is unknown, a Gecko block does not compute a field's value, the output size
            differs from the vocabulary, or a prior is not empty.
    """
    later = "arch" in config
    if "embed.weight" not in state:
        raise ValueError(f"a checkpoint of the reference release must hold embed.weight; got {sorted(state)[:3]} ….")
    if (vocab_size := config.get("vocab_size", -1)) == -1:
        vocab_size = next(iter(state["embed.weight"].shape), 0)
    ours = _config({**config, "vocab_size": vocab_size})
    derived = {name for name in state if name == "rope.freqs" or name.rsplit(".", 1)[-1] in _PRIORS}
    for name in derived:
        if (later or name.endswith("prior_count")) and bool((state[name] != 0).any()):
            found = state[name].tolist()
            raise ValueError(f"{name} must be 0 (no prior statistics), as in published checkpoints; got {found}.")
    kept = {name: tensor for name, tensor in state.items() if name not in derived}
    kept = _with_taps(ours, kept) if later else kept
    block = GEKKO_BLOCK if later else BLOCK
    weights = renamed(kept, all_names(TOP, block, "layers", ours.num_layers), "reference parameter")
    weights = {name: _plain(name, tensor) for name, tensor in weights.items()}
    return ours, with_tied_head(weights, "share_emb") if ours.tie_embedding else weights


def to_reference(config: GeckoConfig, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert config and weights of ``Gecko`` to those of the reference release; the inverse of ``from_reference``.
    Raise ValueError if the release does not support the attention, memory or norm of ``config``."""
    if (config.attention, config.memory, config.cema_skip) != ("sliding_chunk", "adaptive", "identity") or (
        config.timestep_betas is None
    ):
        raise ValueError("the reference release has sliding chunk attention, adaptive memory and decaying norm only.")
    fields = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    fields["timenorm_beta1"], fields["timenorm_beta2"] = config.timestep_betas
    fields["output_size"] = -1
    theirs_of = {ours: theirs for theirs, ours in all_names(TOP, BLOCK, "layers", config.num_layers).items()}
    return fields, {theirs_of[name]: tensor for name, tensor in weights.items()}


def _config(config: Mapping[str, Any]) -> GeckoConfig:
    if config.get("output_size", -1) not in (-1, config["vocab_size"]):
        raise ValueError(f"output_size must be -1 or vocab_size {config['vocab_size']}; got {config['output_size']}.")
    if "arch" in config:
        return _gekko_config(config)
    if "norm_num_groups" not in config:
        betas = (config.get("timenorm_beta1", 0.999), config.get("timenorm_beta2", 0.9999))
        fields = _translated(config, FIELDS, "timenorm_beta1", "timenorm_beta2")
        return GeckoConfig.from_dict(fields | {"timestep_betas": betas})
    own = ("timenorm_num_groups", "layernorm_num_groups", "num_rope_heads", "two_hop_residual")
    known = {theirs: ours for theirs, ours in FIELDS.items() if theirs not in own}
    given = {name: value for name, value in config.items() if not (name == "rope_base" and value is None)}
    fields = _translated(given, known | {"norm_num_groups": "timestep_groups"})
    return GeckoConfig.from_dict({**MEGALODON_DEFAULTS, **fields, **MEGALODON})


def _gekko_config(config: Mapping[str, Any]) -> GeckoConfig:
    known = {*GEKKO_FIELDS, *_GEKKO_ONLY, *_GEKKO_SIZES, *_GEKKO_IRRELEVANT}
    for name, value in config.items():
        if name in _GEKKO_ONLY and value not in _GEKKO_ONLY[name]:
            wanted = " or ".join(map(repr, _GEKKO_ONLY[name]))
            raise ValueError(f"{name} must be {wanted}, which a Gecko block computes; got {value!r}.")
        if name not in known and not (name.startswith(_GEKKO_WORDS[0]) or name.endswith(_GEKKO_WORDS[1])):
            raise ValueError(unknown_name("reference config field", name, known))
    for name in (*GEKKO_FIELDS, "timenorm_beta1", "timenorm_beta2"):
        if name not in config:
            raise ValueError(f"the config of a Gekko must have {name}; it has {', '.join(sorted(config))}.")
    heads = _size(config, "num_heads", 1)
    own = _size(config, "num_kv_heads", 1, heads)
    key = _size(config, "head_dim", 1, _size(config, "model_dim", 1) // heads)
    value, rotated = _size(config, "v_head_dim", 1, key), _size(config, "rope_head_dim", 0, key)
    if rotated > key or rotated % 2:
        raise ValueError(f"rope_head_dim must be even and at most head_dim={key}; got {rotated}.")
    fields = {ours: config[theirs] for theirs, ours in GEKKO_FIELDS.items()}
    fields["timestep_eps"] = None if fields["timestep_eps"] == fields["norm_eps"] else fields["timestep_eps"]
    orthogonal = bool(config.get("awm_orthogonal_update"))
    if orthogonal and config["rmsnorm_eps"] != 1e-6:
        raise ValueError(f"rmsnorm_eps must be 1e-6 with awm_orthogonal_update; got {config['rmsnorm_eps']!r}.")
    ours = GeckoConfig.preset(
        "gekko-tiny", **fields, memory="orthogonal" if orthogonal else "adaptive",
        timestep_betas=(config["timenorm_beta1"], config["timenorm_beta2"]), key_dim=heads * key,
        value_dim=heads * value, key_value_heads=None if own == heads else own, rope_heads=None if rotated else 0,
    )  # fmt: skip
    if rotated in (0, key):
        return ours
    angles = [ours.rope_base ** (-2 * i / rotated) if 2 * i < rotated else 0.0 for i in range(key // 2)]
    return replace(ours, rope_frequencies=tuple(angles))


def _size(config: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return value


def _with_taps(config: GeckoConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a Gekko with the taps of each layer in one. Key norms without weights get zeros,
    which change nothing: earlier commits of the authors' code have none."""
    keys, values = (config.num_key_value_heads * x for x in (config.key_head_dim, config.value_head_dim))
    kept, bare = dict(state), not any(name.endswith("gda.key_norm.weight") for name in state)
    for layer in range(config.num_layers):
        taps, prefix = [], f"layers.{layer}.gda"
        for part, channels in (("q", config.key_dim), ("k", keys), ("v", values)):
            name, shape = f"{prefix}.{part}_conv.weight", (channels, config.convolution_width)
            found = kept.pop(name, None)
            if found is None or found.shape != shape:
                given = "nothing" if found is None else f"one of {tuple(found.shape)}"
                raise ValueError(f"{name} must be a tensor of shape {shape}; the checkpoint holds {given}.")
            taps.append(found)
        kept[f"{prefix}.taps"] = torch.cat(taps)
        if bare:
            kept[f"{prefix}.key_norm.weight"] = taps[0].new_zeros(keys)
    return kept


def _translated(config: Mapping[str, Any], fields: Mapping[str, str], *others: str) -> dict[str, Any]:
    known = {*fields, *_IRRELEVANT, "output_size", *others}
    for name in config:
        if name not in known:
            raise ValueError(unknown_name("reference config field", name, known))
    return {fields[name]: value for name, value in config.items() if name in fields}


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Convert complex numbers to pairs, and remove the axes of length 1 of Megalodon's CEMA."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    axes = {"alpha": 2, "delta": 2, "theta": 1, "omega": 1}.get(name.rsplit(".", 1)[-1])
    return tensor if axes is None or tensor.dim() <= axes else tensor.flatten(axes - 1)


def all_names(top: Mapping[str, str], block: Mapping[str, str], prefix: str, layers: int) -> dict[str, str]:
    """Return names in ``Gecko`` by those of a format with the names ``block`` in each of its blocks PREFIX.NUMBER."""
    pairs = [(i, theirs, ours) for i in range(layers) for theirs, ours in block.items()]
    return {**top, **{f"{prefix}.{i}.{theirs}": f"blocks.{i}.{ours}" for i, theirs, ours in pairs}}


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str], kind: str) -> dict[str, Tensor]:
    """Return weights by their names in ``Gecko``; ValueError for one without, which the message calls a ``kind``."""
    for name in weights:
        if name not in names:
            raise ValueError(unknown_name(kind, name, names))
    return {names[name]: weight for name, weight in weights.items()}


def with_tied_head(weights: dict[str, Tensor], field: str) -> dict[str, Tensor]:
    """Return the weights of a tied model with its head; ValueError if they hold another one than the embedding."""
    embedding = weights["embedding.weight"]
    if not torch.equal(weights.get("head.weight", embedding), embedding):
        raise ValueError(f"{field} says that embedding and output are one; the checkpoint holds two that differ.")
    return {**weights, "head.weight": embedding}
