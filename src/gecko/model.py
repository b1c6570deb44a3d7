"""Gecko: embedding, blocks, head."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gecko.config import GeckoConfig
from gecko.layers.feed_forward import FeedForward
from gecko.layers.gated_attention import GatedAttention, MixerState
from gecko.layers.initialise import embedding_
from gecko.layers.norm import TimestepNorm
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy
from gecko.ops.timestep_norm import TimestepNormState
from gecko.segments import Segments
from gecko.state import GeckoState
from gecko.store import load_model, save_model


class Block(nn.Module):
    """x ← FFN(y) + y with y = Mixer(x); with two-hop residual, FFN(y) + x."""

    def __init__(self, config: GeckoConfig, layer: int) -> None:
        super().__init__()
        self.two_hop_residual = config.two_hop_residual
        self.mixer = GatedAttention(config)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState]:
        """x (B, T, D) to the same shape, and the state after the last token."""
        y, state = self.mixer(x, state, segments)
        return self.feed_forward(y) + (x if self.two_hop_residual else y), state


class Gecko(nn.Module):
    """The language model: reads tokens of any number, in calls of any size, with a state of constant size.

    ``checkpoint_blocks`` (False) recomputes each block in backward instead of keeping its activations.
    """

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        embedding_(self.embedding.weight)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = TimestepNorm(config)
        self.head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        if config.tie_embedding:
            self.head.weight = self.embedding.weight
        else:
            embedding_(self.head.weight)

    def forward(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None
    ) -> tuple[Tensor, GeckoState]:
        """Logits of every next token, and the state after the last one.

        Args:
            tokens: (B, T) integers, any T ≥ 1.
            segment_ids: (B, T) integers; a document starts wherever they change. None: one document goes on.
            state: what an earlier call returned; None: nothing was read yet.

        Returns:
            logits (B, T, vocab_size), and the state after token T.

        Raises:
            TypeError, ValueError: tokens that are none of the vocabulary's, a state of another model or batch.
        """
        hidden, state = self.hidden(tokens, segment_ids, state)
        return self.head(hidden), state

    def loss(self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats, a scalar, without ever holding all logits.

        Targets (B, T) of −100 do not count, nor does the last token of a document whose successor in the
        row belongs to another one: a document is never trained on the start of the next.
        """
        hidden, _ = self.hidden(tokens, segment_ids, None)
        targets = self._trained_targets(tokens, targets, segment_ids)
        return linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets.flatten())

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None
    ) -> tuple[Tensor, GeckoState]:
        """Cross-entropy of every token in nats (B, T), 0 where ``loss`` would not count it, and the state."""
        hidden, state = self.hidden(tokens, segment_ids, state)
        targets = self._trained_targets(tokens, targets, segment_ids)
        losses = token_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets.flatten())
        return losses.view(tokens.shape), state

    def hidden(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None
    ) -> tuple[Tensor, GeckoState]:
        """What the head projects, (B, T, D), and the state; arguments as for ``forward``."""
        self._check_tokens("tokens", tokens)
        if state is not None:
            self._check_state(state, tokens)
        segments = Segments.build(
            *tokens.shape, segment_ids=segment_ids, clock=None if state is None else state.clock, device=tokens.device
        )
        x = self.embedding(tokens.long())
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.model_dim)
        mixers = []
        for i, block in enumerate(self.blocks):
            x, mixer = self._run(block, x, None if state is None else state.mixers[i], segments)
            mixers.append(mixer)
        x, norm = self.final_norm(x, None if state is None else state.final_norm, segments)
        return x, self._state(state, segments, tuple(mixers), norm)

    def empty_state(self, batch: int = 1) -> GeckoState:
        """The state before anything was read, for this model's weights."""
        weight = self.embedding.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return GeckoState.empty(self.config, batch, model=self.fingerprint(), dtype=dtype, device=weight.device)

    def fingerprint(self) -> str:
        """A short name of the weights: a hash over some numbers of every parameter."""
        versions = tuple(parameter._version for parameter in self.parameters())
        cached = getattr(self, "_fingerprint", None)
        if cached is None or cached[0] != versions:
            digest = hashlib.sha256()
            for name, parameter in self.named_parameters():
                digest.update(name.encode())
                digest.update(parameter.detach().flatten()[:64].double().cpu().numpy().tobytes())
            cached = self._fingerprint = (versions, digest.hexdigest()[:16])
        return cached[1]

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, each whole or not at all."""
        save_model(folder, self.config, self.state_dict())

    def _run(
        self, block: nn.Module, x: Tensor, state: MixerState | None, segments: Segments
    ) -> tuple[Tensor, MixerState]:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, x, state, segments, use_reentrant=False)
        return block(x, state, segments)

    def _state(
        self, before: GeckoState | None, segments: Segments, mixers: tuple[MixerState, ...], norm: TimestepNormState
    ) -> GeckoState:
        model = before.model if before is not None else "" if torch.is_grad_enabled() else self.fingerprint()
        return GeckoState(self.config, model, segments.end, mixers, norm)

    def _trained_targets(self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None) -> Tensor:
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}.")
        self._check_tokens("targets", targets, ignored=True)
        targets = targets.long()
        if segment_ids is None:
            return targets
        next_document = segment_ids[:, 1:] != segment_ids[:, :-1]
        last = torch.zeros_like(next_document[:, :1])
        return targets.masked_fill(torch.cat([next_document, last], dim=1), IGNORED)

    def _check_tokens(self, name: str, tokens: Tensor, *, ignored: bool = False) -> None:
        if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise TypeError(f"{name} must be integers; got {tokens.dtype}. Use tokens.long() if they are token ids.")
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape (batch, length) with length of at least 1; got {tuple(tokens.shape)}."
            )
        if tokens.device.type == "cpu":
            wrong = (tokens < 0) | (tokens >= self.config.vocab_size)
            wrong &= (tokens != IGNORED) if ignored else True
            if bool(wrong.any()):
                raise ValueError(
                    f"{name} must be ids in 0..{self.config.vocab_size - 1}; got {int(tokens[wrong][0])}. "
                    "Check that the tokenizer is the one the model was trained with."
                )

    def _check_state(self, state: GeckoState, tokens: Tensor) -> None:
        if state.config != self.config:
            raise ValueError("the state must come from a model of this config; it comes from a model of another one.")
        if state.model and not torch.is_grad_enabled() and state.model != self.fingerprint():
            raise ValueError(
                "the state was made by other weights of the same config "
                f"(state {state.model}, model {self.fingerprint()}); read the text again with this model."
            )
        if state.batch_size != tokens.shape[0]:
            raise ValueError(f"the state must hold the tokens' {tokens.shape[0]} rows; it holds {state.batch_size}.")


def load(folder: str | Path) -> Gecko:
    """The model that ``Gecko.save`` wrote to ``folder``.

    Raises:
        FileNotFoundError, ValueError: nothing is there, a byte has changed, or weights and config do not fit.
    """
    config, weights = load_model(folder)
    return from_weights(config, weights)


def from_weights(config: GeckoConfig, weights: Mapping[str, Tensor]) -> Gecko:
    """A model of ``config`` with ``weights``, in their dtype."""
    model = Gecko(config)
    model.to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=True)
    return model
