"""``gecko quantize``."""

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
    result = command("quantize", run_folder, out, "--bits", bits, code=0)
    size, original = ((path / "model.safetensors").stat().st_size for path in (out, newest(run_folder)))
    assert f"{size:,} bytes of weights" in result.stdout
    assert f"of the {original:,} in {newest(run_folder)}" in result.stdout
    assert size < 0.8 * original
    written = command("generate", out, "-p", "abc", "-n", 9, "--temperature", 0, "--save-state", folder / "s", code=0)
    tokens = gecko.generate(gecko.load(out), [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert written.stdout == bytes(tokens).decode()
    command("generate", out, "--state", folder / "s", "-p", "d", "-n", 2, code=0)
    refused = command("generate", run_folder, "--state", folder / "s", "-p", "d", "-n", 2, code=2)
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
    command("quantize", tmp_path / "model", tmp_path / "out", code=0)
    assert (tmp_path / "out" / name).read_text() == "{}"


def newest(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "step-00000002"


def test_no_model_is_put_into_a_run(command: Command, run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    (tmp_path / "link").symlink_to(run)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    for out in (run, newest(run), run / "int8", run / "checkpoints", run / "checkpoints" / "int8", tmp_path / "link"):
        result = command("quantize", run, out, code=2)
        assert "OUT must be a folder outside of training runs" in result.stderr
        assert "Name another" in result.stderr
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_a_run_with_a_second_model_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(newest(run) / name, run / name)
    result = command("generate", run, "-p", "a", "-n", 1, code=2)
    assert f"{run} must hold one model" in result.stderr and "Move config.json and model.safetensors" in result.stderr
    with pytest.raises(ValueError, match="must hold one model"):
        gecko.load(run)
