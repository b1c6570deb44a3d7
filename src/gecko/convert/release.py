"""Read checkpoints of the reference releases, and convert them by one table of names.

Gecko's release converts in both directions. Megalodon's release has the same names and converts to Gecko only. A
release is a folder with ``consolidated.pth`` and ``config.json``.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.io.files import read_object
from gecko.records import unknown_name

FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "num_layers",
    "model_dim": "model_dim",
    "z_dim": "key_dim",
    "value_dim": "value_dim",
    "num_heads": "num_heads",
    "ffn_hidden_dim": "ffn_dim",
    "cema_ndim": "cema_modes",
    "chunk_size": "chunk_size",
    "timenorm_num_groups": "timestep_groups",
    "layernorm_num_groups": "norm_groups",
    "norm_eps": "norm_eps",
    "norm_affine": "norm_affine",
    "rope_base": "rope_base",
    "num_rope_heads": "rope_heads",
    "swiglu": "swiglu",
    "rescale_nffn": "ffn_scale",
    "scale_emb": "scale_embedding",
    "share_emb": "tie_embedding",
    "two_hop_residual": "two_hop_residual",
}
"""Field of the reference config → field of this package. The two timenorm_betas become ``timestep_betas``."""

MEGALODON = {
    "attention": "chunk", "memory": "none", "timestep_betas": None, "cema_skip": "learned", "two_hop_residual": True,
}  # fmt: skip
"""Fields that are missing in configs of Megalodon's release. Such configs are recognised by ``norm_num_groups``."""

MEGALODON_DEFAULTS = {"swiglu": False, "rope_base": 10_000.0}
"""Defaults of Megalodon's release that differ from Gecko's; it writes a missing base as null."""

TOP = {
    "embed.weight": "embedding.weight",
    "output.final_norm.weight": "final_norm.weight",
    "output.final_norm.bias": "final_norm.bias",
    "output.output.weight": "head.weight",
}

BLOCK = {
    "mega.timenorm.weight": "mixer.norm.weight",
    "mega.timenorm.bias": "mixer.norm.bias",
    "mega.cema.alpha": "mixer.cema.alpha",
    "mega.cema.delta": "mixer.cema.delta",
    "mega.cema.theta": "mixer.cema.theta",
    "mega.cema.gamma": "mixer.cema.gamma",
    "mega.cema.omega": "mixer.cema.omega",
    "mega.rmsnorm.weight": "mixer.cema_norm.weight",
    "mega.wz.weight": "mixer.to_shared.weight",
    "mega.wz.bias": "mixer.to_shared.bias",
    "mega.wv.weight": "mixer.to_value.weight",
    "mega.wv.bias": "mixer.to_value.bias",
    "mega.wr.weight": "mixer.to_gate.weight",
    "mega.wr.bias": "mixer.to_gate.bias",
    "mega.wh1.weight": "mixer.to_hidden.weight",
    "mega.wh1.bias": "mixer.to_hidden.bias",
    "mega.wh2.weight": "mixer.to_output.weight",
    "mega.gamma": "mixer.scale",
    "mega.beta": "mixer.offset",
    "nffn.norm.weight": "feed_forward.norm.weight",
    "nffn.norm.bias": "feed_forward.norm.bias",
    "nffn.fc1.weight": "feed_forward.fc1.weight",
    "nffn.fc2.weight": "feed_forward.fc2.weight",
    "nffn.fc3.weight": "feed_forward.fc3.weight",
    "nffn.alpha": "feed_forward.scale",
}

_IRRELEVANT = (
    "efficient_attn", "init_mode", "memory_efficient_norm", "dropout", "hidden_dropout", "attention_dropout",
    "layerwise_ckpt", "custom_bwd", "loss_parallel",
)  # fmt: skip
"""Reference fields without effect on weights or on outputs in evaluation."""
_PRIORS = ("prior_count", "prior_mean", "prior_var", "prior_logv")


