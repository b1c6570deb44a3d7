"""Model classes for transformers that wrap ``gecko.Gecko``: they translate arguments, checkpoints and outputs."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gecko.hf.cache import Batch, GeckoCache
from gecko.hf.configuration import GeckoConfig
from gecko.inference.prefill import piece_length
from gecko.io.files import whole_file
from gecko.io.model_folder import CONFIG, TIED, save_model, stored_weight
from gecko.io.quantization import is_quantized
from gecko.models.gecko import Gecko
from gecko.ops.loss import IGNORED, linear_cross_entropy
from gecko.state import GeckoState

_PARTS = ("embedding.", "blocks.", "final_norm.", "head.")
"""Prefixes of the parameter names in a ``Gecko``."""

_REPEATS_POSITIONS = ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx")
"""Arguments that repeat the document borders of ``position_ids`` in the form that other attention kernels need."""


class GeckoPreTrainedModel(PreTrainedModel):
    """Base class: loading, saving, gradient checkpointing."""

    config_class = GeckoConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _to_gecko: str
    """Prefix of the ``Gecko``'s parameter names in this model."""

    @property
    def _gecko(self) -> Gecko:
        found: Any = self.get_submodule(self._to_gecko.removesuffix("."))
        return found

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the constructors of Gecko's modules initialise their weights."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load parameters whose names have this model's prefix, or are those of a ``Gecko``.

        ``Trainer`` resumes with ``load_state_dict(strict=False)``, which ignores unknown names. Therefore this method
        reports an error if a ``Gecko``'s parameter is not in this model, or if no name is known at all.
        """
        renamed = _add_prefix(state_dict, prefix, self._to_gecko)
        if self._gecko.config.tie_embedding:
            head, embedding = (f"{prefix}{self._to_gecko}{name}" for name in TIED)
            if embedding in state_dict:
                state_dict.setdefault(head, state_dict[embedding])
        known = self.state_dict(prefix=prefix)
        wrong = [name for name in renamed if name not in known]
        if wrong or (state_dict and not any(name.startswith(prefix + self._to_gecko) for name in state_dict)):
            found = sorted(wrong or state_dict)
            errors: list[str] = args[-1]
            errors.append(
                f"weights must be those of this model, named {self._to_gecko}… or as in a Gecko; got {found[:3]}."
                " Folders of quantised models open with gecko.load."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether backward recomputes blocks; ``gradient_checkpointing_enable`` sets it."""
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
        """Resize the embedding and the head, and set the architecture's ``vocab_size``."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self._gecko.config = self.config.architecture()
        return embedding

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model; unlike transformers, refuse a folder that lacks parameters instead of initialising them.

        Raises:
            ValueError: parameters are missing, unexpected, or of another shape.
        """
        parts = "|".join(part.removesuffix(".") for part in _PARTS)
        kwargs.setdefault("key_mapping", {rf"^({parts})\.": r"gecko.\1."})
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

        ``max_shard_size`` has no effect. With adapters of ``add_adapter``, only the adapters are written.

        Raises:
            ValueError: ``push_to_hub``, a format other than safetensors, or weights that are quantised or belong to
                another model.
            OSError: writing failed; existing files are unchanged.
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
        names = {name.removeprefix(self._to_gecko): weight for name, weight in weights.items()}
        save_model(folder, config.architecture(), names, self._to_gecko)
        self._save_code(folder, config)
        with whole_file(folder / CONFIG) as temporary:
            temporary.write_text(config.to_json_string(), encoding="utf-8")
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    def _save_code(self, folder: Path, config: Any) -> None:
        """Write the code that ``config.auto_map`` names, if any, and update ``config.auto_map``."""
        if self._auto_class is not None:  # this class comes from remote code: copy that code
            custom_object_save(self, folder, config=config)
        elif config.auto_map:  # this class is the package's, loaded from an export
            config.auto_map = importlib.import_module("gecko.hf.export").write_code(folder)

    def _check_weights(self, weights: dict[str, Tensor]) -> None:
        wrong = [name for name in weights if not name.startswith(self._to_gecko)]
        if wrong:
            raise ValueError(f"state_dict must hold parameters {self._to_gecko}…; got {wrong[:3]}.")
        quantized = next((name for name, weight in weights.items() if is_quantized(weight)), None)
        if quantized is not None:
            raise ValueError(
                f"weights in a folder for transformers must not be quantised; {quantized} is. Write the model before "
                "quantisation, or write this one with Gecko.save for gecko.load."
            )


class GeckoModel(GeckoPreTrainedModel):
    """Gecko without the head: maps tokens to the last hidden states."""

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
        """Return hidden states (B, T, D). Arguments: see ``GeckoForCausalLM``; values at padding: ``Batch.read``."""
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
        """Check the arguments of a call and return its batch."""
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
        """Run the model. Without gradients it runs in pieces, so that a long prompt takes little memory."""
        size = tokens.shape[1] if torch.is_grad_enabled() else piece_length(self.gecko.config)
        parts = []
        for begin in range(0, tokens.shape[1], size):
            piece = slice(begin, begin + size)
            hidden, state = self.gecko.hidden(tokens[:, piece], None if ids is None else ids[:, piece], state)
            parts.append(hidden)
        assert state is not None
        return (torch.cat(parts, dim=1) if len(parts) > 1 else hidden), state


