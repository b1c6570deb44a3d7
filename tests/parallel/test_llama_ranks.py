"""Training a Llama on several ranks equals training on one: steps, checkpoints, the joined model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import training_jobs as work
from support.jobs import Exact, Jobs

pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")

from gecko.models import LlamaConfig, load_any
from gecko.train import CheckpointSettings, ParallelSettings, Run
from gecko.train.checkpoints.checkpointer import checkpoints_folder, write_model
from gecko.train.checkpoints.folders import latest_checkpoint
from gecko.train.metrics import read_metrics

CONFIG = LlamaConfig(vocab_size=257, num_layers=2, model_dim=32, num_heads=4, ffn_dim=48, key_value_heads=2)
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "shard-2": (2, {}),
    "replicate-2": (2, {"replicate": 2}),
    "shard-4": (4, {}),
    "replicate-2-shard-2": (4, {"replicate": 2}),
}
SETTINGS: dict[int, list[dict[str, Any]]] = {
    2: [{"gradient_accumulation_steps": 2}, {"activation_checkpointing": "full"}],
    4: [{"gradient_accumulation_steps": 2},
        {"activation_checkpointing": "selective", "gradient_accumulation_steps": 2}],
}  # fmt: skip
"""Settings by the number of ranks. Each setting meets every way of dividing the work."""


def losses(run: Run) -> np.ndarray:
    return np.array([(record["step"], record["loss"]) for record in read_metrics(run.folder / "metrics.jsonl")])


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_on_ranks_are_steps_on_one(jobs: Jobs, run_in: Callable[..., Run], exact: Exact, mesh: str) -> None:
    """Compare loss, gradient norm and, after three steps of AdamW, every parameter, in float64 on every rank."""
    ranks, sizes = MESHES[mesh]
    model = replace(CONFIG, tie_embedding=mesh == "shard-4")
    expected = exact(run_in("one", model=model))
    runs = [run_in("many", model=model, **sizes, **settings) for settings in SETTINGS[ranks]]
    for per_rank in jobs.run(ranks, work.exact_steps, runs, 3):
        for got, settings in zip(per_rank, SETTINGS[ranks], strict=True):
            np.testing.assert_allclose(got["curve"], expected["curve"], rtol=1e-9, err_msg=str(settings))
            for name, value in expected["parameters"].items():
                np.testing.assert_allclose(got["parameters"][name], value, rtol=1e-6, atol=1e-8, err_msg=name)


def test_two_ranks_then_four_then_one(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """Other numbers of ranks resume from sharded checkpoints, and the joined model is the trained one."""
    checkpoint = CheckpointSettings(every=7, keep=9)
    one, changing = run_in("one", model=CONFIG), run_in("changing", model=CONFIG, checkpoint=checkpoint)
    (expected,) = jobs.run(1, work.train_run, one)
    sessions: list[tuple[int, int | None, dict[str, int]]] = [
        (2, 5, {"replicate": 2}), (4, 12, {"shard": 2, "replicate": 2}), (1, 14, {}), (2, None, {})
    ]  # fmt: skip
    for ranks, end, parallel in sessions:
        run = replace(changing, parallel=ParallelSettings(**parallel))
        results = jobs.run(ranks, work.resumed_run, run, ranks - 1, end)
        assert {result["step"] for result in results} == {end or 20}
    np.testing.assert_allclose(losses(changing), losses(one), rtol=1e-5)
    assert results[0]["evaluation"]["loss"] == pytest.approx(expected["evaluation"]["loss"], rel=1e-5)
    assert (changing.folder / "sample.txt").is_file()
    newest = latest_checkpoint(checkpoints_folder(changing))
    assert newest is not None
    write_model(newest, tmp_path / "joined")
    tokens = torch.arange(24).reshape(2, 12)
    joined, at_end, alone = (
        load_any(folder)(tokens) for folder in (tmp_path / "joined", newest, Path(expected["checkpoint"]))
    )
    assert torch.equal(joined, at_end)
    torch.testing.assert_close(joined, alone, rtol=1e-3, atol=1e-3)


def test_bfloat16_is_gathered_for_matrices_only(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    dtypes = jobs.run(2, work.gathered_dtypes, run_in("x", model=CONFIG, precision="bfloat16"))[1]
    for name, (gathered, kept, gradient) in dtypes.items():
        assert (kept, gradient) == (torch.float32, torch.float32), name
        matrix = name.startswith("model.layers.") and "norm" not in name
        assert gathered == (torch.bfloat16 if matrix else torch.float32), name
    assert sum(gathered == torch.bfloat16 for gathered, _, _ in dtypes.values()) == 14
