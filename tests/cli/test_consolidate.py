"""``gecko consolidate`` joins the parts that two ranks wrote into one file that every command reads; ``average``."""

import dataclasses
from pathlib import Path

import pytest
import torch
from cli.conftest import Command
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

import gecko
from gecko.io.checkpoints import list_checkpoints, verify_files
from gecko.train import Run
from gecko.train.checkpoints import all_files, flushed_entries, write_checkpoint, write_manifest

CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=16, key_dim=8, value_dim=16, num_heads=2, ffn_dim=16,
    cema_modes=2, chunk_size=8, timestep_groups=4,
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def assert_holds(folder: Path, step: int) -> None:
    """Assert that a folder holds the model of a step."""
    ours, theirs = gecko.load(folder).state_dict(), gecko_of(step).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def checkpoint_of(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def damage(checkpoint: Path) -> Path:
    shard = next((checkpoint / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    return shard


def test_a_run_becomes_its_newest_checkpoints_model(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """The command leaves the checkpoints unchanged, and other commands read what was joined."""
    out = tmp_path / "new" / "model"
    result = command("consolidate", run_folder, "--out", out, code=0)
    assert f"{out}: the model of step-00000008" in result.stdout, result.output
    assert_holds(out, 8)
    written = {path.name for path in out.iterdir()}
    assert written == {"model.safetensors", "config.json", "recipe.json", "tokenizer.model"}
    for checkpoint in list_checkpoints(run_folder / "checkpoints"):
        assert not (checkpoint / "model.safetensors").exists()
        verify_files(checkpoint)
    command("info", out, code=0)


def test_another_model_is_not_overwritten(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """Nor one of a type that Gecko does not know, nor other files; but an older checkpoint of the same run is."""
    other = tmp_path / "model"
    gecko.Gecko(dataclasses.replace(CONFIG, num_layers=1)).save(other)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    for _ in range(2):
        assert f"{other} holds another model" in command("consolidate", run_folder, "--out", other, code=2).stderr
        assert {path.name: path.read_bytes() for path in other.iterdir()} == before
        before["config.json"] = b'{"model_type": "bert"}'
        (other / "config.json").write_bytes(before["config.json"])
    for name in ("notes.txt", "recipe.json", "model.safetensors"):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        result = command("consolidate", run_folder, "--out", folder, code=2)
        assert f"--out must be a new folder, or an empty one; {folder} holds" in result.stderr
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]
    for step in (4, 8):
        command("consolidate", checkpoint_of(run_folder, step), "--out", tmp_path / "own", code=0)
        assert_holds(tmp_path / "own", step)


def test_a_checkpoint_takes_in_its_own_model_and_stays_whole(command: Command, run_folder: Path) -> None:
    checkpoint = checkpoint_of(run_folder, 4)
    before = {path: path.read_bytes() for path in (checkpoint / "shards").iterdir()}
    for _ in range(2):
        command("consolidate", checkpoint, code=0)
        assert_holds(checkpoint, 4)
        verify_files(checkpoint)
    assert all(path.read_bytes() == content for path, content in before.items())
    model = checkpoint / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        verify_files(checkpoint)


def test_a_damaged_checkpoint_is_not_joined(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """For a run, the last good checkpoint is used, and its name is printed."""
    shard = damage(checkpoint_of(run_folder, 8))
    result = command("consolidate", checkpoint_of(run_folder, 8), "--out", tmp_path / "model", code=2)
    assert shard.name in result.stderr and not (tmp_path / "model").exists()
    result = command("consolidate", run_folder, "--out", tmp_path / "model", code=0)
    assert "the model of step-00000004" in result.stdout
    assert "skipping the checkpoint" in result.stderr and "step-00000008" in result.stderr


@pytest.mark.parametrize("joined", [False, True])
def test_the_average_has_the_mean_of_the_weights(
    command: Command, run_folder: Path, tmp_path: Path, joined: bool
) -> None:
    for step in (4, 8) if joined else ():
        command("consolidate", checkpoint_of(run_folder, step), code=0)
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
    shard = damage(checkpoint_of(run_folder, 4))
    result = command("average", run_folder, "--last", 2, "--out", tmp_path / "mean", code=2)
    assert shard.name in result.stderr and not (tmp_path / "mean").exists()


@pytest.mark.parametrize(("every", "consecutive"), [(1, False), (3, False), (4, True), (500, True)])
def test_only_consecutive_checkpoints_are_averaged(
    command: Command, run_folder: Path, tmp_path: Path, every: int, consecutive: bool
) -> None:
    """A checkpoint that is kept for its low loss may lie far before the newest one."""
    for path in list_checkpoints(run_folder / "checkpoints"):
        run = Run.load(path / "recipe.json")
        replaced = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, every=every))
        replaced.save(path / "recipe.json")
        write_manifest(path, flushed_entries(path, all_files(path)))
    result = command("average", run_folder, "--last", 2, "--out", tmp_path / "mean", code=0 if consecutive else 2)
    if not consecutive:
        assert "step-00000008 and step-00000004 are not" in result.stderr and "Try --last 1" in result.stderr
        assert not (tmp_path / "mean").exists()
        command("average", run_folder, "--last", 1, "--out", tmp_path / "mean", code=0)
