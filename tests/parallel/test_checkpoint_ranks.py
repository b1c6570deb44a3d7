"""Checkpoints of several ranks: any number of ranks reads them, they join to one file, damaged ones are skipped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import training_jobs as work
from support.corpora import BYTE_MODEL
from support.jobs import Jobs
from support.whole_runs import losses, saved_steps

import gecko
from gecko.io.checkpoints import list_checkpoints, read_manifest, verify_files
from gecko.train import CheckpointSettings, Run, train
from gecko.train.checkpoints import latest_checkpoint, write_manifest, write_model
from gecko.train.finish import write_report
from gecko.train.metrics import read_metrics


def test_resumed_by_as_many_ranks_it_is_the_same_run_bit_for_bit(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """A checkpoint contains the values at the start of the save, although training continues while it is written.

    SIGTERM to any rank stops all: it arrives in step 6; the ranks learn of it in step 7, which they finish.
    """
    whole, stopped = (run_in(name, steps=12) for name in ("whole", "stopped"))
    jobs.run(2, work.train_run, whole)
    first, second = jobs.answers(2, work.resumed_run, stopped, 1, 7)
    assert (first.error, second.error) == (None, None)
    assert (first.value["step"], second.value["step"]) == (7, 7)
    assert saved_steps(stopped) == [4, 7]
    assert "saved after step 7 of 12" in first.output and "--resume" in first.output
    assert second.output == ""
    jobs.run(2, work.train_run, stopped, True)
    assert np.array_equal(losses(stopped), losses(whole))
    for name in ("shards/shard-00001-model-00001-of-00001", "shards/shard-00002-model-00001-of-00001", "model"):
        files = [run.checkpoints_folder / "step-00000012" / f"{name}.safetensors" for run in (whole, stopped)]
        left, right = map(work.file_of, files)
        assert left.keys() == right.keys() and len(left) > 10
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_all_saves_have_one_plan_and_the_same_memory(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Ranks plan in the first save, and exchange no plans after it. The last save writes what a first one would."""
    thrice = run_in("thrice", steps=9, checkpoint=CheckpointSettings(every=3, keep=1, keep_every=6))
    once = run_in("once", steps=9, checkpoint=CheckpointSettings(every=9))
    for sent, memory in jobs.run(2, work.plans_of_saves, thrice):
        assert sent == [True, False, False]
        assert memory[0] == memory[1] == memory[2] and len(set(memory[0].values())) > 10
    assert saved_steps(thrice) == [6, 9]  # every other one stays
    jobs.run(2, work.train_run, once)
    for rank in (1, 2):
        name = f"step-00000009/shards/shard-0000{rank}-model-00001-of-00001.safetensors"
        left, right = (work.file_of(run.checkpoints_folder / name) for run in (thrice, once))
        assert left.keys() == right.keys() and len(left) > 10
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_the_joined_model_has_the_logits_of_the_parts(
    jobs: Jobs, trained: Run, run_in: Callable[..., Run], tmp_path: Path
) -> None:
    """Joining by hand and at the end of training gives equal weights, whose logits equal those of the sharded model."""
    checkpoint = latest_checkpoint(trained.checkpoints_folder)
    assert checkpoint is not None
    write_model(checkpoint, tmp_path / "joined")
    tokens = torch.arange(24).reshape(2, 12)
    joined, at_end = (gecko.load(folder)(tokens)[0] for folder in (tmp_path / "joined", checkpoint))
    assert torch.equal(joined, at_end)
    for logits in jobs.run(4, work.logits_of_checkpoint, run_in("x", replicate=2), checkpoint, tokens):
        torch.testing.assert_close(logits, joined, rtol=1e-5, atol=1e-5)
    # Then one process resumes from the parts, and other ranks resume from its file.
    assert train(replace(trained, steps=10), resume=True).step == 10
    assert [result["step"] for result in jobs.run(4, work.train_run, replace(trained, steps=12), True)] == [12] * 4


