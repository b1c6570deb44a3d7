"""Small Llamas, with and without shared keys and a tied head, in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from support.corpora import write_corpus
from support.whole_runs import plain_report

pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")

from transformers.utils import logging

from gecko.models import Llama, LlamaConfig
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings

logging.disable_progress_bar()

CONFIG = LlamaConfig(vocab_size=264, num_layers=2, model_dim=32, num_heads=4, ffn_dim=48)
CONFIGS = {"plain": CONFIG, "grouped": replace(CONFIG, key_value_heads=2, rope_base=500.0, tie_embedding=True)}


def random_llama(config: LlamaConfig, dtype: torch.dtype = torch.float64) -> Llama:
    """Return a model with weights far from their small initial values, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = Llama(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="session", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Llama:
    return random_llama(CONFIGS[request.param])


@pytest.fixture(autouse=True)
def _plain_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("gecko.train.finish.write_report", plain_report)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def run_in(corpus: Path, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that makes a run of twelve steps of a small Llama, in a named folder, with changes."""

    def make(name: str, **changes: Any) -> Run:
        run = Run(
            model=CONFIG, output=str(tmp_path / name),
            data=DataSettings(source=str(corpus), validation_fraction=0.2), batch_size=2, sequence_length=24, steps=12,
            optimizer=OptimizerSettings(learning_rate=1e-2), checkpoint=CheckpointSettings(every=4, keep=2),
            evaluation=EvaluationSettings(every=5, rows=4, final_rows=8), threads=1,
            sample=SampleSettings(prompt="red ", tokens=8),
        )  # fmt: skip
        return replace(run, **changes)

    return make
