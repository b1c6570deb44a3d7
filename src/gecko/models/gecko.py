"""Gecko: embedding, blocks, head."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.fingerprint import fingerprint
from gecko.identity import identity
from gecko.layers.cema import CEMA
from gecko.layers.feed_forward import FeedForward
from gecko.layers.gated_attention import GatedAttention, MixerState
from gecko.layers.initialise import embedding_
from gecko.layers.norm import LayerNorm, RMSNorm, TimestepNorm
from gecko.layers.projection import project
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy
from gecko.ops.timestep_norm import TimestepNormState
from gecko.quantize import pack, plain_tensors, quantize, stored_bits, unpack
from gecko.recomputation import ActivationCheckpointing, run_block
from gecko.segments import Clock, Context, Segments
from gecko.state import GeckoState
from gecko.store import fill, load_model, save_model
from gecko.tokens import check_tokens, trained_targets


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
        return self.feed_forward(y, onto=x if self.two_hop_residual else y), state


class Gecko(nn.Module):
    """The language model: reads tokens of any number, in calls of any size, with a state of constant size.

    ``activation_checkpointing`` ("none") says what backward recomputes of each block instead of keeping it:
    "full" all of it, "selective" all but the outputs of linear layers. ``sharded`` (False) says that parameters
    are divided among ranks, so that states cannot be tied to these weights. ``float32_layers`` are the kinds of
    layers that stay float32 where the rest of a block computes in bfloat16.
    """

    float32_layers: tuple[type[nn.Module], ...] = (CEMA, LayerNorm, RMSNorm, TimestepNorm)

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.sharded = False
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        embedding_(self.embedding.weight)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = TimestepNorm(config)
        self.head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        if not config.tie_embedding:
            embedding_(self.head.weight)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one weight, if the config wants them so."""
        if self.config.tie_embedding:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Logits of every next token, and the state after the last one.

        Args:
            tokens: (B, T) integers, any T ≥ 1.
            segment_ids: (B, T) integers; a document starts wherever they change. None: one document goes on.
            state: what an earlier call returned; None: nothing was read yet.
            context: the ranks that share the rows, each of which gives its own T of their tokens, whole chunks, and
                the same ``state``; None: the rows are here as a whole.

        Returns:
            logits (B, T, vocab_size), and the state after token T.

        Raises:
            TypeError, ValueError: tokens that are none of the vocabulary's, a state of another model or batch.
        """
        hidden, state, _ = self._read(tokens, segment_ids, state, context)
        return project(hidden, self.head)[0], state

    def loss(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats, a scalar, without ever holding all logits.

        Targets (B, T) of −100 do not count, nor does the last token of a document whose successor in the
        row belongs to another one: a document is never trained on the start of the next. With ``context`` it is the
        mean over all ranks, and the gradients of all ranks add up to its gradient.
        """
        hidden, _, segments = self._read(tokens, segment_ids, None, context)
        targets = self._trained_targets(tokens, targets, segment_ids, segments)
        loss = linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets.flatten())
        return loss if context is None else context.mean(loss, (targets != IGNORED).sum())

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Cross-entropy of every token in nats (B, T), 0 where ``loss`` would not count it, and the state."""
        hidden, state, segments = self._read(tokens, segment_ids, state, context)
        targets = self._trained_targets(tokens, targets, segment_ids, segments)
        losses = token_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets.flatten())
        return losses.view(tokens.shape), state

    def hidden(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """What the head projects, (B, T, D), and the state; arguments as for ``forward``."""
        return self._read(tokens, segment_ids, state, context)[:2]

    @torch.no_grad()
    def step(self, tokens: Tensor, state: GeckoState) -> tuple[Tensor, GeckoState]:
        """One token of every row, for decoding: tokens (B,) to the logits (B, V) of the next ones, and the state.

        The state that a step returns is given up to the next: what is large is written into its tensors, so that
        nothing is copied that does not change. Any other ``state`` is copied first and stays what it is. Weights
        must not change from one step to the next: a change of embedding or head is seen, and so of all weights at once,
        others are not. Errors as for ``forward``.
        """
        tokens = tokens.unsqueeze(1)
        self._check_tokens("tokens", tokens)
        # To look at all weights takes long beside a token: it is done for the first of a row of steps.
        going_on = _may_be_overwritten(state) and (state.model == "" or self._was_named(state.model))
        if not going_on or state.config is not self.config or state.batch_size != len(tokens):
            self.check_state(state, len(tokens))
        if not going_on:
            state = self._begin_steps(state)
        segments = Segments.build(len(tokens), 1, clock=state.clock, device=tokens.device, overwrites=True)
        hidden, after = self._through_blocks(tokens, state, segments)
        return project(hidden[:, 0], self.head)[0], replace(after, exclusive=True)

    def _begin_steps(self, state: GeckoState) -> GeckoState:
        # Writes through ``.data`` count no version, so what was kept before these steps may be of other weights.
        for module in self.modules():
            if isinstance(module, CEMA):
                module.forget()
        return state.own()

    def _read(
        self, tokens: Tensor, segment_ids: Tensor | None, state: GeckoState | None, context: Context | None
    ) -> tuple[Tensor, GeckoState, Segments]:
        self._check_tokens("tokens", tokens)
        if state is not None:
            self.check_state(state, tokens.shape[0])
            # The next step from this state would write into what the new state shares with it.
            state = state.own() if state.exclusive else state
        segments = self._segments(tokens, segment_ids, None if state is None else state.clock, context)
        return *self._through_blocks(tokens, state, segments), segments

    def _through_blocks(
        self, tokens: Tensor, state: GeckoState | None, segments: Segments
    ) -> tuple[Tensor, GeckoState]:
        # What was read before the call is the first rank's to start from; the others get it from there.
        before = state if segments.handoff is None or segments.handoff.first else None
        x = self.embedding(tokens.long())
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.model_dim)
        mixers = []
        for i, block in enumerate(self.blocks):
            mixer = None if before is None else before.mixers[i]
            x, mixer = run_block(self.activation_checkpointing, block, x, mixer, segments)
            mixers.append(mixer)
        x, norm = self.final_norm(x, None if before is None else before.final_norm, segments)
        return x, self._state(state, segments, tuple(mixers), norm)

    def _segments(
        self, tokens: Tensor, segment_ids: Tensor | None, clock: Clock | None, context: Context | None
    ) -> Segments:
        if context is None:
            return Segments.build(*tokens.shape, segment_ids=segment_ids, clock=clock, device=tokens.device)
        batch, length = tokens.shape
        return context.segments(
            batch, length, self.config.chunk_size, segment_ids=segment_ids, clock=clock, device=tokens.device
        )

    def empty_state(self, batch: int = 1) -> GeckoState:
        """The state before anything was read, for this model's weights."""
        weight = self.embedding.weight
        return GeckoState.empty(
            self.config, batch, model=self.fingerprint(), dtype=torch.promote_types(weight.dtype, torch.float32),
            value_dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def check_state(self, state: GeckoState, rows: int) -> None:
        """Raises ValueError for a state that this model cannot go on from with ``rows`` rows."""
        if state.config != self.config:
            raise ValueError("the state must come from a model of this config; it comes from a model of another one.")
        if state.model and not torch.is_grad_enabled() and state.model != self.fingerprint():
            raise ValueError(
                "the state was made by other weights of the same config "
                f"(state {state.model}, model {self.fingerprint()}); read the text again with this model."
            )
        if state.batch_size != rows:
            raise ValueError(f"the state must hold the tokens' {rows} rows; it holds {state.batch_size}.")

    def fingerprint(self) -> str:
        """A short name of the weights, in which every number has its part."""
        now = identity(tensor for parameter in self.parameters() for tensor in plain_tensors(parameter))
        cached = getattr(self, "_fingerprint", None)
        if cached is None or cached[0] != now:
            cached = self._fingerprint = (now, fingerprint(self), self._ends())
        return cached[1]

    def _was_named(self, name: str) -> bool:
        """Whether ``fingerprint`` said so last, and neither other weights were loaded since nor these trained."""
        return getattr(self, "_fingerprint", ())[1:] == (name, self._ends())

    def _ends(self) -> Hashable:
        """Of the first and the last weights only: so much there is time for with every token."""
        ends = (self.embedding.weight, self.head.weight)
        return identity(tensor for weight in ends for tensor in plain_tensors(weight))

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, each whole or not at all."""
        save_model(folder, self.config, pack(self.state_dict()))

    def _state(
        self, before: GeckoState | None, segments: Segments, mixers: tuple[MixerState, ...], norm: TimestepNormState
    ) -> GeckoState:
        untied = self.sharded or torch.is_grad_enabled()
        model = before.model if before is not None else "" if untied else self.fingerprint()
        return GeckoState(self.config, model, segments.end, mixers, norm)

    def _trained_targets(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, segments: Segments
    ) -> Tensor:
        self._check_tokens("targets", targets, ignored=True)
        return trained_targets(tokens, targets, segment_ids, segments.next_begins)

    def _check_tokens(self, name: str, tokens: Tensor, *, ignored: bool = False) -> None:
        check_tokens(name, tokens, self.config.vocab_size, ignored=ignored)


def _may_be_overwritten(state: GeckoState) -> bool:
    """Nobody else has the state's tensors, and they may be written to: those of inference mode only there."""
    return state.exclusive and (torch.is_inference_mode_enabled() or not state.final_norm.mean.is_inference())


def load(folder: str | Path) -> Gecko:
    """The model that ``Gecko.save`` wrote to ``folder``.

    Raises:
        FileNotFoundError, ValueError: nothing is there, a byte has changed, or weights and config do not fit.
    """
    config, weights = load_model(folder)
    return from_weights(config, weights)


def from_weights(config: GeckoConfig, weights: Mapping[str, Tensor]) -> Gecko:
    """A model of ``config`` with copies of ``weights``, in the embedding's dtype, and quantised if they are."""
    with torch.device("meta"):
        model = Gecko(config)
    dtype, bits = weights["embedding.weight"].dtype, stored_bits(weights)
    if bits is None:
        fill(model, {name: weight.to(dtype) for name, weight in weights.items()})
    else:
        quantize(model.to(dtype), bits)
        fill(model, unpack(weights, model.state_dict()))
    return model
