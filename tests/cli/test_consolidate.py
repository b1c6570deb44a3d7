"""``gecko consolidate`` joins the parts that two ranks wrote into one file that every command reads."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

import gecko
from gecko.io.checkpoints import list_checkpoints, verify_files
from gecko.train import Run
from gecko.train.checkpoints import all_files, flushed_entries, write_checkpoint, write_manifest

Command = Callable[..., Any]
CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=16, key_dim=8, value_dim=16, num_heads=2, ffn_dim=16,
    cema_modes=2, chunk_size=8, timestep_groups=4,
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOKENS = torch.arange(24).reshape(1, 24)


@pytest.fixture
def logits() -> dict[int, torch.Tensor]:
    """Return the logits of the model of each step."""
    return {step: gecko_of(step)(TOKENS)[0] for step in (4, 8)}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a run with two checkpoints as several ranks write them: the model in parts, without model.safetensors."""
    run = Run(model=CONFIG, output=str(tmp_path / "run"), steps=8)
    for step in (4, 8):

        def write_files(path: Path, step: int = step) -> None:
            parts = {name: tensor.detach() for name, tensor in gecko_of(step).named_parameters()}
            writer = HuggingFaceStorageWriter(str(path / "shards"), thread_count=2)
            save(parts, storage_writer=writer, no_dist=True)
            CONFIG.save(path / "config.json")
            run.save(path / "recipe.json")
            (path / "tokenizer.model").write_text("pieces")

        write_checkpoint(run.folder / "checkpoints", step, write_files)
    return run.folder


def gecko_of(step: int) -> gecko.Gecko:
    torch.manual_seed(step)
    return gecko.Gecko(CONFIG)


def loaded(folder: Path) -> torch.Tensor:
    return gecko.load(folder)(TOKENS)[0]


def test_a_run_becomes_its_newest_checkpoints_model(
    command: Command, run_folder: Path, tmp_path: Path, logits: dict[int, torch.Tensor]
) -> None:
    out = tmp_path / "new" / "model"
    result = command("consolidate", run_folder, "--out", out, code=0)
    assert f"{out}: the model of step-00000008" in result.stdout, result.output
    assert torch.equal(loaded(out), logits[8])
    written = {path.name for path in out.iterdir()}
    assert written == {"model.safetensors", "config.json", "recipe.json", "tokenizer.model"}
    # The command leaves the checkpoints unchanged.
    for checkpoint in list_checkpoints(run_folder / "checkpoints"):
        assert not (checkpoint / "model.safetensors").exists()
        verify_files(checkpoint)


def test_another_model_is_not_overwritten(
    command: Command, run_folder: Path, tmp_path: Path, logits: dict[int, torch.Tensor]
) -> None:
    other = dataclasses.replace(CONFIG, num_layers=1)
    gecko.Gecko(other).save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    result = command("consolidate", run_folder, "--out", tmp_path / "model", code=2)
    assert f"{tmp_path / 'model'} holds another model" in result.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    # A model of another type, which Gecko does not know.
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    assert "holds another model" in command("consolidate", run_folder, "--out", tmp_path / "model").stderr
    # An older checkpoint of the same run is replaced.
    for step in (4, 8):
        checkpoint = run_folder / "checkpoints" / f"step-{step:08d}"
        command("consolidate", checkpoint, "--out", tmp_path / "own", code=0)
        assert torch.equal(loaded(tmp_path / "own"), logits[step])


def test_a_folder_with_other_files_is_left_alone(command: Command, run_folder: Path, tmp_path: Path) -> None:
    for name in ("recipe.json", "model.safetensors", "notes.txt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        result = command("consolidate", run_folder, "--out", folder, code=2)
        assert f"--out must be a new folder, or an empty one; {folder} holds" in result.stderr
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]


def test_a_checkpoint_takes_in_its_own_model_and_stays_whole(
    command: Command, run_folder: Path, logits: dict[int, torch.Tensor]
) -> None:
    checkpoint = run_folder / "checkpoints" / "step-00000004"
    before = {path: path.read_bytes() for path in (checkpoint / "shards").iterdir()}
    for _ in range(2):
        command("consolidate", checkpoint, code=0)
        assert torch.equal(loaded(checkpoint), logits[4])
        verify_files(checkpoint)
    assert all(path.read_bytes() == content for path, content in before.items())
    model = checkpoint / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        verify_files(checkpoint)


def test_other_commands_read_what_was_joined(command: Command, run_folder: Path, tmp_path: Path) -> None:
    command("consolidate", run_folder, "--out", tmp_path / "model", code=0)
    command("info", tmp_path / "model", code=0)


def test_a_damaged_checkpoint_is_not_joined(command: Command, run_folder: Path, tmp_path: Path) -> None:
    checkpoint = run_folder / "checkpoints" / "step-00000008"
    shard = next((checkpoint / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    result = command("consolidate", checkpoint, "--out", tmp_path / "model", code=2)
    assert shard.name in result.stderr
    assert not (tmp_path / "model").exists()
    # For a run, the last good checkpoint is used, and its name is printed.
    result = command("consolidate", run_folder, "--out", tmp_path / "model", code=0)
    assert "the model of step-00000004" in result.stdout
    assert "skipping the checkpoint" in result.stderr and "step-00000008" in result.stderr


@pytest.mark.parametrize("joined", [False, True])
def test_the_average_has_the_mean_of_the_weights(
    command: Command, run_folder: Path, tmp_path: Path, joined: bool
) -> None:
    for step in (4, 8) if joined else ():
        command("consolidate", run_folder / "checkpoints" / f"step-{step:08d}", code=0)
    result = command("average", run_folder, "--last", 2, "--out", tmp_path / "mean", code=0)
    assert "the mean of step-00000004, step-00000008" in result.stdout, result.output
    parts = [gecko_of(step).state_dict() for step in (4, 8)]
    for name, weight in gecko.load(tmp_path / "mean").state_dict().items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
    assert {"recipe.json", "tokenizer.model"} <= {path.name for path in (tmp_path / "mean").iterdir()}


def test_an_average_of_more_than_there_is_or_of_damaged_files_is_refused(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    result = command("average", run_folder, "--last", 3, "--out", tmp_path / "mean", code=2)
    assert "has 2, got 3. A run keeps more with checkpoint.keep=N" in result.stderr
    shard = next((run_folder / "checkpoints" / "step-00000004" / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    result = command("average", run_folder, "--last", 2, "--out", tmp_path / "mean", code=2)
    assert shard.name in result.stderr
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(("every", "consecutive"), [(1, False), (2, False), (3, False), (4, True), (500, True)])
def test_only_consecutive_checkpoints_are_averaged(
    command: Command, run_folder: Path, tmp_path: Path, every: int, consecutive: bool
) -> None:
    """A checkpoint that is kept for its low loss may lie far before the newest one."""
    for path in list_checkpoints(run_folder / "checkpoints"):
        run = Run.load(path / "recipe.json")
        replaced = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, every=every))
        replaced.save(path / "recipe.json")
        write_manifest(path, flushed_entries(path, all_files(path)))
    result = command("average", run_folder, "--last", 2, "--out", tmp_path / "mean")
    assert (result.exit_code == 0) == consecutive, result.output
    if not consecutive:
        assert "step-00000008 and step-00000004 are not" in result.stderr and "Try --last 1" in result.stderr
        assert not (tmp_path / "mean").exists()
        command("average", run_folder, "--last", 1, "--out", tmp_path / "mean", code=0)
