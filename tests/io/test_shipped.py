"""Models that are installed with the package."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gecko
from gecko.cli import app
from gecko.data import load_tokenizer
from gecko.io.checkpoints import model_folder
from gecko.io.shipped import shipped_folder, shipped_models

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


def test_commands_take_its_name(elsewhere: Path) -> None:
    options = ["--prompt", "It was ", "-n", "40", "--temperature", "0"]
    result = CliRunner().invoke(app, ["generate", "books", *options])
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) == 40
    assert "3,756,032" in CliRunner().invoke(app, ["info", "books"]).stdout


def test_a_model_of_the_same_name_comes_first(elsewhere: Path) -> None:
    config = gecko.GeckoConfig.preset("tiny", num_layers=1)
    gecko.Gecko(config).save(elsewhere / "books")
    assert model_folder("books") == Path("books")
    assert gecko.load("books").config == config
    (elsewhere / "books" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        gecko.load("books")


def test_texts_of_the_same_name_do_not_hide_it(elsewhere: Path) -> None:
    (elsewhere / "books").mkdir()
    (elsewhere / "books" / "emma.txt").write_text("Emma Woodhouse")
    assert gecko.load("books").config == gecko.GeckoConfig.preset("gecko-4m")


def test_an_unknown_name_lists_the_shipped_models(elsewhere: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "bookz"])
    assert "Models installed with the package: books." in result.stderr