class GeckoForCausalLM(GeckoPreTrainedModel, GenerationMixin):
    """Gecko with its head: maps tokens to logits and the loss, and generates text."""

    _to_gecko = "model.gecko."
    _tied_weights_keys = {f"model.gecko.{TIED[0]}": f"model.gecko.{TIED[1]}"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.model = GeckoModel(config)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model makes a ``GeckoCache`` at the first call."""
        return False

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs without ``tokenizer``, which transformers passes on from the arguments of ``generate``."""
        kwargs.pop("tokenizer", None)
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        return prepared

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        """Heal tokens, but keep the document-start token, which transformers would replace by padding."""
        healed: Any = super().heal_tokens(input_ids, tokenizer)
        start = (healed != tokenizer.pad_token_id).int().argmax(1) - 1
        rows = ((input_ids == tokenizer.bos_token_id).any(1) & (start >= 0)).nonzero().flatten()
        healed[rows, start[rows]] = tokenizer.bos_token_id
        return healed

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
        """Return the logits, the loss if ``labels`` are given, and the cache.

        Args:
            input_ids: (B, T) integers.
            attention_mask: (B, T), or (B, columns before + T): 0 at padding, before or after a row's text. Every row
                gets the result that it would get alone; after its text, the logits of its last token are repeated.
            position_ids: (B, T). A document starts at every 0 except the first. Positions have no other effect.
            past_key_values: the cache that an earlier call returned; this call updates it.
            labels: (B, T), the input tokens, with −100 where a token is ignored; the model shifts them. Padding and the
                first token of a document are always ignored.
            use_cache: whether to return a cache; the default is True in evaluation mode.
            logits_to_keep: number of last columns, or indices of columns, whose logits are returned; 0 means all. The
                loss is over all columns and does not need the logits, so 1 saves memory if only the loss is needed.
            num_items_in_batch: divisor of the sum of losses, instead of the number of targets.

        Raises:
            ValueError, TypeError: ``inputs_embeds``, attentions or hidden states are requested; or see ``Batch``.
        """
        targets = None
        if labels is not None:  # before the call updates the cache
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
        loss = linear_cross_entropy(
            hidden.flatten(0, 1), stored_weight(head, "weight").to(hidden.device), targets.flatten()
        )
        return loss if num_items is None else loss * (targets != IGNORED).sum() / num_items


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[GeckoConfig.model_type] = GeckoForCausalLM.__name__
"""``Trainer`` shifts the labels for ``label_smoothing_factor`` only if this table contains the class."""


def _add_prefix(state_dict: dict[str, Any], prefix: str, to_gecko: str) -> list[str]:
    """Add the model's prefix to parameters that have the names of a ``Gecko``, in place; return the new names."""
    parts = tuple(prefix + part for part in _PARTS)
    renamed = {name: f"{prefix}{to_gecko}{name.removeprefix(prefix)}" for name in state_dict if name.startswith(parts)}
    for name, new in renamed.items():
        state_dict[new] = state_dict.pop(name)
    return list(renamed.values())


def _state(cache: GeckoCache | None, device: torch.device) -> GeckoState | None:
    """Return the state of a cache. An initial state is moved to ``device``; states that calls returned are there."""
    if cache is None or cache.state is None:
        return None
    return cache.state if cache.get_seq_length() else cache.state.to(device)


def _check_borders(positions: Tensor | None, others: dict[str, Any]) -> None:
    given = [name for name in _REPEATS_POSITIONS if others.get(name) is not None]
    if given and positions is None:
        raise ValueError(
            f"{', '.join(given)} must come with position_ids, which mark where packed documents start; got none."
            " Try DataCollatorWithFlattening(return_position_ids=True)."
        )


def _refuse(embeds: object, attentions: bool | None, hidden_states: bool | None, others: dict[str, Any]) -> None:
    if embeds is not None:
        raise ValueError("inputs_embeds cannot be given: a Gecko reads token ids. Pass input_ids.")
    if attentions:
        raise ValueError("output_attentions must be off: a Gecko computes no attention weights of a whole text.")
    if hidden_states:
        raise ValueError(
            "output_hidden_states must be off; GeckoModel returns the last ones, forward hooks give the others."
        )
    known = (*_REPEATS_POSITIONS, "cache_position")  # transformers 4 passes this, which repeats the cache's length
    unknown = [name for name, value in others.items() if value is not None and name not in known]
    if unknown:
        raise TypeError(f"a Gecko takes no argument {', '.join(unknown)}.")


def _as_asked(output: Any, return_dict: bool | None, config: Any) -> Any:
    return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()