def test_a_tied_model_is_joined(jobs: Jobs, run_in: Callable[..., Run]) -> None:
    """Also at the end of its run. The weight shared by embedding and head is written once."""
    run = run_in("tied", steps=2, model=replace(BYTE_MODEL, tie_embedding=True))
    jobs.run(2, work.train_run, run, False, write_report)
    checkpoint = latest_checkpoint(run.checkpoints_folder)
    assert checkpoint is not None and "<svg" in (run.folder / "report.html").read_text(encoding="utf-8")
    model = gecko.load(checkpoint)
    assert model.head.weight is model.embedding.weight
    tokens = torch.arange(24).reshape(2, 12)
    for logits in jobs.run(2, work.logits_of_checkpoint, run, checkpoint, tokens):
        torch.testing.assert_close(logits, model(tokens)[0], rtol=1e-5, atol=1e-5)


def test_killed_while_joining_the_checkpoint_stays_sound(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes after the model's files are written and before the manifest lists them."""
    checkpoint = latest_checkpoint(trained.checkpoints_folder)
    assert checkpoint is not None
    (checkpoint / "model.safetensors").unlink()
    write_manifest(checkpoint, {k: v for k, v in read_manifest(checkpoint).items() if k != "model.safetensors"})
    monkeypatch.setattr("gecko.train.checkpoints.write_manifest", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_model(checkpoint, checkpoint)
    assert (checkpoint / "model.safetensors").is_file()
    verify_files(checkpoint)
    monkeypatch.undo()
    for _ in range(2):
        write_model(checkpoint, checkpoint)
        verify_files(checkpoint)
        assert "model.safetensors" in read_manifest(checkpoint)


def test_damaged_parts_are_passed_over_by_all_ranks(jobs: Jobs, trained: Run) -> None:
    whole = np.array(losses(trained))
    shard = trained.checkpoints_folder / "step-00000008" / "shards" / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    first, second = jobs.run(2, work.train_run, trained, True)
    assert any("step-00000008" in warning and shard.name in warning for warning in first["warnings"])
    assert not any("skipping the checkpoint" in warning for warning in second["warnings"])
    assert np.array_equal(losses(trained), whole)


def test_an_unfinished_save_is_no_checkpoint(jobs: Jobs, trained: Run) -> None:
    folder = trained.checkpoints_folder
    sound = list_checkpoints(folder)[0]
    sound.rename(folder / f".partial-{sound.name}")
    assert saved_steps(trained) == [4]
    jobs.run(2, work.train_run, trained, True)
    assert saved_steps(trained) == [4, 8]
    assert not list(folder.glob(".partial-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_rank_ends_all_and_loses_nothing(
    jobs: Jobs, run_in: Callable[..., Run], rank: int
) -> None:
    run = run_in("x", steps=40)
    first, second = jobs.answers(2, work.run_on_a_full_disk, run, rank, 8)
    assert first.error is not None
    assert "OSError: the checkpoint of step 8 could not be written" in first.error
    assert "step-00000004, is intact" in first.error
    assert second.error == "SystemExit: 2"
    assert saved_steps(run) == [4]
    verify_files(run.checkpoints_folder / "step-00000004")
    assert [result["step"] for result in jobs.run(2, work.train_run, replace(run, steps=9), True)] == [9, 9]


def test_a_run_starts_from_another_ones_model(jobs: Jobs, trained: Run, run_in: Callable[..., Run]) -> None:
    run = run_in("tuned", steps=2, init_from=str(trained.folder))
    assert jobs.run(2, work.train_run, run)[0]["step"] == 2
    first = read_metrics(run.folder / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(read_metrics(trained.folder / "metrics.jsonl")[-1]["loss"], rel=1e-6)
    other = run_in("other", steps=2, init_from=str(trained.folder), model=replace(run.model, chunk_size=16))
    answers = jobs.answers(2, work.train_run, other)
    assert answers[0].error is not None and "differs in chunk_size" in answers[0].error
