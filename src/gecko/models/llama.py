"""Llama 2 (Touvron et al., 2023), the baseline. It has the interface of ``Gecko`` and the layers of transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import Architecture, Epsilon, Layers, RopeBase, Size
from gecko.io.model_folder import Layout, fill, fitted, float_dtype, read_folder, write_folder
from gecko.layers.head import head_loss, head_token_losses
from gecko.models.gecko import ActivationCheckpointing, check_tokens, run_block, trained_targets
from gecko.records import build, check
from gecko.runtime.process import require, without_log_warnings
from gecko.runtime.tensors import meta_device, to_device
from gecko.segments import Segments

MODEL_TYPE = "llama"
"""``model_type`` in a ``config.json``, as in transformers."""
NAMES = {
    "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "model_dim": "hidden_size",
    "num_heads": "num_attention_heads", "key_value_heads": "num_key_value_heads", "ffn_dim": "intermediate_size",
    "rope_base": "rope_theta", "norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings",
}  # fmt: skip
"""Name of every field in transformers."""


@dataclass(frozen=True)
class LlamaConfig(Architecture):
    """Architecture of a Llama 2 (Touvron et al., 2023): RMS norms before attention and feed-forward, full causal
    attention with rotary embedding, SwiGLU."""

    vocab_size: Size
    """Number of token ids."""
    num_layers: Layers
    """Number of blocks; each has attention and a feed-forward."""
    model_dim: Size
    """Width of the residual stream."""
    num_heads: Size
    """Number of query heads."""
    ffn_dim: Size
    """Hidden width of the feed-forward."""
    key_value_heads: Size | None = None
    """Number of key and value heads, each shared by equally many query heads. None: ``num_heads``."""
    rope_base: RopeBase = 10_000.0
    """Base of the angles of rotary embedding."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMS norms."""
    tie_embedding: bool = False
    """Whether the head shares the weight of the embedding."""

    def __post_init__(self) -> None:
        check(self)
        if self.model_dim % (2 * self.num_heads):
            raise ValueError(
                "rotary embedding turns pairs of features, so model_dim must be a multiple of 2 · num_heads; "
                f"got {self.model_dim} and {self.num_heads}. Try model_dim={2 * self.num_heads * self.head_dim}."
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"key_value_heads must divide num_heads; got {self.key_value_heads} and {self.num_heads}. "
                f"Try key_value_heads={self.num_heads}."
            )

    @property
    def num_key_value_heads(self) -> int:
        return self.num_heads if self.key_value_heads is None else self.key_value_heads

    @property
    def head_dim(self) -> int:
        return max(1, self.model_dim // self.num_heads)

    @property
    def chunk_size(self) -> None:
        """None: attention has no chunks."""

    def for_transformers(self) -> dict[str, Any]:
        values = {**self.to_dict(), "key_value_heads": self.num_key_value_heads}
        fields = {theirs: values[ours] for ours, theirs in NAMES.items()}
        return {"model_type": MODEL_TYPE, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **fields}

    @classmethod
    def _from_transformers(cls, fields: dict[str, Any]) -> LlamaConfig:
        if fields.get("model_type") != MODEL_TYPE:
            raise ValueError(f"it must be of a llama model, and is of {fields.get('model_type', 'no model_type')!r}.")
        # transformers 5 writes the base of the rotary embedding one level deeper.
        fields = {**fields, **(fields.get("rope_parameters") or {})}
        if fields.get("rope_type", "default") != "default" or fields.get("rope_scaling"):
            raise ValueError("its positions are scaled, and only plain rotary embedding is known.")
        config = build(cls, {ours: fields[theirs] for ours, theirs in NAMES.items() if theirs in fields})
        shared = config.key_value_heads != config.num_heads
        return config if shared else dataclasses.replace(config, key_value_heads=None)


PRESETS: dict[str, LlamaConfig] = {
    "llama2-7b": LlamaConfig(vocab_size=32_000, num_layers=32, model_dim=4096, num_heads=32, ffn_dim=11_008),
    "llama-tiny": LlamaConfig(vocab_size=264, num_layers=5, model_dim=128, num_heads=4, ffn_dim=312),
}
LlamaConfig.presets = PRESETS

LAYOUT = Layout("gecko-llama-1", ("lm_head.weight", "model.embed_tokens.weight"))
MASK_ELEMENTS = 2**22
"""Largest number of query-key pairs in one mask."""


@dataclass(frozen=True)
class KeyValues:
    """Key-value cache of a Llama; it grows with every token."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Rotated keys and values of each layer, (B, key_value_heads, T, head_dim)."""

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0][0].shape[2]


