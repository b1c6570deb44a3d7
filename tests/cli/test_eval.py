"""``gecko eval``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

TEXT = "Some words, naïve café, and more words.\n".encode() * 60


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_bytes(TEXT)
    return tmp_path / "book.txt"


def saved(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    assert {"format", "version", "evaluation", "model", "command", "seed", "hardware", "scores"} <= set(record)
    assert all(score["n"] >= 1 and score["unit"] for score in record["scores"])
    assert record["hardware"]["Processor"]
    return record


def test_renewed_norms_are_shown_beside_the_others(command: Command, tmp_path: Path, book: Path) -> None:
    import dataclasses

    import torch

    import gecko
    from gecko.train import Run

    config = dataclasses.replace(
        gecko.GeckoConfig.preset("tiny"), num_layers=1, model_dim=16, key_dim=8, value_dim=16, ffn_dim=16, num_heads=1,
        chunk_size=16, attention="chunk", memory="none", timestep_betas=None,
    )  # fmt: skip
    torch.manual_seed(0)
    gecko.Gecko(config).save(tmp_path / "model")
    Run(model=config, output=str(tmp_path), steps=1).save(tmp_path / "model" / "recipe.json")
    options = ("--lengths", 512, "--renewed-norms", "-o", tmp_path / "r.json")
    result = command("eval", "perplexity", tmp_path / "model", book, *options)
    assert result.exit_code == 0, result.output
    kept, renewed = (
        [score["value"] for score in saved(tmp_path / "r.json")["scores"]
         if score["where"]["norm statistics of"] == kind and score["name"] == "nats a token"]
        for kind in ("all that was read", "last 6 chunks")
    )  # fmt: skip
    assert kept != renewed