def from_reference(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Convert config and weights of a reference release to those of ``Gecko``.

    Complex parameters become (real, imaginary) pairs. Rotary tables and the empty priors of norms are dropped.

    Raises:
        ValueError: a field or parameter is unknown, the output size differs from the vocabulary, or a prior is not
            empty.
    """
    ours = _config({**config, "vocab_size": _vocab_size(config, state)})
    derived = {name for name in state if name == "rope.freqs" or name.rsplit(".", 1)[-1] in _PRIORS}
    for name in derived:
        if name.endswith("prior_count") and bool((state[name] != 0).any()):
            found = state[name].tolist()
            raise ValueError(f"{name} must be 0 (no prior statistics), as in published checkpoints; got {found}.")
    kept = {name: tensor for name, tensor in state.items() if name not in derived}
    weights = renamed(kept, all_names(TOP, BLOCK, "layers", ours.num_layers), "reference parameter")
    weights = {name: _plain(name, tensor) for name, tensor in weights.items()}
    return ours, with_tied_head(weights, "share_emb") if ours.tie_embedding else weights


def to_reference(config: GeckoConfig, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert config and weights of ``Gecko`` to those of the reference release; the inverse of ``from_reference``.

    Raises:
        ValueError: the release does not support the attention, memory or norm of ``config``.
    """
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
    if "norm_num_groups" not in config:
        betas = (config.get("timenorm_beta1", 0.999), config.get("timenorm_beta2", 0.9999))
        fields = _translated(config, FIELDS, "timenorm_beta1", "timenorm_beta2")
        return GeckoConfig.from_dict(fields | {"timestep_betas": betas})
    own = ("timenorm_num_groups", "layernorm_num_groups", "num_rope_heads", "two_hop_residual")
    known = {theirs: ours for theirs, ours in FIELDS.items() if theirs not in own}
    given = {name: value for name, value in config.items() if not (name == "rope_base" and value is None)}
    fields = _translated(given, known | {"norm_num_groups": "timestep_groups"})
    return GeckoConfig.from_dict({**MEGALODON_DEFAULTS, **fields, **MEGALODON})


def _translated(config: Mapping[str, Any], fields: Mapping[str, str], *others: str) -> dict[str, Any]:
    known = {*fields, *_IRRELEVANT, "output_size", *others}
    for name in config:
        if name not in known:
            raise ValueError(unknown_name("reference config field", name, known))
    return {fields[name]: value for name, value in config.items() if name in fields}


def _vocab_size(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> int:
    """Return the vocabulary size of the config, or that of the embedding if the config has −1."""
    if "embed.weight" not in state:
        raise ValueError(f"a checkpoint of the reference release must hold embed.weight; got {sorted(state)[:3]} ….")
    given = config.get("vocab_size", -1)
    return next(iter(state["embed.weight"].shape), 0) if given == -1 else given


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Convert complex numbers to pairs, and remove the axes of length 1 of Megalodon's CEMA."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    axes = {"alpha": 2, "delta": 2, "theta": 1, "omega": 1}.get(name.rsplit(".", 1)[-1])
    return tensor if axes is None or tensor.dim() <= axes else tensor.flatten(axes - 1)


def all_names(top: Mapping[str, str], block: Mapping[str, str], prefix: str, layers: int) -> dict[str, str]:
    """Return names in ``Gecko`` by those of a format with the names ``block`` in each of its blocks PREFIX.NUMBER."""
    in_blocks = [
        (f"{prefix}.{i}.{theirs}", f"blocks.{i}.{ours}") for i in range(layers) for theirs, ours in block.items()
    ]
    return {**top, **dict(in_blocks)}


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


CONFIG, WEIGHTS = "config.json", "consolidated.pth"


def read_release(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config fields and the parameters of a release, for ``gecko.convert.from_reference``.

    Only tensors are read from the file (``weights_only``); no code in it runs.

    Args:
        source: the folder, or the weights file in it, which may have any name.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: the weights are in several files, or a file has other content.
    """
    source = Path(source).expanduser()
    weights = source if source.is_file() else _find_weights(source)
    return _read_config(weights.with_name(CONFIG)), _read_weights(weights)


def _find_weights(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"SOURCE must be a folder with {WEIGHTS} and {CONFIG}, or a .pth file; there is no {folder}."
        )
    found = sorted(folder.glob("*.pth"))
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    if len(found) == 1:
        return found[0]
    if not found:
        raise FileNotFoundError(f"{folder} must hold {WEIGHTS}, the release's weights; it has no .pth file.")
    raise ValueError(
        f"{folder} must hold the weights in one {WEIGHTS}; it has {len(found)} .pth files, from {found[0].name} to "
        f"{found[-1].name}. Consolidate them with the release's own script for one model-parallel rank, or name one."
    )


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
