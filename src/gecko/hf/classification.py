"""Classifier of whole texts for transformers, which is also the reward model of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from gecko.hf.cache import CACHE, GeckoCache, given_cache
from gecko.hf.configuration import GeckoConfig
from gecko.hf.modeling import GeckoModel, as_asked
from gecko.hf.pretrained import SCORE, GeckoPreTrainedModel
from gecko.io.model_folder import TIED


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
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: GeckoCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | Sequence[int] | None = None,
        return_dict: bool | None = None,
        cache: GeckoCache | None = None,
        **others: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return the scores (B, num_labels) of the texts, and the loss if ``labels`` are given.

        Other arguments are those of ``GeckoForCausalLM``. Every text gets the scores that it would get alone.

        Args:
            attention_mask: (B, T), 0 at padding, which may be anywhere. None: ``config.pad_token_id`` before and after
                a text is padding.
            labels: (B,) class indices, (B,) numbers for a regression, or (B, num_labels) for several classes at once,
                as ``config.problem_type`` says.

        Raises:
            ValueError: several rows of ids have no mask, and the config has no ``pad_token_id``; or see ``Batch``.
        """
        past_key_values = given_cache(past_key_values, cache)
        if attention_mask is None and input_ids is not None and past_key_values is None:
            attention_mask = self._mask(input_ids)
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict=True, **others,
        )  # fmt: skip
        scores = self.score(output.last_hidden_state[:, -1])  # padding repeats the hidden state of the last token
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=scores, labels=labels, pooled_logits=scores, config=self.config)
        found = SequenceClassifierOutputWithPast(
            loss=loss, logits=scores, hidden_states=output.hidden_states, **{CACHE: output.get(CACHE)}
        )
        return as_asked(found, return_dict, self.config)

    def _mask(self, ids: Tensor) -> Tensor | None:
        """Return the mask (B, T) of texts whose padding is known by its id only."""
        padding = self.config.pad_token_id
        if padding is None:
            if len(ids) > 1:
                raise ValueError(
                    "several texts need an attention_mask, or a pad_token_id in the config to find their padding; got "
                    "neither. Pass the tokenizer's attention_mask, or set model.config.pad_token_id."
                )
            return None
        text = (ids != padding).int()
        return (text.cummax(1).values * text.flip(1).cummax(1).values.flip(1)).to(torch.long)
