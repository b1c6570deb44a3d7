"""A run stands for its newest undamaged checkpoint wherever a model folder is expected."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from cli.conftest import write_run

import gecko
from gecko.io.checkpoints import model_folder
from gecko.models import load_any


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=(1, 2))


def test_a_run_is_its_newest_checkpoint(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    assert model_folder(run) == newest == model_folder(newest)
    for load in (gecko.load, load_any):
        assert torch.equal(load(run).head.weight, gecko.load(newest).head.weight)
    assert not torch.equal(gecko.load(run).head.weight, gecko.load(run / "checkpoints" / "step-00000001").head.weight)


def test_a_damaged_checkpoint_is_passed_over_and_named(run: Path) -> None:
    weights = run / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="skipping the checkpoint step-00000002: .* must be .* bytes"):
        assert model_folder(run).name == "step-00000001"
    (run / "checkpoints" / "step-00000001" / "model.safetensors").unlink()
    with warnings.catch_warnings(), pytest.raises(ValueError, match="must hold an undamaged checkpoint; all of"):
        warnings.simplefilter("ignore")
        gecko.load(run)


def test_a_run_without_checkpoints_and_one_with_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="the run has none yet"):
        gecko.load(tmp_path / "begun")
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold one model; it is a training run"):
        gecko.load(run)


def test_a_checkpoint_in_parts_is_named(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000002"
    (newest / "model.safetensors").unlink()
    (newest / "shards").mkdir()
    with pytest.raises(FileNotFoundError, match="Join them: gecko consolidate"):
        model_folder(newest)
