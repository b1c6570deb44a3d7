"""``gecko.Gecko`` as models of transformers. No arithmetic of its own: arguments in, arguments out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gecko.files import whole_file
from gecko.generation.reading import piece_length
from gecko.hf.cache import GeckoCache
from gecko.hf.configuration import GeckoConfig
from gecko.hf.padding import Batch
from gecko.model import Gecko
from gecko.ops.loss import IGNORED, linear_cross_entropy
from gecko.quantize import is_quantized
from gecko.state import GeckoState
from gecko.store import CONFIG, TIED, save_model

_REPEATS_POSITIONS = ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx")
"""Arguments that repeat what ``position_ids`` say of packed documents, for kernels that need it in another form."""


class GeckoPreTrainedModel(PreTrainedModel):
    """What both models share: loading, saving, gradient checkpointing."""

    config_class = GeckoConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _to_gecko: str
    """Where the ``Gecko`` stands in the model, as the beginning of its parameters' names."""

    @property
    def _gecko(self) -> Gecko:
        found: Any = self.get_submodule(self._to_gecko.removesuffix("."))
        return found

    def _init_weights(self, module: nn.Module) -> None:
        """Gecko's modules initialise themselves when they are made."""

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in backward; what ``gradient_checkpointing_enable`` sets."""
        return self._gecko.activation_checkpointing != "none"

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self._gecko.activation_checkpointing = "full" if enabled else "none"

    def get_input_embeddings(self) -> nn.Module:
        return self._gecko.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self._gecko.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self._gecko.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self._gecko.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does; the architecture's ``vocab_size`` follows."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self._gecko.config = self.config.architecture()
        return embedding

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers does; a folder that lacks parameters is refused instead of filled with random ones.

        Raises:
            ValueError: parameters are missing, left over, or of another shape.
        """
        kwargs.setdefault("key_mapping", {r"^(embedding|blocks|final_norm|head)\.": r"gecko.\1."})
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                names = sorted(map(str, info[problem]))
                raise ValueError(
                    f"{model.name_or_path} must hold the parameters of its config; {problem.replace('_', ' ')}: "
                    f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}. Quantised folders open with gecko.load."
                )
        return (model, info) if output_loading_info else model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False, max_shard_size: Any = None, safe_serialization: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write a folder that ``gecko.load`` and ``from_pretrained`` read, the weights in one file with a checksum.

        ``max_shard_size`` is not looked at. With adapters of ``add_adapter``, transformers writes those only.

        Raises:
            ValueError: uploading here, files that are no safetensors, weights that are another model's or quantised.
            OSError: the disk refused; files that were there before survive.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
            return
        if push_to_hub or not safe_serialization or kwargs.get("variant"):
            raise ValueError("a Gecko is saved as one safetensors file; to upload it, use model.push_to_hub(name).")
        if not is_main_process:
            return
        folder, weights = Path(save_directory), self.state_dict() if state_dict is None else state_dict
        self._check_weights(weights)
        config = copy.deepcopy(self.config)
        config.architectures = [type(self).__name__]
        config.dtype = str(self.dtype).removeprefix("torch.")
        save_model(folder, config.architecture(), {n.removeprefix(self._to_gecko): w for n, w in weights.items()})
        if self._auto_class is not None:  # made from remote code, which goes along
            custom_object_save(self, folder, config=config)  # type: ignore[arg-type]
        with whole_file(folder / CONFIG) as temporary:
            temporary.write_text(config.to_json_string(), encoding="utf-8")
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    def _check_weights(self, weights: dict[str, Tensor]) -> None:
        wrong = [name for name in weights if not name.startswith(self._to_gecko)]
        if wrong:
            raise ValueError(f"state_dict must hold parameters {self._to_gecko}…; got {wrong[:3]}.")
        quantized = next((name for name, weight in weights.items() if is_quantized(weight)), None)
        if quantized is not None:
            raise ValueError(
                f"weights in a folder for transformers must not be quantised; {quantized} is. Write the model that "
                "this one was made from, or this one with Gecko.save for gecko.load."
            )


