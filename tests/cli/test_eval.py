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


def test_perplexity(command: Command, run_folder: Path, book: Path, tmp_path: Path) -> None:
    result = command("eval", "perplexity", run_folder, book, "--lengths", "256,1K", "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "bits a byte" in result.stdout and "bootstrap" in result.stdout
    record = saved(tmp_path / "r.json")
    assert record["model"]["name"] == str(run_folder)
    assert {score["where"]["context"] for score in record["scores"]} == {256, 1024}
    assert {score["n"] for score in record["scores"]} == {2048}


def test_positions(command: Command, run_folder: Path, book: Path, tmp_path: Path) -> None:
    result = command("eval", "positions", run_folder, book, "--length", 256, "--first", 2, "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    record = saved(tmp_path / "r.json")
    assert record["settings"]["chunk"] == 8 and record["settings"]["first"] == 2
    assert len(record["details"]["by_position"]) == 128


def test_retrieval(command: Command, run_folder: Path, book: Path, tmp_path: Path) -> None:
    options = ("--lengths", "900", "--samples", 2, "-o", tmp_path / "r.json")
    result = command("eval", "retrieval", run_folder, "passkey", "--depths", "0,1", *options)
    assert result.exit_code == 0, result.output
    assert [score["where"]["depth"] for score in saved(tmp_path / "r.json")["scores"]] == [0, 0, 1, 1]
    result = command("eval", "retrieval", run_folder, "niah_single_2", book, "--depths", "random", *options)
    assert result.exit_code == 0, result.output
    assert [score["value"] for score in saved(tmp_path / "r.json")["scores"]] == [0.0]


def test_diagnose(command: Command, tmp_path: Path) -> None:
    result = command(
        "eval", "diagnose", "induction_heads", "steps=2", "size.length=32", "model.memory=none", "test_rows=8",
        "-o", tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = saved(tmp_path / "r.json")
    assert record["settings"]["config"]["memory"] == "none"
    assert record["scores"][0]["n"] == 8
    assert "guessing gives" in result.stdout


def test_academic_and_scrolls(command: Command, run_folder: Path, tmp_path: Path) -> None:
    rows = [{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}, {"goal": "d", "sol1": "e", "sol2": "f", "label": 1}]
    (tmp_path / "piqa_val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = command("eval", "academic", run_folder, "piqa", "--data", tmp_path, "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert {score["name"] for score in saved(tmp_path / "r.json")["scores"]} == {"acc", "acc_norm"}
    record = {"id": "1", "input": "Who?\n\nA story of Ann.", "output": "Ann"}
    (tmp_path / "story.jsonl").write_text(json.dumps(record))
    story = ("--data", tmp_path / "story.jsonl", "--new-tokens", 4, "-o", tmp_path / "r.json")
    result = command("eval", "scrolls", run_folder, "narrative_qa", *story)
    assert result.exit_code == 0, result.output
    assert saved(tmp_path / "r.json")["scores"][0]["name"] == "F1"


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


def test_bad_input_ends_with_one_message_and_no_results(
    command: Command, run_folder: Path, book: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    cases = [
        (("perplexity", tmp_path / "gone", book), "must be a folder that holds a model"),
        (("perplexity", run_folder, tmp_path / "gone"), "there is no file"),
        (("perplexity", run_folder, "-"), "there is no file -"),
        (("perplexity", run_folder, book, "--lengths", "4M"), "the longest has 2,520"),
        (("perplexity", run_folder, book, "--lengths", "1Q"), "--lengths takes whole numbers"),
        (("perplexity", run_folder, book, "--lengths", "512", "--renewed-norms"), "cumulative norm"),
        (("positions", run_folder, book), "at least as long as a segment, 32,768"),
        (("positions", run_folder, book, "--length", "4K,8K"), "--length takes one number of tokens"),
        (("retrieval", run_folder, "passkeys"), "Did you mean 'passkey'"),
        (("retrieval", run_folder, "passkey", "--depths", "a"), "--depths takes numbers"),
        (("diagnose", "mqar", "step=3"), "Did you mean 'steps'"),
        (("diagnose", "mqar", "steps"), "must read key=value"),
        (("diagnose", "mqar", "size.items=80"), "mqar needs at least one pair"),
        (("academic", run_folder, "pica", "--data", tmp_path), "Did you mean 'piqa'"),
        (("scrolls", run_folder, "qmsum", "--data", tmp_path / "gone.jsonl"), "there is no file"),
        (("scrolls", run_folder, "qmsm", "--data", tmp_path / "gone.jsonl"), "Did you mean 'qmsum'"),
    ]
    for arguments, message in cases:
        result = command("eval", *arguments, "-o", out)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr, result.stderr
        assert not out.exists()
    result = command("eval", "perplexity", run_folder, book, "-o", tmp_path)
    assert result.exit_code == 2
    assert "--out must be a file" in result.stderr
