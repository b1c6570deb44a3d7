"""Small models in folders; transformers without network and progress bars."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from support import cases

import gecko

pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")

from transformers import AutoModelForCausalLM
from transformers.utils import logging

import gecko.hf

logging.disable_progress_bar()
logging.set_verbosity_error()

BYTES = dataclasses.replace(cases.SMALL, vocab_size=264)


def text_model() -> gecko.Gecko:
    """Return a small model of bytes."""
    torch.manual_seed(0)
    return gecko.Gecko(BYTES)


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Return arguments of a short training on the CPU."""
    return {
        "output_dir": str(folder), "max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 1,
        **more,
    }  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def improved(trainer: Any) -> bool:
    found = losses(trainer)
    return len(found) == 20 and all(map(math.isfinite, found)) and sum(found[-5:]) < 0.9 * sum(found[:5])


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    text_model().save(folder)
    return folder


@pytest.fixture
def model(text_folder: Path) -> Any:
    """Return the model of transformers."""
    return AutoModelForCausalLM.from_pretrained(text_folder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[gecko.Gecko, Any]]:
    """Return a function that gives a variant of ``cases`` and the transformers model loaded from its folder."""
    made: dict[str, tuple[gecko.Gecko, Any]] = {}

    def get(variant: str = "gecko") -> tuple[gecko.Gecko, Any]:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            ours = cases.model(variant)
            ours.save(folder)
            made[variant] = ours, AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        return made[variant]

    return get
