"""The Gecko language model (Ma et al., 2026), and what serves every architecture: ``check_tokens``, ``trained_targets``
and ``run_block``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from gecko.config import GeckoConfig
from gecko.io.checkpoints import model_folder
from gecko.io.fingerprints import fingerprint as fingerprint_of
from gecko.io.model_folder import GECKO, TIED, WRAPPERS, fill, fitted, float_dtype, read_folder, write_folder
from gecko.io.quantization import pack, plain_tensors, quantize, stored_bits, unpack
from gecko.layers import CEMA, FeedForward, LayerNorm, RMSNorm, TimestepNorm, block_norm, embedding_, is_bare, project
from gecko.layers.gated_attention import GatedAttention, MixerState
from gecko.layers.head import head_loss, head_token_losses
from gecko.ops.common import content
from gecko.ops.loss import IGNORED
from gecko.runtime.tensors import meta_device, to_device
from gecko.segments import Context, ContextExchange, Segments
from gecko.state import GeckoState

ActivationCheckpointing = Literal["none", "selective", "full"]
"""Activations that backward recomputes: none, all except the outputs of linear layers, or all."""


class Block(nn.Module):
    """x ← FFN(y) + y with y = Mixer(x), or FFN(y) + x with the two-hop residual."""

    def __init__(self, config: GeckoConfig, layer: int) -> None:
        super().__init__()
        self.two_hop_residual = config.two_hop_residual
        self.mixer = GatedAttention(config)
        self.feed_forward = FeedForward(config, layer)

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState | None]:
        """Map x (B, T, D) to its shape; also return the state after the last token; None if the call keeps none."""
        if self.feed_forward.adds(x) and is_bare(self.mixer, GatedAttention):
            terms, state = self.mixer.terms(x, state, segments)
            return self.feed_forward.of_sum(terms, x if self.two_hop_residual else None), state
        y, state = self.mixer(x, state, segments)
        return self.feed_forward(y, onto=x if self.two_hop_residual else y), state


class Gecko(nn.Module):
    """Gecko language model. It reads any number of tokens, in calls of any length, with a state of constant size.

    Attributes:
        activation_checkpointing: activations of each block that backward recomputes: "none" (the default), "full", or
            "selective" (all except the outputs of linear layers).
        sharded: whether the parameters are sharded over ranks. The fingerprint of the weights is then not computed, so
            a state is not checked against them.
        z_loss: coefficient of the squared log-sum-exp of the logits, whose mean is added to ``loss``.
        float32_layers: classes of layers that stay float32 when the rest of a block computes in bfloat16.
        block_class: class of the blocks.
        folder: where ``load`` found the model, and its tokenizer; None for a model that was made in memory.
    """

    float32_layers: tuple[type[nn.Module], ...] = (CEMA, LayerNorm, RMSNorm, TimestepNorm)
    block_class: type[Block] = Block

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.sharded = False
        self.folder: Path | None = None
        self.z_loss = 0.0
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        embedding_(self.embedding.weight)
        self.blocks = nn.ModuleList(self.block_class(config, layer) for layer in range(config.num_layers))
        self.final_norm = block_norm(config)
        self.head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        if not config.tie_embedding:
            embedding_(self.head.weight)
        self.tie()

    def tie(self) -> None:
        """Share the weight of the embedding with the head if ``tie_embedding`` is set."""
        if self.config.tie_embedding:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Return the logits (B, T, vocab_size) of every next token and the state after the last token.

        Args:
            tokens: (B, T) integers, any T ≥ 1.
            segment_ids: (B, T) integers; a document starts wherever they change. None: no document starts in the call.
            state: the state that an earlier call returned. None: the initial state.
            context: the ranks that share the rows. Each rank passes its own T tokens, which must be whole chunks, and
                the same ``state``. None: this process has the whole rows.

        Raises:
            TypeError, ValueError: a token is not in the vocabulary, or the state is of another model or batch size.
        """
        hidden, state, _ = self._read(tokens, segment_ids, state, context)
        return project(hidden, self.head)[0], state

    def loss(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        """Return the mean cross-entropy in nats, with ``z_loss``, a scalar.

        The logits of all tokens are never in memory at once. No state is kept: hooks of blocks and mixers see None.

        Targets (B, T) of −100 and targets of the last token of a document are ignored. So a document is never trained
        on the start of the next one. With ``context``, the mean is over all ranks, and its gradient is the sum of the
        gradients of all ranks.
        """
        hidden, _, targets = self._read_with_targets(tokens, targets, segment_ids, None, context, keeps_state=False)
        return self._mean_loss(hidden, targets, context)

    def loss_and_state(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, state: GeckoState,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Return ``loss`` of tokens that follow ``state``, and the state after them, which has gradients too. They do
        not reach the calls that returned ``state`` if its tensors are detached."""
        hidden, after, targets = self._read_with_targets(tokens, targets, segment_ids, state, context)
        return self._mean_loss(hidden, targets, context), after

    def loss_of_layout(self, tokens: Tensor, targets: Tensor, segments: Segments) -> Tensor:
        """Return ``loss`` of targets from ``trained_targets``, for a layout that keeps no state. The host reads nothing
        of a batch but what ``segments`` has built."""
        return self._mean_loss(self._through_blocks(self._embed(tokens), None, segments)[0], targets)

    def _mean_loss(self, hidden: Tensor, targets: Tensor, context: Context | None = None) -> Tensor:
        rows, flat = hidden.flatten(0, 1), targets.flatten()
        loss = head_loss(self.head, rows, flat, z_loss=self.z_loss)
        return loss if context is None else context.mean(loss, (targets != IGNORED).sum())

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Return the cross-entropy of every token in nats, (B, T), 0 for ignored targets, and the state."""
        hidden, state, targets = self._read_with_targets(tokens, targets, segment_ids, state, context)
        losses = head_token_losses(self.head, hidden.flatten(0, 1), targets.flatten())
        return losses.view(tokens.shape), state

    def hidden(
        self, tokens: Tensor, segment_ids: Tensor | None = None, state: GeckoState | None = None,
        context: Context | None = None, *, lengths: Tensor | None = None,
    ) -> tuple[Tensor, GeckoState]:  # fmt: skip
        """Return the input of the head, (B, T, D), and the state.

        Arguments are those of ``forward``; ``tokens`` may also be embeddings (B, T, D), which the model reads in place
        of those that ``embedding`` returns for token ids. With ``lengths`` (B,), without gradients, the tokens of a row
        after that number are padding: what is returned for them is unspecified, and the state is that before them.
        """
        return self._read(tokens, segment_ids, state, context, lengths)[:2]

    @torch.no_grad()
    def step(self, tokens: Tensor, state: GeckoState) -> tuple[Tensor, GeckoState]:
        """Decode one token per row: map tokens (B,) to the logits (B, V) of the next tokens, and return the state.

        ``gecko.inference`` decodes many times faster: it changes states in place. Errors are those of ``forward``.
        """
        logits, after = self(tokens.unsqueeze(1), state=state)
        return logits[:, 0], after

    def unchecked_step(self, tokens: Tensor, state: GeckoState) -> tuple[Tensor, GeckoState]:
        """Compute ``step`` without its checks: comparing all weights with the state's takes as long as a token."""
        segments = Segments.build(len(tokens), 1, clock=state.clock, device=tokens.device)
        hidden, after = self._through_blocks(self.embedding(tokens).unsqueeze(1), state, segments)
        return project(hidden[:, 0], self.head)[0], after

    def _read(
        self, tokens: Tensor, segment_ids: Tensor | None, state: GeckoState | None, context: Context | None,
        lengths: Tensor | None = None, keeps_state: bool = True,
    ) -> tuple[Tensor, GeckoState, Segments]:  # fmt: skip
        x, (batch, length), clock = self._embed(tokens), tokens.shape[:2], None
        if state is not None:
            self.check_state(state, batch)
            clock = state.clock
        layout: dict[str, Any] = {"segment_ids": segment_ids, "clock": clock, "device": tokens.device}
        if context is None:
            segments = Segments.build(batch, length, lengths=lengths, **layout)
        else:
            assert lengths is None, "ranks that share rows read no padding"
            self.config.refuse(("convolution_width",), "a model whose rows several ranks share")
            if self.config.memory == "orthogonal":  # its chunks have no affine maps that ranks could exchange
                raise ValueError("a model whose rows several ranks share must not have memory=orthogonal.")
            segments = context.segments(batch, length, self.config.chunk_size, **layout)
        segments = segments if keeps_state else dataclasses.replace(segments, keeps_state=False)
        return *self._through_blocks(x, state, segments), segments

    def _read_with_targets(
        self, tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, state: GeckoState | None,
        context: Context | None, keeps_state: bool = True,
    ) -> tuple[Tensor, GeckoState, Tensor]:  # fmt: skip
        """Return the input of the head, the state, and the targets that count."""
        hidden, state, segments = self._read(tokens, segment_ids, state, context, None, keeps_state)
        check_tokens("targets", targets, self.config.vocab_size, ignored=True)
        return hidden, state, trained_targets(tokens, targets, segment_ids, segments.next_begins)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of token ids (B, T), or those that are given."""
        if tokens.dim() != 3 or not tokens.is_floating_point():
            check_tokens("tokens", tokens, self.config.vocab_size)
            return self.embedding(tokens.long())
        if tokens.numel() == 0 or tokens.shape[-1] != self.config.model_dim:
            raise ValueError(
                f"embeddings must have shape (batch, length, {self.config.model_dim}), batch and length at least 1; "
                f"got {tuple(tokens.shape)}."
            )
        return tokens

    def _through_blocks(self, x: Tensor, state: GeckoState | None, segments: Segments) -> tuple[Tensor, GeckoState]:
        x = x * math.sqrt(self.config.model_dim) if self.config.scale_embedding else x
        # Only the first rank starts from the state; the others receive theirs through the exchange.
        before = state if segments.exchange is None or segments.exchange.first else None
        mixers = []
        for i, block in enumerate(self.blocks):
            mixer = None if before is None else before.mixers[i]
            x, mixer = run_block(self.activation_checkpointing, block, x, mixer, segments, exchange=segments.exchange)
            mixers.append(mixer)
        x, norm = self.final_norm(x, None if before is None else before.final_norm, segments)
        unchecked = self.sharded or torch.is_grad_enabled() or torch.compiler.is_exporting()
        model = state.model if state is not None else "" if unchecked else self.fingerprint()
        clock = segments.end if segments.keeps_state else segments.clock
        return x, GeckoState(self.config, model, clock, tuple(mixers), norm)

    def empty_state(self, batch: int = 1) -> GeckoState:
        """Return the initial state for this model's weights."""
        weight = self.embedding.weight
        return GeckoState.empty(
            self.config, batch, model=self.fingerprint(), dtype=torch.promote_types(weight.dtype, torch.float32),
            value_dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def check_state(self, state: GeckoState, rows: int) -> None:
        """Raise ValueError unless this model can continue from ``state`` with ``rows`` rows."""
        if state.config != self.config:
            raise ValueError("the state must come from a model of this config; it comes from a model of another one.")
        if state.model and not torch.is_grad_enabled() and state.model != self.fingerprint():
            raise ValueError(
                "the state was made by other weights of the same config "
                f"(state {state.model}, model {self.fingerprint()}); read the text again with this model."
            )
        dtype, given = torch.promote_types(self.embedding.weight.dtype, torch.float32), state.dtype
        if given not in (dtype, None):
            raise ValueError(f"the state must be {dtype}, as this model computes it; it is {given}.")
        if state.batch_size != rows:
            raise ValueError(f"the state must hold the tokens' {rows} rows; it holds {state.batch_size}.")

    def fingerprint(self) -> str:
        """Return a hash of the weights, 16 hexadecimal digits, that changes if any weight changes."""
        # Writes through ``.data``, numpy or memory maps leave no trace but the numbers: all of them are read again.
        now = content([tensor for parameter in self.parameters() for tensor in plain_tensors(parameter)])
        cached = getattr(self, "_fingerprint", None)
        if cached is None or now is None or cached[0] != now:
            cached = self._fingerprint = (now, fingerprint_of(self, TIED if self.config.tie_embedding else ()))
        return cached[1]

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, each atomically. Raise FileExistsError if the folder belongs
        to a training run or is a checkpoint with weights, ValueError if the config ties weights that differ, OSError if
        writing failed; existing files are unchanged."""
        save_model(folder, self.config, pack(self.state_dict()))


def sharing_parameters(model: Gecko, added: Mapping[str, nn.Parameter] | None = None, **changes: Any) -> Gecko:
    """Return a model, in evaluation mode, with the parameters of ``model``, not copies, and some fields of its config
    changed. ``added`` are the parameters that only the new config has; those that it does not have are left out."""
    with meta_device():
        other = Gecko(dataclasses.replace(model.config, **changes))
    weights = {**model.state_dict(keep_vars=True), **(added or {})}
    other.load_state_dict({name: weights[name] for name in other.state_dict()}, assign=True)
    return other.eval()


def check_tokens(name: str, tokens: Tensor, vocab_size: int, *, ignored: bool = False) -> None:
    """Raise TypeError or ValueError unless ``tokens`` are ids (B, T) of a vocabulary; ``ignored`` also allows −100."""
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"{name} must be integers; got {tokens.dtype}. Use tokens.long() if they are token ids.")
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch, length), both at least 1; got {tuple(tokens.shape)}.")
    if tokens.device.type == "cpu" and not torch.compiler.is_exporting():  # which knows shapes but no values
        tokens = tokens.long()  # a narrow dtype would wrap the numbers that it is compared with
        wrong = (tokens < 0) | (tokens >= vocab_size)
        wrong &= (tokens != IGNORED) if ignored else True
        if bool(wrong.any()):
            raise ValueError(
                f"{name} must be ids in 0..{vocab_size - 1}; got {int(tokens[wrong][0])}. "
                "Check that the tokenizer is the one the model was trained with."
            )


def trained_targets(
    tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, next_begins: Tensor | None = None
) -> Tensor:
    """Return ``targets`` (B, T) with −100 at the last token of every document, which is thus never trained on the next.

    ``next_begins`` (B,) bool says whether a document starts after the last token; None: none does.
    """
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have the tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}.")
    targets = targets.long()
    if segment_ids is None:
        return targets
    next_document = segment_ids[:, 1:] != segment_ids[:, :-1]
    last = next_document.new_zeros(len(targets), 1) if next_begins is None else next_begins.unsqueeze(1)
    ends = torch.cat([next_document, last.to(next_document.device)], dim=1)
    return targets.masked_fill(to_device(ends, targets.device), IGNORED)


def run_block(
    mode: ActivationCheckpointing, block: nn.Module, *inputs: Any, exchange: ContextExchange | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return ``block(*inputs, **options)``. With gradients, backward recomputes the activations given by ``mode``, but
    not what arrived from other ranks through ``exchange``."""
    if mode == "none" or not torch.is_grad_enabled():
        return block(*inputs, **options)
    kept = partial(create_selective_checkpoint_contexts, _PROJECTIONS) if mode == "selective" else noop_context_fn
    kept = kept if exchange is None else exchange.keeping(kept)
    # No block draws random numbers, and a captured step cannot read the generator's state.
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=kept, **options)


_PROJECTIONS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def save_model(folder: str | Path, config: GeckoConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a model folder of weights by their names in ``Gecko``, quantised ones as ``pack`` returns them. A tied head
    is stored once, as the embedding. Errors are those of ``Gecko.save``."""
    # Loaders that match names exactly, as accelerate's do, find those of GeckoForCausalLM; they read no quantised ones.
    prefix = WRAPPERS[0] if stored_bits(weights) is None else ""
    write_folder(folder, config, weights, GECKO, prefix)


def load(folder: str | Path) -> Gecko:
    """Load the model that ``Gecko.save`` wrote to ``folder``, or the newest undamaged checkpoint of a training run, in
    evaluation mode, as transformers' ``from_pretrained``. Raise FileNotFoundError if a file is missing, ValueError if
    one is damaged, or weights and config do not fit."""
    folder = model_folder(folder)
    model = from_weights(*read_folder(folder, GeckoConfig, GECKO), source=folder)
    model.folder = folder
    return model


def from_weights(config: GeckoConfig, weights: Mapping[str, Tensor], source: object = "the weights") -> Gecko:
    """Return a model of ``config`` with copies of ``weights``, in the dtype of the embedding or quantised, and in
    evaluation mode: to change the mode of all modules at every decoded token takes longer than a small model's step.
    Raise ValueError, which names ``source``, if a weight is missing, unknown, not finite, or of another shape or dtype.
    """
    with meta_device():
        model = Gecko(config)
    model.to(float_dtype(weights.get("embedding.weight")))
    if (bits := stored_bits(weights)) is not None:
        quantize(model, bits)
    blank = model.state_dict()
    fill(model, unpack(fitted(source, weights, pack(blank)), blank))
    return model.eval()