class Llama(nn.Module):
    """Llama language model; its parameters have the names of transformers. It needs the extra ``hf``. Attributes are as
    in ``gecko.models.gecko.Gecko``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        require("transformers", "hf")
        with without_log_warnings():  # of torchao, which transformers imports
            from transformers import LlamaConfig as TransformersConfig
            from transformers import LlamaForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        settings = TransformersConfig.from_dict({**config.for_transformers(), "use_cache": False})
        settings._attn_implementation = "gecko_documents"
        # Document boundaries differ between batches, so a compiled block would recompile for every batch.
        ALL_ATTENTION_FUNCTIONS.register("gecko_documents", torch.compiler.disable(_attend))
        whole = LlamaForCausalLM(settings)
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.sharded = False
        self.z_loss = 0.0
        self.float32_layers: tuple[type[nn.Module], ...] = (LlamaRMSNorm,)
        self.model, self.lm_head = whole.model, whole.lm_head
        self.tie()
        # Its buffers are in no checkpoint, so a model created on ``meta`` would lack them. Every call builds it again.
        del self.model.rotary_emb

    def tie(self) -> None:
        """Share the weight of the embedding with the head if ``tie_embedding`` is set."""
        if self.config.tie_embedding:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of every next token. A token attends to its document up to itself.

        Args:
            tokens: (B, T) integers.
            segment_ids: (B, T) integers; a document starts wherever they change.
        """
        return self.lm_head(self.hidden(tokens, segment_ids))

    def loss(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: object | None = None
    ) -> Tensor:
        """Return the mean cross-entropy in nats, with ``z_loss``, a scalar. Ignored targets are as in ``Gecko.loss``.

        A ``context`` raises ValueError: attention needs all keys of a row, so ranks cannot share rows.
        """
        return self._mean_loss(*self._with_targets(tokens, targets, segment_ids, context))

    def loss_of_layout(self, tokens: Tensor, targets: Tensor, segments: Segments) -> Tensor:
        """Return ``loss`` as ``Gecko.loss_of_layout`` does, for rows of one document each."""
        return self._mean_loss(self._of_layout(tokens, segments), targets)

    def _mean_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return head_loss(self.lm_head, hidden.flatten(0, 1), targets.flatten(), z_loss=self.z_loss)

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: object | None = None
    ) -> tuple[Tensor, None]:
        """Return the cross-entropy of every token in nats, (B, T), 0 for ignored targets, and None for the state."""
        hidden, targets = self._with_targets(tokens, targets, segment_ids, context)
        losses = head_token_losses(self.lm_head, hidden.flatten(0, 1), targets.flatten())
        return losses.view(tokens.shape), None

    def _with_targets(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, context: object | None
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the head, and the targets that count."""
        if context is not None:
            raise ValueError("a Llama's attention needs all keys of a row, so ranks cannot share rows; got a context.")
        check_tokens("targets", targets, self.config.vocab_size, ignored=True)
        return self.hidden(tokens, segment_ids), trained_targets(tokens, targets, segment_ids)

    def hidden(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Return the input of the head, (B, T, D). Arguments are those of ``forward``."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        return self._of_layout(tokens, Segments.build(*tokens.shape, segment_ids=segment_ids, device=tokens.device))

    def _of_layout(self, tokens: Tensor, segments: Segments) -> Tensor:
        x = self.model.embed_tokens(tokens.long())
        rotation = segments.shared("rotation", partial(self._rotation_of, dtype=x.dtype))
        return self._through_blocks(x, rotation, documents=_Documents(segments))

    def _rotation_of(self, segments: Segments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positions = torch.arange(segments.length, device="cpu") - segments.document_starts
        return self._rotation(positions, dtype, segments.device)

    def _rotation(self, positions: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles of ``positions`` (B, T)."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        embedding: Any = LlamaRotaryEmbedding(self.model.config)
        embedding.inv_freq = to_device(embedding.inv_freq, device)
        cosines, sines = embedding(torch.empty(0, dtype=dtype, device=device), to_device(positions, device))
        return cosines, sines

    @torch.no_grad()
    def read(self, tokens: Tensor, before: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """Return the input of the head for tokens (B, T) that follow ``before``, and a cache of the keys and values of
        both. ``before`` does not change."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        read, length = 0 if before is None else before.length, tokens.shape[1]
        positions = torch.arange(read, read + length, device="cpu").expand(tokens.shape)
        cache = _Appending(before)
        # The number of keys grows with every call, and a compiled block would recompile for each.
        with torch.compiler.set_stance("force_eager"):
            x = self.model.embed_tokens(tokens.long())
            hidden = self._through_blocks(x, self._rotation(positions, x.dtype, x.device), cache)
        return hidden, KeyValues(tuple(cache.after))

    def _through_blocks(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any = None, **options: Any) -> Tensor:
        for block in self.blocks:
            # By position: the name of the cache differs between versions of transformers. The others are mask and ids.
            inputs = (x, None, None, cache)
            x = run_block(self.activation_checkpointing, block, *inputs, position_embeddings=rotation, **options)
        return self.model.norm(x)

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, each atomically; transformers reads them too."""
        write_folder(folder, self.config, self.state_dict(), LAYOUT)


def load_llama(folder: str | Path) -> Llama:
    """Load the model that ``Llama.save`` wrote. Errors are those of ``gecko.load``."""
    config, weights = read_folder(folder, LlamaConfig, LAYOUT)
    with meta_device():
        model = Llama(config)
    model.to(float_dtype(weights.get(LAYOUT.tied[1])))
    fill(model, fitted(folder, weights, model.state_dict()))
    return model.eval()


class _Appending:
    """Cache for the layers of transformers. It appends new keys and values to copies of those of ``before``."""

    def __init__(self, before: KeyValues | None) -> None:
        self._before = before
        self.after: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._before is not None:
            earlier = self._before.layers[layer]
            keys, values = torch.cat([earlier[0], keys], dim=2), torch.cat([earlier[1], values], dim=2)
        self.after.append((keys, values))
        return keys, values


class _Documents:
    """Lengths of the documents of a call, row after row; None if every row is one document. It is a class because a
    compiled block would specialise on the contents of a list."""

    def __init__(self, segments: Segments) -> None:
        self.lengths = None if segments.starts is None else [span.length for span in segments.spans]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *,
    documents: _Documents | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return causal attention within each document, (B, T, H, d), and no weights; transformers calls this function.

    The queries (B, H, T, d) belong to the last T of the keys and values (B, key_value_heads, S, d). Without
    ``documents`` each row is one document, which may have earlier keys.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = partial(F.scaled_dot_product_attention, enable_gqa=query.shape[1] != key.shape[1])
    if documents is not None and documents.lengths is not None:
        # The gradient of a split is one concatenation; that of each slice would be a whole tensor filled with zeros.
        flat = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (query, key, value))
        parts = zip(*(x.split(documents.lengths, dim=2) for x in flat), strict=True)
        joined = torch.cat([attend(q, k, v, is_causal=True) for q, k, v in parts], dim=2)
        out = joined.view(query.shape[1], len(query), *query.shape[2:]).transpose(0, 1)
    elif query.shape[2] == key.shape[2]:
        out = attend(query, key, value, is_causal=True)
    else:
        length, total = query.shape[2], key.shape[2]
        # Masks of blocks of queries have at most MASK_ELEMENTS elements for any number of keys.
        outs, size = [], max(1, MASK_ELEMENTS // total)
        for begin in range(0, length, size):
            block = query[:, :, begin : begin + size]
            seen = total - length + begin + block.shape[2]
            sees = torch.ones(block.shape[2], seen, dtype=torch.bool, device=query.device).tril(seen - block.shape[2])
            outs.append(attend(block, key[:, :, :seen], value[:, :, :seen], attn_mask=sees))
        out = torch.cat(outs, dim=2)
    return out.transpose(1, 2), None
