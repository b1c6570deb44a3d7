"""Checkpoints of the reference release, in and out: one table of names, no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gecko.config import GeckoConfig, unknown_name

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
"""Reference config field to ours; the two timenorm_betas become ``timestep_betas``."""

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

_IRRELEVANT = ("efficient_attn", "init_mode", "memory_efficient_norm", "dropout", "hidden_dropout", "attention_dropout")
"""Reference fields that change neither weights nor outputs in evaluation."""


def from_reference(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[GeckoConfig, dict[str, Tensor]]:
    """Config and weights for ``Gecko`` from those of the reference release.

    Complex parameters become (real, imaginary) pairs; rotary tables and the norms' empty priors are dropped.

    Raises:
        ValueError: an unknown field or parameter, an output size that differs from the vocabulary, or a prior
            that is not empty.
    """
    ours = _config(config)
    names, weights = dict(_names(ours)), {}
    for name, tensor in state.items():
        if _is_derived(name):
            _check_prior(name, tensor)
        elif name in names:
            weights[names[name]] = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        else:
            raise ValueError(unknown_name("reference parameter", name, names))
    if ours.tie_embedding:
        weights.setdefault("head.weight", weights["embedding.weight"])
    return ours, weights


def to_reference(config: GeckoConfig, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and parameters under the reference release's names, the inverse of ``from_reference``.

    Raises:
        ValueError: the architecture is none that the release has (other attention, memory or norm).
    """
    if (config.attention, config.memory, config.cema_skip) != ("sliding_chunk", "adaptive", "identity") or (
        config.timestep_betas is None
    ):
        raise ValueError("the reference release has sliding chunk attention, adaptive memory and decaying norm only.")
    fields = {theirs: getattr(config, ours) for theirs, ours in FIELDS.items()}
    fields["timenorm_beta1"], fields["timenorm_beta2"] = config.timestep_betas
    fields["output_size"] = -1
    theirs_of = {ours: theirs for theirs, ours in _names(config)}
    return fields, {theirs_of[name]: tensor for name, tensor in weights.items()}


def _config(config: Mapping[str, Any]) -> GeckoConfig:
    known = {*FIELDS, *_IRRELEVANT, "timenorm_beta1", "timenorm_beta2", "output_size"}
    for name in config:
        if name not in known:
            raise ValueError(unknown_name("reference config field", name, known))
    if config.get("output_size", -1) not in (-1, config["vocab_size"]):
        raise ValueError(f"output_size must be -1 or vocab_size {config['vocab_size']}; got {config['output_size']}.")
    fields = {FIELDS[name]: value for name, value in config.items() if name in FIELDS}
    betas = (config.get("timenorm_beta1", 0.999), config.get("timenorm_beta2", 0.9999))
    return GeckoConfig(**fields, timestep_betas=betas)


def _names(config: GeckoConfig) -> Iterator[tuple[str, str]]:
    """(reference name, our name) of every parameter the release may hold."""
    yield from TOP.items()
    for i in range(config.num_layers):
        for theirs, ours in BLOCK.items():
            yield f"layers.{i}.{theirs}", f"blocks.{i}.{ours}"


def _is_derived(name: str) -> bool:
    return name == "rope.freqs" or name.rsplit(".", 1)[-1] in ("prior_count", "prior_mean", "prior_var")


def _check_prior(name: str, tensor: Tensor) -> None:
    if name.endswith("prior_count") and int(tensor) != 0:
        raise ValueError(f"{name} must be 0 (no prior statistics), as in published checkpoints; got {int(tensor)}.")
