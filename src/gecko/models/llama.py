"""Llama, of transformers' layers, with the face that trainer and evaluations know of Gecko."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.baselines.config import LlamaConfig
from gecko.extras import require
from gecko.ops.loss import linear_cross_entropy, token_cross_entropy
from gecko.recomputation import ActivationCheckpointing, run_block
from gecko.segments import Segments
from gecko.store import Layout, fill, read_folder, write_folder
from gecko.tokens import check_tokens, trained_targets

LAYOUT = Layout("gecko-llama-1", ("lm_head.weight", "model.embed_tokens.weight"))
_ATTENTION = "gecko_documents"
"""The name of ``_attend`` among transformers' ways to compute attention."""
MASK_ELEMENTS = 2**22
"""Pairs of a query and a key that are masked at a time."""

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class KeyValues:
    """What a Llama keeps of the texts it has read: it grows with every token."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Of each layer rotated keys and values, (B, key_value_heads, T, head_dim)."""

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0][0].shape[2]


class Llama(nn.Module):
    """The language model; parameters have the names that they have in transformers.

    Args:
        config: needs the extra ``hf``.

    ``activation_checkpointing``, ``sharded`` and ``float32_layers`` are as in :class:`gecko.model.Gecko`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        require("transformers", "hf")
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        whole = LlamaForCausalLM(_transformers_config(config))
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.sharded = False
        self.float32_layers: tuple[type[nn.Module], ...] = (LlamaRMSNorm,)
        self.model, self.lm_head = whole.model, whole.lm_head
        self.tie()
        # It holds numbers that no checkpoint has and that a model made without memory would lack; made anew each call.
        del self.model.rotary_emb

    def tie(self) -> None:
        """Make head and embedding one weight, if the config wants them so."""
        if self.config.tie_embedding:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of every next token; a token sees those before it in its row and document.

        Args:
            tokens: (B, T) integers.
            segment_ids: (B, T) integers; a document starts wherever they change.
        """
        return self.lm_head(self.hidden(tokens, segment_ids))

    def loss(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: object | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats, a scalar, of the targets (B, T) that ``Gecko.loss`` counts.

        ValueError for a ``context``: no rank can do with a part of the keys.
        """
        hidden, targets = self._with_targets(tokens, targets, segment_ids, context)
        return linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: object | None = None
    ) -> tuple[Tensor, None]:
        """Cross-entropy of every token in nats (B, T), 0 where ``loss`` would not count it; there is no state."""
        hidden, targets = self._with_targets(tokens, targets, segment_ids, context)
        losses = token_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return losses.view(tokens.shape), None

    def hidden(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """What the head projects, (B, T, D); arguments as for ``forward``."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        segments = Segments.build(*tokens.shape, segment_ids=segment_ids, device=tokens.device)
        positions = torch.arange(tokens.shape[1]) - segments.document_starts
        return self._through_blocks(tokens, positions, documents=_Documents(segments))

    @torch.no_grad()
    def read(self, tokens: Tensor, before: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """What the head projects for tokens (B, T) that go on after ``before``, which stays as it is; and both's keys
        and values."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        read, length = 0 if before is None else before.length, tokens.shape[1]
        positions = torch.arange(read, read + length).expand(tokens.shape)
        cache = _Appending(before)
        # Keys are more in every call, and a compiled block would be compiled again for each.
        with torch.compiler.set_stance("force_eager"):
            hidden = self._through_blocks(tokens, positions, past_key_values=cache)
        return hidden, KeyValues(tuple(cache.after))

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, each whole or not at all; transformers reads them too."""
        write_folder(folder, self.config, self.state_dict(), LAYOUT)

    def _with_targets(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, context: object | None
    ) -> tuple[Tensor, Tensor]:
        if context is not None:
            raise ValueError("a Llama's attention needs all keys of a row, so ranks cannot share rows; got a context.")
        check_tokens("targets", targets, self.config.vocab_size, ignored=True)
        return self.hidden(tokens, segment_ids), trained_targets(tokens, targets, segment_ids)

    def _through_blocks(self, tokens: Tensor, positions: Tensor, **options: Any) -> Tensor:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        x = self.model.embed_tokens(tokens.long())
        rotation = LlamaRotaryEmbedding(self.model.config).to(x.device)(x, positions.to(x.device))
        for block in self.blocks:
            x = run_block(self.activation_checkpointing, block, x, position_embeddings=rotation, **options)
        return self.model.norm(x)


def load_llama(folder: str | Path) -> Llama:
    """The model that ``Llama.save`` wrote. FileNotFoundError or ValueError as for ``gecko.load``."""
    config, weights = read_folder(folder, LlamaConfig, LAYOUT)
    with torch.device("meta"):
        model = Llama(config)
    dtype = weights[LAYOUT.tied[1]].dtype
    fill(model, {name: weight.to(dtype) for name, weight in weights.items()})
    return model


def _transformers_config(config: LlamaConfig) -> Any:
    from transformers import LlamaConfig as TransformersConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Likewise documents, which lie elsewhere in every batch.
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, torch.compiler.disable(_attend))
    made = TransformersConfig.from_dict({**config.for_transformers(), "use_cache": False})
    made._attn_implementation = _ATTENTION
    return made


class _Appending:
    """What transformers' layers take for a cache: gives each its keys and values of before with the new ones."""

    def __init__(self, before: KeyValues | None) -> None:
        self._before = before
        self.after: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        if self._before is not None:
            earlier = self._before.layers[layer]
            keys, values = torch.cat([earlier[0], keys], dim=2), torch.cat([earlier[1], values], dim=2)
        self.after.append((keys, values))
        return keys, values


class _Documents:
    """Tokens of each document of a call, row after row; None where every row is one.

    A class, because what a compiled block is given as a list it is compiled for.
    """

    def __init__(self, segments: Segments) -> None:
        self.lengths: list[int] | None = None
        if segments.starts is not None:
            starts = torch.from_numpy(segments.starts).clone()
            starts[:, 0] = True
            begins = torch.nonzero(starts.flatten()).flatten()
            self.lengths = torch.diff(begins, append=torch.tensor([starts.numel()])).tolist()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *,
    documents: _Documents | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention, each document by itself; transformers calls it.

    Args:
        query: (B, H, T, d); key and value: (B, key_value_heads, S, d), the last T of them the queries' own.
        mask: none, ever: what a query sees follows from its place.
        documents: of the rows; None: they go on after earlier keys.

    Returns:
        (B, T, H, d), and nothing in place of weights.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = partial(F.scaled_dot_product_attention, enable_gqa=query.shape[1] != key.shape[1])
    if documents is not None and documents.lengths is not None:
        out = _by_document(attend, query, key, value, documents.lengths)
    elif query.shape[2] == key.shape[2]:
        out = attend(query, key, value, is_causal=True)
    else:
        out = _after_earlier_keys(attend, query, key, value)
    return out.transpose(1, 2), None


def _by_document(attend: Attend, query: Tensor, key: Tensor, value: Tensor, documents: list[int]) -> Tensor:
    batch, heads, length, width = query.shape
    # One split for all: its gradient is joined once, where single slices would each fill a whole tensor with zeros.
    rows = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(documents, dim=2) for x in (query, key, value)]
    outs = [attend(q, k, v, is_causal=True) for q, k, v in zip(*rows, strict=True)]
    return torch.cat(outs, dim=2).view(heads, batch, length, width).transpose(0, 1)


def _after_earlier_keys(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In blocks of queries, so that the masks stay small however many keys there are."""
    length, total = query.shape[2], key.shape[2]
    outs, size = [], max(1, MASK_ELEMENTS // total)
    for begin in range(0, length, size):
        block = query[:, :, begin : begin + size]
        seen = total - length + begin + block.shape[2]
        mask = torch.ones(block.shape[2], seen, dtype=torch.bool, device=query.device).tril(seen - block.shape[2])
        outs.append(attend(block, key[:, :, :seen], value[:, :, :seen], attn_mask=mask))
    return torch.cat(outs, dim=2)
