"""Random Llamas of transformers: their sizes, and forms that compute in float64 throughout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")
transformers.utils.logging.disable_progress_bar()

CHUNK = 6
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SIZES = {
    "vocab_size": 37, "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "head_dim": 6,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-3": (
        "Llama",
        {"rope_parameters": LLAMA3, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "mistral": ("Mistral", {"sliding_window": 2 * CHUNK, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen2": ("Qwen2", {"head_dim": 4}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": {"rope_theta": 1e6}}),
}
"""Class in transformers, and what differs from ``SIZES``: heads and their groups, head_dim ≠ D / H, tied or untied."""


def random_model(kind: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """Return a model of transformers in float64 with norms' weights from 0.05 on and biases that are not 0."""
    fields = {**SIZES, **changes}
    model = (
        getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields)).double().eval()
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(drawn * 2 + 0.05 if "norm" in name else (drawn - 0.5) * 0.5)
    return model


class RMS(nn.Module):
    """The norm of transformers, which rounds to float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Rotary(nn.Module):
    """The angles of transformers, which it computes in float32."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * torch.cat([self.frequencies, self.frequencies])
        return angles.cos(), angles.sin()


def in_float64(model: Any, frequencies: Tensor) -> Any:
    """Replace the parts of a model that compute in float32 whatever the dtype of the weights is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, RMS(child.weight, child.variance_epsilon))
    model.model.rotary_emb = Rotary(frequencies)
    return model


def write_tiny(folder: Path, config: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None) -> Path:
    """Write a Llama of one layer with changed fields and weights; None removes one."""
    fields = {"model_type": "llama", **{name: SIZES[name] for name in list(SIZES)[:8]}, "num_hidden_layers": 1}
    model = random_model("Llama", {"num_hidden_layers": 1, "head_dim": 4, "hidden_size": 20})
    found = {**model.state_dict(), **(weights or {})}
    folder.mkdir()
    save_file({name: x.contiguous() for name, x in found.items() if x is not None}, folder / "model.safetensors")
    merged = {**fields, "head_dim": 4, **(config or {})}
    (folder / "config.json").write_text(json.dumps({name: x for name, x in merged.items() if x is not None}))
    return folder
