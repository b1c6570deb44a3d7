"""Commands accept a run of a Llama, or refuse it with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gecko.cli import app
from gecko.models import LlamaConfig, load_any
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, Run, SampleSettings, train


@pytest.fixture
def command() -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a few steps with rows of 64 tokens."""
    run = Run(
        model=LlamaConfig(264, 1, 32, 2, 32), output=str(tmp_path_factory.mktemp("runs") / "llama"), steps=3,
        data=DataSettings(source=str(corpus)), batch_size=2, sequence_length=64, sample=SampleSettings(tokens=3),
        evaluation=EvaluationSettings(rows=4, final_rows=4), checkpoint=CheckpointSettings(keep=1), threads=1,
    )  # fmt: skip
    train(run)
    return run.folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a stone falls slowly over the green river. " * 20, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "MODEL", "--prompt", "x"),
        ("read", "MODEL", "TEXT", "--out", "OUT"),
        ("serve", "MODEL", "--port", "0"),
        ("quantize", "MODEL", "OUT"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_not_for_a_llama_says_so(
    command: Callable[..., Any], folder: Path, arguments: tuple[str, ...], text: Path
) -> None:
    places = {"MODEL": folder, "TEXT": text, "OUT": text.parent / "out"}
    result = command(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert "MODEL must be a Gecko" in result.stderr and "is a Llama. Use it with gecko eval" in result.stderr
    assert not places["OUT"].exists()


def test_perplexity_says_what_the_context_was(command: Callable[..., Any], folder: Path, text: Path) -> None:
    out = text.parent / "out.json"
    result = command("eval", "perplexity", folder, text, "--lengths", "64,256", "--out", out)
    assert result.exit_code == 0, result.stderr
    record = json.loads(out.read_text())
    assert record["model"]["trained_length"] == 64 and record["model"]["parameters"] > 0
    assert any("context of 64 tokens, and the longest text had 256" in note for note in record["notes"])
    alone = command("eval", "perplexity", folder, text, "--lengths", "64")
    assert alone.exit_code == 0 and "it never saw the later positions" not in " ".join(alone.stdout.split())


def test_other_evaluations(command: Callable[..., Any], folder: Path, text: Path) -> None:
    refused = command("eval", "positions", folder, text, "--length", "128")
    assert refused.exit_code == 2 and "attention has no chunks" in refused.stderr
    assert command("eval", "positions", folder, text, "--length", "128", "--chunk", "32").exit_code == 0
    found = command("eval", "retrieval", folder, "passkey", "--lengths", "600", "--depths", "0.5", "--samples", 2)
    assert found.exit_code == 0 and "longest text had 600" in " ".join(found.stdout.split())
    renewed = command("eval", "perplexity", folder, text, "--lengths", "64", "--renewed-norms")
    assert renewed.exit_code == 2 and "Leave it out" in renewed.stderr


def test_info_and_consolidate_take_a_run(command: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    shown = command("info", folder)
    assert shown.exit_code == 0 and "Keys and values" in shown.stdout
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    result = command("consolidate", run, "--out", tmp_path / "model")
    assert result.exit_code == 0, result.stderr
    newest = next((folder / "checkpoints").iterdir())
    joined, before = load_any(tmp_path / "model").state_dict(), load_any(newest).state_dict()
    assert all(bool((joined[name] == weight).all()) for name, weight in before.items())
    assert Run.load(tmp_path / "model" / "recipe.json").model == load_any(newest).config


def test_weights_are_rounded(command: Callable[..., Any], folder: Path, text: Path) -> None:
    values = {}
    for dtype in ("float32", "bfloat16"):
        out = text.parent / dtype
        result = command("eval", "perplexity", folder, text, "--lengths", "64", "--dtype", dtype, "-o", out)
        assert result.exit_code == 0, result.output
        record = json.loads(out.read_text())
        assert record["model"]["dtype"] == dtype
        values[dtype] = [score["value"] for score in record["scores"]]
    assert values["bfloat16"] != values["float32"]
    assert values["bfloat16"] == pytest.approx(values["float32"], rel=0.05)
