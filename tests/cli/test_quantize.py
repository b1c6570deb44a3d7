"""``gecko quantize``."""

import shutil
from pathlib import Path

import pytest
from cli.conftest import NEWEST, Command, greedy

import gecko

pytest.importorskip("torchao")


@pytest.mark.parametrize("bits", [8, 4])
def test_the_copy_works_like_the_original(command: Command, run_folder: Path, tmp_path: Path, bits: int) -> None:
    """What says how to use the model goes along."""
    source, out = shutil.copytree(run_folder / NEWEST, tmp_path / "model"), tmp_path / "out"
    along = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    for name in along:
        (source / name).write_text("{}")
    result = command("quantize", source, out, "--bits", bits, code=0)
    assert {path.name for path in out.iterdir()} == {*along, "recipe.json", "config.json", "model.safetensors"}
    assert all((out / name).read_text() == "{}" for name in along)
    size, original = ((path / "model.safetensors").stat().st_size for path in (out, source))
    assert f"{size:,} bytes of weights" in result.stdout and f"of the {original:,} in {source}" in result.stdout
    assert size < 0.8 * original
    options, state = ("-n", 9, "--temperature", 0, "--tokenizer", "bytes"), tmp_path / "s"
    written = command("generate", out, "-p", "abc", *options, "--save-state", state, code=0)
    assert written.stdout == greedy(out, b"abc", 9)
    command("generate", out, "--state", state, "-p", "d", *options, code=0)
    refused = command("generate", source, "--state", state, "-p", "d", *options, code=2)
    assert "other weights" in refused.stderr


def test_a_run_with_a_second_model_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(run / NEWEST / name, run / name)
    result = command("generate", run, "-p", "a", "-n", 1, code=2)
    assert f"{run} must hold one model" in result.stderr and "Move config.json and model.safetensors" in result.stderr
    with pytest.raises(ValueError, match="must hold one model"):
        gecko.load(run)
