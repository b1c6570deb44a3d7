"""``--dtype``: the dtype to which weights are converted after loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_serve import ask, serving

import gecko
from gecko.train.checkpoints.folders import latest_checkpoint

Command = Callable[..., Any]
TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_bytes(TEXT)
    return tmp_path / "book.txt"


@pytest.fixture
def model(run_folder: Path) -> gecko.Gecko:
    folder = latest_checkpoint(run_folder / "checkpoints")
    assert folder is not None
    return gecko.load(folder)


def read(command: Command, model: Path, book: Path, *options: str) -> Path:
    out = book.with_name("-".join(["state", *options]))
    result = command("read", model, book, "--out", out, *options)
    assert result.exit_code == 0, result.stderr
    return out


def test_a_rounded_model_reads_and_writes(command: Command, run_folder: Path, book: Path, model: gecko.Gecko) -> None:
    state = gecko.GeckoState.load(read(command, run_folder, book, "--dtype", "bfloat16"))
    rounded = model.bfloat16()
    assert state.model == rounded.fingerprint()
    assert state.mixers[0].attention.values.dtype is torch.bfloat16
    assert state.final_norm.mean.dtype is torch.float32
    options = ("--prompt", "abc", "-n", 9, "--temperature", 0, "--dtype", "bfloat16")
    result = command("generate", run_folder, *options)
    assert result.exit_code == 0, result.stderr
    expected = gecko.generate(rounded, [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert result.stdout == bytes(expected).decode()


def test_losses_are_those_of_float32_but_for_rounding(
    command: Command, run_folder: Path, book: Path, tmp_path: Path
) -> None:
    values = {}
    for dtype in ("float32", "bfloat16"):
        options = ("--lengths", "256", "--dtype", dtype, "-o", tmp_path / dtype)
        result = command("eval", "perplexity", run_folder, book, *options)
        assert result.exit_code == 0, result.output
        record = json.loads((tmp_path / dtype).read_text())
        assert record["model"]["dtype"] == dtype
        values[dtype] = [score["value"] for score in record["scores"] if score["value"] < 100]
    assert values["bfloat16"] != values["float32"]
    assert values["bfloat16"] == pytest.approx(values["float32"], rel=0.02)


def test_states_belong_to_weights_as_they_were_rounded(
    command: Command, run_folder: Path, book: Path, model: gecko.Gecko, tmp_path: Path
) -> None:
    model.bfloat16().save(tmp_path / "rounded")
    rounding, wide = ("--dtype", "bfloat16"), ("--dtype", "float32")

    def goes_on(state: Path, model: Path, *options: str) -> bool:
        given = ("--state", state, "--prompt", "a", "-n", 3, "--tokenizer", "bytes")
        result = command("generate", model, *given, *options)
        assert result.exit_code == 0 or "made by other weights" in result.stderr
        return bool(result.exit_code == 0)

    exact, rounded = read(command, run_folder, book), read(command, run_folder, book, *rounding)
    assert goes_on(exact, run_folder, *wide) and goes_on(rounded, run_folder, *rounding)
    assert not goes_on(exact, run_folder, *rounding) and not goes_on(rounded, run_folder)
    for options in ((), rounding, wide):
        assert goes_on(rounded, tmp_path / "rounded", *options)
        assert not goes_on(exact, tmp_path / "rounded", *options)


def test_a_rounded_model_is_served(run_folder: Path, environment: dict[str, str], model: gecko.Gecko) -> None:
    with serving(run_folder, environment, "--dtype", "bfloat16") as (_, address):
        texts = [ask(address, prompt="abc", max_tokens=9, temperature=0)["choices"][0]["text"] for _ in range(2)]
    expected = gecko.generate(model.bfloat16(), [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert texts == [bytes(expected).decode()] * 2
