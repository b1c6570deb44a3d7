"""Models for transformers that wrap ``gecko.Gecko``: they translate arguments and outputs.

The classifier of whole texts is also the reward model of TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import GenerationMixin, modeling_outputs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from gecko.hf.batch import CACHE, GeckoCache, PaddedBatch, given_cache
from gecko.hf.configuration import GeckoConfig
from gecko.hf.pretrained import SCORE, GeckoPreTrainedModel
from gecko.io.fingerprints import stored_weight
from gecko.io.model_folder import TIED
from gecko.layers.head import head_loss
from gecko.models.gecko import Block, Gecko
from gecko.ops.backends.dispatch import is_package
from gecko.ops.loss import IGNORED, linear_cross_entropy
from gecko.runtime.tensors import meta_device

_REPEATS_POSITIONS = ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx")
"""Arguments that repeat the document borders of ``position_ids`` in the form that other attention kernels need."""

NEWEST = Version("5.24")
"""Newest minor version of transformers with which the tests ran."""

_NO_KERNELS = (
    "This copy of Gecko's code holds no C or Triton kernels, so it computes the same more slowly. To use the kernels, "
    "install gecko-lm and open the folder without trust_remote_code after gecko.hf was imported."
)

logger = logging.get_logger(__name__)


class GeckoBlock(GradientCheckpointingLayer, Block):
    """Block whose activations backward recomputes after ``gradient_checkpointing_enable``."""

    computes = Block
    """Without gradients it computes the same as this class, so the decoders take it."""


class CheckpointedGecko(Gecko):
    """Gecko of ``GeckoBlock``."""

    block_class = GeckoBlock
    computes = Gecko

    @classmethod
    def without_values(cls, config: Any) -> CheckpointedGecko:
        """Return a model whose parameters have no values yet, on the device where a parameter would be made."""
        probe = nn.Module()
        probe.place = nn.Parameter(torch.empty(0))
        with meta_device():
            model = cls(config)
        return model if probe.place.is_meta else model.to_empty(device=probe.place.device)


class GeckoModel(GeckoPreTrainedModel):
    """Gecko without the head: maps tokens to the last hidden states."""

    _to_gecko = "gecko."
    _tied_weights_keys = {f"gecko.{TIED[0]}": f"gecko.{TIED[1]}"}  # noqa: RUF012
    _can_record_outputs = {"hidden_states": GeckoBlock}  # noqa: RUF012
    _may_differ = (SCORE,)

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        if not is_package():
            logger.warning_once(_NO_KERNELS)
        if note := _untested():
            logger.warning_once(note)
        self.gecko = CheckpointedGecko.without_values(config.architecture())
        self.post_init()  # which calls initialize_weights

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_attentions: bool | None = None, output_hidden_states: bool | Sequence[int] | None = None,
        return_dict: bool | None = None, cache: GeckoCache | None = None, **others: Any,
    ) -> modeling_outputs.BaseModelOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """Return hidden states (B, T, D). Arguments: see ``GeckoForCausalLM``; padding: ``PaddedBatch.read``."""
        cache = given_cache(past_key_values, cache)
        if torch.compiler.is_exporting():
            if use_cache or any(x is not None for x in (attention_mask, position_ids, cache)):
                raise RuntimeError(
                    "torch.export takes input_ids or inputs_embeds of one shape only, because a call chooses its work "
                    "by the values of masks, positions and states; leave out attention_mask, position_ids, "
                    "past_key_values and use_cache. gecko.models.onnx exports a step with its state."
                )
            use_cache = False
        _check_others(output_attentions, position_ids, others)
        batch = PaddedBatch.build(input_ids, attention_mask, position_ids, cache, inputs_embeds)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = GeckoCache()
        if cache is not None and self.training and torch.is_grad_enabled() and _recomputes_reentrantly(self):
            raise ValueError(
                "reentrant checkpointing loses the gradients of a state; got a cache in training. Leave the cache out, "
                'or call gradient_checkpointing_enable({"use_reentrant": False}).'
            )
        wanted: Any = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden, *layers = batch.read(self.gecko, cache, every=wanted is not False)
        shown: Any = None if wanted is False else (*layers, hidden)
        if shown is not None and wanted is not True:  # indices of those that are asked for
            kept = {range(len(shown))[index] for index in wanted}
            shown = tuple(layer if index in kept else None for index, layer in enumerate(shown))
        found = {"last_hidden_state": hidden, "hidden_states": shown, CACHE: cache}
        return _as_asked(modeling_outputs.BaseModelOutputWithPast, return_dict, self.config, **found)


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
        """Return False: the cache is a ``GeckoCache``."""
        return False

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, but raise ValueError for a cache that has read other tokens."""
        cache = given_cache(*(kwargs.pop(name, None) for name in ("past_key_values", "cache")))
        ids = kwargs.get("input_ids", inputs)
        if cache is not None:
            kwargs[CACHE] = cache
        if isinstance(cache, GeckoCache) and ids is not None and kwargs.get("inputs_embeds") is None:
            cache.check(ids)
        return super().generate(inputs, *args, **kwargs)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse ``generate_batch``, which calls this method."""
        raise ValueError(
            "generate_batch reads pages of keys and values, and a Gecko has a state of constant size; call generate "
            "with a batch, or serve many requests with gecko serve or vLLM."
        )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> Any:
        """Make the cache before the first call, so that ``prefill_chunk_size`` finds one."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool((mask != 0).any(1).all()):
            raise ValueError("every prompt must have at least one token; a row of attention_mask has only padding.")
        if generation_config.use_cache is False and model_kwargs.get(CACHE) is not None:
            raise ValueError("use_cache must not be False if a cache is given; got both. Leave one of them out.")
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)  # type: ignore[misc]
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = GeckoCache()
        return prepared

    def prepare_inputs_for_generation(self, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs; transformers looks for the name ``inputs_embeds`` here."""
        kwargs.pop("tokenizer", None)  # which transformers passes on from the arguments of ``generate``
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        if CACHE in prepared:  # under its older name PEFT knows whether a trained prompt was read
            prepared["past_key_values"] = prepared.pop(CACHE)
        return prepared

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        """Heal tokens, but keep the document-start token, which transformers would replace by padding."""
        healed: Any = super().heal_tokens(input_ids, tokenizer)
        start = (healed != tokenizer.pad_token_id).int().argmax(1) - 1
        rows = ((input_ids == tokenizer.bos_token_id).any(1) & (start >= 0)).nonzero().flatten()
        healed[rows, start[rows]] = tokenizer.bos_token_id
        return healed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None, return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0, num_items_in_batch: int | Tensor | None = None,
        cache: GeckoCache | None = None, **others: Any,
    ) -> modeling_outputs.CausalLMOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """Return the logits, the loss if ``labels`` are given, and the cache.

        Args:
            input_ids: (B, T) integers.
            attention_mask: (B, T), or (B, columns before + T): 0 at padding, which may be anywhere. Every row gets the
                result that its text would get alone; at padding, the logits of the text before it are repeated.
            position_ids: (B, T). A document starts at every 0 except the first. Positions have no other effect.
            past_key_values: the cache that an earlier call returned; this call updates it.
            inputs_embeds: (B, T, D), read instead of what ``get_input_embeddings()`` returns for ``input_ids``.
            labels: (B, T), the input tokens, with −100 where a token is ignored; the model shifts them. Padding and the
                first token of a document are always ignored.
            use_cache: whether to return a cache; the default is True in evaluation mode.
            output_hidden_states: whether to return the input of each block and of the head, (B, T, D) each; a list
                of indices returns None for the others.
            logits_to_keep: number of last columns, or indices of columns, whose logits are returned; 0 means all. The
                loss is over all columns and does not need the logits, so 1 saves memory if only the loss is needed.
            num_items_in_batch: divisor of the sum of losses, instead of the number of targets.
            cache: another name of ``past_key_values``, which transformers uses from 5.24 on.
            others: ``shift_labels`` (B, T), the target of every token, is used instead of ``labels`` and not shifted;
                the target of the last token of a document is ignored, unless it is the last token of the call. It is
                not a parameter, because ``Trainer`` takes every parameter with "label" in its name for a column.

        Raises:
            ValueError, TypeError: attentions are requested; or see ``PaddedBatch``.
        """
        past_key_values = given_cache(past_key_values, cache)
        targets, shift_labels = None, others.pop("shift_labels", None)
        given = labels if shift_labels is None else shift_labels
        if given is not None:  # before the call updates the cache
            batch = PaddedBatch.build(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
            targets = batch.targets(given, IGNORED, shifted=shift_labels is not None)
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict=True, **others,
        )  # fmt: skip
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        loss = None if targets is None else self._loss(hidden, targets, num_items_in_batch)
        kind, logits = modeling_outputs.CausalLMOutputWithPast, self.model.gecko.head(hidden[:, kept])
        return _as_asked(kind, return_dict, self.config, loss=loss, logits=logits, **_rest(output))

    def _loss(self, hidden: Tensor, targets: Tensor, num_items: int | Tensor | None) -> Tensor:
        """Return the mean loss of the targets, or their sum over ``num_items``, with adapters and hooks of the head."""
        head, rows, flat = self.model.gecko.head, hidden.flatten(0, 1), targets.flatten()
        count = (targets != IGNORED).sum()
        if type(head) is nn.Linear and head.bias is None and head.weight.is_meta:  # offloaded by accelerate's hook
            loss = linear_cross_entropy(rows, stored_weight(head, "weight").to(hidden.device), flat)
        else:
            loss = head_loss(head, rows, flat)
        return loss if num_items is None else loss * count / num_items


class GeckoForSequenceClassification(GeckoPreTrainedModel):
    """Gecko with a linear layer over the hidden state of the last token of every text, ``config.num_labels`` scores.

    Opened from the folder of a language model, the scores are random, as transformers reports. The language model's
    head stays in the model and in its folder, but is not trained unless it is the embedding.
    """

    _to_gecko = "model.gecko."
    _tied_weights_keys = {f"model.gecko.{TIED[0]}": f"model.gecko.{TIED[1]}"}  # noqa: RUF012
    _format = "gecko-classifier-1"
    _may_differ = (SCORE,)
    accepts_loss_kwargs = False

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 0  # never None: transformers sets it
        self.model = GeckoModel(config)
        if not config.tie_embedding:
            self.model.gecko.head.requires_grad_(False)
        self.score = nn.Linear(config.model_dim, self.num_labels, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None, return_dict: bool | None = None,
        cache: GeckoCache | None = None, **others: Any,
    ) -> modeling_outputs.SequenceClassifierOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """Return the scores (B, num_labels) of the texts, and the loss if ``labels`` are given.

        Other arguments are those of ``GeckoForCausalLM``. Every text gets the scores that it would get alone.

        Args:
            attention_mask: (B, T), 0 at padding, which may be anywhere. None: ``config.pad_token_id`` before and after
                the text of a call is padding.
            labels: (B,) class indices, (B,) numbers for a regression, or (B, num_labels) for several classes at once,
                as ``config.problem_type`` says.

        Raises:
            ValueError: several rows have no mask, and are embeddings, or the config has no ``pad_token_id``; or see
                ``PaddedBatch``.
        """
        past_key_values = given_cache(past_key_values, cache)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is None and given is not None:
            attention_mask = self._mask(given)
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict=True, **others,
        )  # fmt: skip
        scores = self.score(output.last_hidden_state[:, -1])  # padding repeats the hidden state of the last token
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=scores, labels=labels, pooled_logits=scores, config=self.config)
        kind = modeling_outputs.SequenceClassifierOutputWithPast
        return _as_asked(kind, return_dict, self.config, loss=loss, logits=scores, **_rest(output))

    def _mask(self, ids: Tensor) -> Tensor | None:
        """Return the mask (B, T) of texts whose padding is known by its id only; embeddings have none."""
        padding = self.config.pad_token_id
        if padding is None or ids.dim() > 2:
            if len(ids) > 1:
                raise ValueError(
                    "several texts need an attention_mask, or a pad_token_id in the config to find their padding in "
                    "input_ids; got neither. Pass the tokenizer's attention_mask, or set model.config.pad_token_id."
                )
            return None
        text = (ids != padding).int()
        return (text.cummax(1).values * text.flip(1).cummax(1).values.flip(1)).to(torch.long)


MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[GeckoConfig.model_type] = GeckoForCausalLM.__name__
"""``Trainer`` shifts the labels for ``label_smoothing_factor`` only if this table contains the class."""


def _untested() -> str:
    """Return a note if this version of transformers is newer than those tested, else an empty text."""
    from transformers import __version__ as found

    newer = Version(found).release[:2] > NEWEST.release
    return f"transformers {found} is newer than {NEWEST}, the newest that was tested." if newer else ""


def _check_others(attentions: bool | None, positions: Tensor | None, others: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for what a Gecko does not compute, and for arguments that it does not know."""
    if attentions:
        raise ValueError("output_attentions must be off: a Gecko computes no attention weights of a whole text.")
    known = (*_REPEATS_POSITIONS, "cache_position")  # transformers 4 passes this, which repeats the cache's length
    off = (None, False)
    unknown = [name for name, value in others.items() if not any(value is x for x in off) and name not in known]
    if unknown:
        raise TypeError(f"a Gecko takes no argument {', '.join(unknown)}. {_untested()}".rstrip())
    given = [name for name in _REPEATS_POSITIONS if others.get(name) is not None]
    if given and positions is None:
        raise ValueError(
            f"{', '.join(given)} must come with position_ids, which mark where packed documents start; got none."
            " Try DataCollatorWithFlattening(return_position_ids=True)."
        )


def _recomputes_reentrantly(model: GeckoModel) -> bool:
    how = (x._gradient_checkpointing_func for x in model.gecko.blocks if x.gradient_checkpointing)
    return any(getattr(each, "keywords", {}).get("use_reentrant") for each in how)


def _rest(output: Any) -> dict[str, Any]:
    return {"hidden_states": output.hidden_states, CACHE: output.get(CACHE)}


def _as_asked(kind: Any, return_dict: bool | None, config: Any, **values: Any) -> Any:
    """Return an output, or a tuple of its values if ``return_dict`` or the config says so."""
    output = kind(**values)
    return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()
