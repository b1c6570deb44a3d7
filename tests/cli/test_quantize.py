"""``gecko quantize``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gecko

pytest.importorskip("torchao")

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.mark.parametrize("bits", [8, 4])
def test_the_copy_works_like_the_original(command: Command, run_folder: Path, folder: Path, bits: int) -> None:
    out = folder / f"int{bits}"
    result = command("quantize", run_folder, out, "--bits", bits)
    assert result.exit_code == 0, result.stderr
    size, original = ((path / "model.safetensors").stat().st_size for path in (out, newest(run_folder)))
    assert f"{size:,} bytes of weights" in result.stdout
    assert f"of the {original:,} in {newest(run_folder)}" in result.stdout
    assert size < 0.8 * original
    written = command("generate", out, "-p", "abc", "-n", 9, "--temperature", 0, "--save-state", folder / "s")
    assert written.exit_code == 0, written.stderr
    tokens = gecko.generate(gecko.load(out), [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert written.stdout == bytes(tokens).decode()
    assert command("generate", out, "--state", folder / "s", "-p", "d", "-n", 2).exit_code == 0
    refused = command("generate", run_folder, "--state", folder / "s", "-p", "d", "-n", 2)
    assert refused.exit_code == 2
    assert "other weights" in refused.stderr


@pytest.mark.parametrize(
    "name",
    ["recipe.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"],
)
def test_what_says_how_to_use_the_model_goes_along(
    command: Command, run_folder: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(newest(run_folder), tmp_path / "model")
    (tmp_path / "model" / name).write_text("{}")
    assert command("quantize", tmp_path / "model", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / name).read_text() == "{}"


def test_nothing_is_overwritten(command: Command, run_folder: Path, folder: Path) -> None:
    command("quantize", run_folder, folder / "once")
    before = (folder / "once" / "model.safetensors").read_bytes()
    result = command("quantize", run_folder, folder / "once", "--bits", 4)
    assert result.exit_code == 2
    assert "OUT must be a new folder" in result.stderr
    assert (folder / "once" / "model.safetensors").read_bytes() == before


def test_what_cannot_be_quantised(command: Command, run_folder: Path, folder: Path) -> None:
    command("quantize", run_folder, folder / "first")
    cases = [
        (("quantize", run_folder, folder / "a", "--bits", 3), "bits must be 8 or 4; got 3"),
        (("quantize", folder / "first", folder / "a"), "must not be quantised yet"),
        (("quantize", folder / "gone", folder / "a"), "must be a folder that holds a model"),
    ]
    for arguments, message in cases:
        result = command(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
    assert not (folder / "a").exists()


def newest(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "step-00000002"
