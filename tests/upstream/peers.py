"""Run the suite on upstream's own recurrent models, and compare what they pass with what Gecko passes.

After ``make test-upstream``, run ``python tests/upstream/peers.py`` with ``tests`` on the import path. It takes
four minutes. Gecko passes every test that ``not_passing.py`` does not list; a test of that list which a peer passes is
an error, unless ``OTHER_FIELDS`` names it.

Tests of attention weights are off for all models, because Gecko returns none. Upstream's own tests of RecurrentGemma
turn them off too; those of Bamba, whose attention layers keep all keys, leave them on.
"""

from __future__ import annotations

import sys
import unittest
from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import transformers
from upstream.not_passing import NOT_PASSING
from upstream.source_distribution import upstream

common, training = upstream("test_modeling_common"), upstream("test_training_mixin")

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 8, "state_size": 2, "chunk_size": 8},
    "Bamba": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "attn_layer_indices": [1],
        "mamba_n_heads": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    },
    "RecurrentGemma": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96, "attention_window_size": 16,
        "lru_width": 32,
    },
}  # fmt: skip
"""Sizes are those of upstream's own tests of these models, which no distribution contains."""


OTHER_FIELDS = {"test_model_rope_with_partial_rotation": "sets rope_parameters['partial_rotary_factor'] in a config"}
"""Tests that set fields of a config which a Gecko does not have."""


def _suite(name: str) -> type:
    config_class = getattr(transformers, f"{name}Config")

    class Tester:
        base_model_class = getattr(transformers, f"{name}Model")
        causal_lm_class = getattr(transformers, f"{name}ForCausalLM")
        batch_size, seq_length, is_training = 3, 12, True
        num_hidden_layers, hidden_size = SIZES["num_hidden_layers"], SIZES["hidden_size"]

        def __init__(self, parent: unittest.TestCase) -> None:
            self.parent = parent

        def get_config(self) -> Any:
            return config_class(**SIZES, **CONFIGS[name])

        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
            ids = torch.randint(1, SIZES["vocab_size"], (self.batch_size, self.seq_length))
            return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def prepare(self: Any) -> None:
        self.model_tester = Tester(self)

    bases = (common.ModelTesterMixin, training.TrainingTesterMixin, common.GenerationTesterMixin, unittest.TestCase)
    classes = (Tester.base_model_class, Tester.causal_lm_class)
    return type(f"{name}Test", bases, {"all_model_classes": classes, "has_attentions": False, "setUp": prepare})


for _name in CONFIGS:
    globals()[f"{_name}Test"] = _suite(_name)


class Outcomes:
    """Plugin of pytest that keeps the outcomes of all parts of each test, by test and model."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, suite, test = report.nodeid.split("::")
        self.found[test][suite.removesuffix("Test")].add(report.outcome)

    def passing(self, test: str) -> list[str]:
        """Return the models that pass a test in all parts."""
        return [name for name in CONFIGS if self.found[test][name] == {"passed"}]


def main() -> int:
    """Print the comparison; return how many tests a peer passes and Gecko does not, without ``OTHER_FIELDS``."""
    outcomes = Outcomes()
    options = ["--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore"]
    pytest.main([__file__, "--override-ini", "addopts=", *options], plugins=[outcomes])
    for name in CONFIGS:
        passed = sum(name in outcomes.passing(test) for test in outcomes.found)
        sys.stdout.write(f"{name}: {passed} of {len(outcomes.found)} pass\n")
    missed = 0
    for reason, patterns in NOT_PASSING.items():
        for test in sorted(outcomes.found):
            if any(fnmatchcase(test, pattern) for pattern in patterns) and outcomes.passing(test):
                missed += test not in OTHER_FIELDS
                peers = ", ".join(outcomes.passing(test))
                sys.stdout.write(f"{test}: passed by {peers}; Gecko: {OTHER_FIELDS.get(test, reason)}\n")
    sys.stdout.write(f"{missed} tests of fields that a Gecko has are passed by a peer and not by Gecko\n")
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
