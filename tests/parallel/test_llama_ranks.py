"""Training a Llama on several ranks equals training on one: checkpoints and the joined model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parallel.conftest import train_in_sessions
from parallel.test_data_parallel import LLAMA
from support.jobs import Jobs

pytest.importorskip("transformers", reason="pip install 'gecko-lm[hf]'")

from gecko.models import load_any
from gecko.train import CheckpointSettings, Run
from gecko.train.checkpoints import latest_checkpoint, write_model


def test_two_ranks_then_four_then_one(jobs: Jobs, run_in: Callable[..., Run], tmp_path: Path) -> None:
    """Other numbers of ranks resume from sharded checkpoints, and the joined model is the trained one."""
    checkpoint = CheckpointSettings(every=7, keep=9)
    one, changing = run_in("one", model=LLAMA), run_in("changing", model=LLAMA, checkpoint=checkpoint)
    sessions = [(2, 5, {"replicate": 2}), (4, 12, {"shard": 2, "replicate": 2}), (1, 14, {}), (2, None, {})]
    expected, last = train_in_sessions(jobs, one, changing, sessions)
    assert last["evaluation"]["loss"] == pytest.approx(expected["evaluation"]["loss"], rel=1e-5)
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
