"""Training a Llama on several ranks equals training on one: checkpoints and the joined model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.test_data_parallel import LLAMA
from support import training_jobs as work
from support.jobs import Jobs
from support.whole_runs import losses

pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")

from gecko.models import load_any
from gecko.train import CheckpointSettings, ParallelSettings, Run
from gecko.train.checkpoints.content import write_model
from gecko.train.checkpoints.folders import latest_checkpoint


def test_two_ranks_then_four_then_one(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """Other numbers of ranks resume from sharded checkpoints, and the joined model is the trained one."""
    checkpoint = CheckpointSettings(every=7, keep=9)
    one, changing = run_in("one", model=LLAMA), run_in("changing", model=LLAMA, checkpoint=checkpoint)
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
    newest = latest_checkpoint(changing.checkpoints_folder)
    assert newest is not None
    write_model(newest, tmp_path / "joined")
    tokens = torch.arange(24).reshape(2, 12)
    joined, at_end, alone = (
        load_any(folder)(tokens) for folder in (tmp_path / "joined", newest, Path(expected["checkpoint"]))
    )
    assert torch.equal(joined, at_end)
    torch.testing.assert_close(joined, alone, rtol=1e-3, atol=1e-3)
