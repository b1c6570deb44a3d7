"""Run transformers' common and training tests on Gecko, from its source distribution.

``make test-upstream`` downloads the source distribution of the installed version and runs this file:
``ModelTesterMixin`` of ``test_modeling_common.py``, ``TrainingTesterMixin`` of ``test_training_mixin.py`` and
``ConfigTester`` of ``test_configuration_common.py``. Source distributions contain the files ``tests/test_*.py`` only,
in 5.24.0 as in 5.23, 5.22, 5.21, 5.0 and 4.57.1. The generation tests, ``tests/generation/test_utils.py``, are in no
distribution and do not run; ``tests/hf/test_generate.py`` tests generation.

``not_passing.py`` lists the tests that fail or are skipped, each with the reason.
"""

from __future__ import annotations

import json
import unittest
from typing import Any

import torch
from support import cases
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from upstream.source_distribution import upstream

from gecko.hf import GeckoConfig, GeckoForCausalLM, GeckoForSequenceClassification, GeckoModel

common, training = upstream("test_modeling_common"), upstream("test_training_mixin")
configuration = upstream("test_configuration_common")
# Upstream finds models without a loss, and those with one label per text, in these tables.
MODEL_MAPPING_NAMES[GeckoConfig.model_type] = GeckoModel.__name__
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[GeckoConfig.model_type] = GeckoForSequenceClassification.__name__


class GeckoTester:
    """A small model and inputs, in the form that upstream's mixins expect."""

    causal_lm_class, base_model_class = GeckoForCausalLM, GeckoModel
    batch_size, seq_length, is_training = 3, 12, True
    num_hidden_layers, hidden_size = cases.SMALL.num_layers, cases.SMALL.model_dim

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self) -> GeckoConfig:
        return GeckoConfig.of(cases.SMALL, pad_token_id=0)

    def prepare_config_and_inputs_for_common(self) -> tuple[GeckoConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(1, config.vocab_size, (self.batch_size, self.seq_length))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class GeckoTest(common.ModelTesterMixin, training.TrainingTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    """Upstream's tests, each over all model classes."""

    all_model_classes = (GeckoModel, GeckoForCausalLM, GeckoForSequenceClassification)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True
    model_tester: Any = None

    def setUp(self) -> None:
        self.model_tester = GeckoTester(self)

    def test_config(self) -> None:
        fields = json.loads(json.dumps(self.model_tester.get_config().architecture().to_dict()))
        configuration.ConfigTester(self, config_class=GeckoConfig, **fields).run_common_tests()
