"""Files that are found: the newest checkpoint, shipped models, and locks."""

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli.conftest import write_run
from typer.testing import CliRunner

import gecko
from gecko.cli import app
from gecko.data import load_tokenizer
from gecko.io.checkpoints import model_folder, shipped_folder, shipped_models
from gecko.io.files import locked
from gecko.models import load_any

# ---- A run stands for its newest undamaged checkpoint wherever a model folder is expected.


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


def test_a_run_without_a_whole_checkpoint_and_one_with_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="the run has none yet"):
        gecko.load(tmp_path / "begun")
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold one model; it is a training run"):
        gecko.load(run)
    (run / "config.json").unlink()
    newest = run / "checkpoints" / "step-00000002"
    (newest / "model.safetensors").unlink()
    (newest / "shards").mkdir()
    with pytest.raises(FileNotFoundError, match="Join them: gecko consolidate"):
        model_folder(newest)


# ---- Models that are installed with the package.

LARGEST = 10_000_000
"""Bytes that a shipped model may add to the package."""

OPENING = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife.\n\nHowever little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property "
    "of some one or other of their daughters.\n"
)
"""From a novel that is held out of training."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", shipped_models())
def test_a_shipped_model_is_small_and_has_a_card(name: str) -> None:
    folder = shipped_folder(name)
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < LARGEST
    card = (folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Use", "## Data", "## Training", "## Limits"):
        assert heading in card


def test_its_weights_are_trained(elsewhere: Path) -> None:
    model, tokenizer = gecko.load("books").float(), load_tokenizer("bytes")
    ids = torch.tensor([[tokenizer.document_start, *tokenizer.encode(OPENING)]])
    with torch.no_grad():
        nats = float(torch.nn.functional.cross_entropy(model(ids[:, :-1])[0][0].float(), ids[0, 1:]))
    assert nats < 1.4, f"guessing gives {math.log(264):.2f}"


def test_commands_take_its_name_and_tell_it_for_an_unknown_one(elsewhere: Path) -> None:
    options = ["--prompt", "It was ", "-n", "40", "--temperature", "0"]
    result = CliRunner().invoke(app, ["generate", "books", *options])
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) == 40
    assert "3,756,032" in CliRunner().invoke(app, ["info", "books"]).stdout
    wrong = CliRunner().invoke(app, ["generate", "bookz"])
    assert "Models installed with the package: books." in wrong.stderr


def test_a_model_of_the_same_name_comes_first_but_texts_do_not_hide_it(elsewhere: Path) -> None:
    (elsewhere / "books").mkdir()
    (elsewhere / "books" / "emma.txt").write_text("Emma Woodhouse")
    assert gecko.load("books").config == gecko.GeckoConfig.preset("gecko-4m")
    config = gecko.GeckoConfig.preset("tiny", num_layers=1)
    gecko.Gecko(config).save(elsewhere / "books")
    assert model_folder("books") == Path("books")
    assert gecko.load("books").config == config
    (elsewhere / "books" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        gecko.load("books")


# ---- One process holds a lock, and the lock ends with the process.

_HOLDER = """
import sys, time
from pathlib import Path
from gecko.io.files import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(1000)
"""


def free(lock: Path) -> bool:
    try:
        with locked(lock, wait=False):
            return True
    except ValueError as error:
        assert f"one process at a time may work in {lock.parent}; another one" in str(error)
        return False


def test_it_ends_with_an_error_or_with_the_process_that_holds_it(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    with pytest.raises(KeyError), locked(lock, wait=False):
        raise KeyError
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        refused = not free(lock)
        holder.send_signal(signal.SIGKILL)
        with locked(lock, wait=True):
            assert refused and not free(lock) and free(tmp_path / ".other")
    assert free(lock)


def test_a_file_system_without_locks_is_worked_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, expected in (
        (errno.ENOLCK, pytest.warns(UserWarning, match=r"\.lock cannot be locked \(No locks available\)")),
        (errno.EIO, pytest.raises(OSError, match="Input/output")),
    ):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
        with expected, locked(tmp_path / ".lock", wait=False):
            pass