class GeckoModel(GeckoPreTrainedModel):
    """Tokens to what the head projects."""

    _to_gecko = "gecko."
    _tied_weights_keys = {f"gecko.{TIED[0]}": f"gecko.{TIED[1]}"}  # noqa: RUF012

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.gecko = Gecko(config.architecture())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None,
        inputs_embeds: None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states (B, T, D), at padding as ``Batch.read`` says; arguments as for ``GeckoForCausalLM``."""
        _refuse(inputs_embeds, output_attentions, output_hidden_states, others)
        _check_borders(position_ids, others)
        batch = self.batch(input_ids, attention_mask, position_ids, past_key_values)
        state = _state(past_key_values, batch.tokens.device)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = GeckoCache()
        hidden, state = batch.read(self._read, state, keep_state=past_key_values is not None)
        if past_key_values is not None and state is not None:
            past_key_values.follow(state, batch.is_text)
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)
        return _as_asked(output, return_dict, self.config)

    def batch(
        self, input_ids: Tensor | None, mask: Tensor | None, positions: Tensor | None, cache: GeckoCache | None
    ) -> Batch:
        """The call's tokens, checked."""
        if input_ids is None:
            raise ValueError("input_ids must be given; got None.")
        if cache is None:
            return Batch.build(input_ids, mask, positions)
        if not isinstance(cache, GeckoCache):
            raise TypeError(
                f"past_key_values must be a GeckoCache; got {type(cache).__name__}. Leave it out to make one."
            )
        if cache.state is not None and cache.state.batch_size != len(input_ids):
            raise ValueError(
                f"the cache must hold {len(input_ids)} rows, as input_ids; it holds {cache.state.batch_size}."
            )
        return Batch.build(input_ids, mask, positions, cache.text)

    def _read(self, tokens: Tensor, ids: Tensor | None, state: GeckoState | None) -> tuple[Tensor, GeckoState]:
        """In pieces if nothing is to be differentiated, so that a long prompt takes little memory."""
        size = tokens.shape[1] if torch.is_grad_enabled() else piece_length(self.gecko.config)
        parts = []
        for begin in range(0, tokens.shape[1], size):
            piece = slice(begin, begin + size)
            hidden, state = self.gecko.hidden(tokens[:, piece], None if ids is None else ids[:, piece], state)
            parts.append(hidden)
        assert state is not None
        return (torch.cat(parts, dim=1) if len(parts) > 1 else hidden), state


class GeckoForCausalLM(GeckoPreTrainedModel, GenerationMixin):
    """Tokens to logits, loss and text."""

    _to_gecko = "model.gecko."
    _tied_weights_keys = {f"model.gecko.{TIED[0]}": f"model.gecko.{TIED[1]}"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.model = GeckoModel(config)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the model makes its own cache at the first call."""
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, the loss if there are labels, and the cache.

        Args:
            input_ids: (B, T) integers.
            attention_mask: (B, T), or (B, columns before + T): 0 at padding, before or after a row's text. Every row
                gets what it would get alone; after its text, the logits of its last token are repeated.
            position_ids: (B, T). A document starts at every 0 but the first; positions themselves Gecko knows.
            past_key_values: what an earlier call returned; it takes the new state.
            labels: (B, T), the same tokens, −100 where they do not count; the model moves them one place. Padding
                and the first token of a document never count.
            use_cache: whether to return a cache; by default when the model is in evaluation mode.
            logits_to_keep: of how many last columns, or of which; 0 is all. The loss is over all columns and does
                not need the logits, so 1 saves their memory when only the loss is wanted.
            num_items_in_batch: divide the sum of losses by this instead of the number of targets.

        Raises:
            ValueError, TypeError: ``inputs_embeds``, attentions or hidden states are asked for, or see ``Batch``.
        """
        targets = None
        if labels is not None:  # before the cache goes on
            batch = self.model.batch(input_ids, attention_mask, position_ids, past_key_values)
            targets = batch.targets(labels, IGNORED)
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict=True, **others,
        )  # fmt: skip
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        kept = slice(None) if isinstance(kept, int) else kept
        loss = None if targets is None else self._loss(hidden, targets, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss, logits=self.model.gecko.head(hidden[:, kept]), past_key_values=output.past_key_values
        )
        return _as_asked(output, return_dict, self.config)

    def _loss(self, hidden: Tensor, targets: Tensor, num_items: int | Tensor | None) -> Tensor:
        head = self.model.gecko.head
        if not isinstance(head, nn.Linear):
            raise ValueError("the loss uses the head's weight, so no adapter can be put on it; leave out 'head'.")
        loss = linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten())
        return loss if num_items is None else loss * (targets != IGNORED).sum() / num_items


def _state(cache: GeckoCache | None, device: torch.device) -> GeckoState | None:
    """What the cache has read, on ``device`` where it is handed in; what calls put into it is where it belongs."""
    if cache is None or cache.state is None:
        return None
    return cache.state if cache.get_seq_length() else cache.state.to(device)


def _check_borders(positions: Tensor | None, others: dict[str, Any]) -> None:
    given = [name for name in _REPEATS_POSITIONS if others.get(name) is not None]
    if given and positions is None:
        raise ValueError(
            f"{', '.join(given)} must come with position_ids, which say where packed documents begin; got none."
            " Try DataCollatorWithFlattening(return_position_ids=True)."
        )


def _refuse(embeds: object, attentions: bool | None, hidden_states: bool | None, others: dict[str, Any]) -> None:
    if embeds is not None:
        raise ValueError("inputs_embeds cannot be given: a Gecko reads token ids. Pass input_ids.")
    if attentions:
        raise ValueError("output_attentions must be off: a Gecko never holds attention weights of a whole text.")
    if hidden_states:
        raise ValueError("output_hidden_states must be off; GeckoModel returns the last ones, hooks give others.")
    known = (*_REPEATS_POSITIONS, "cache_position")  # transformers 4 repeats so what the cache knows
    unknown = [name for name, value in others.items() if value is not None and name not in known]
    if unknown:
        raise TypeError(f"a Gecko takes no argument {', '.join(unknown)}.")


def _as_asked(output: Any, return_dict: bool | None, config: Any) -> Any:
    return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()
