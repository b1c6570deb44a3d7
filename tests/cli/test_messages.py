"""Mistakes of a first hour: each message says what was given and what to type."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import CONFIG

from gecko.data import load_tokenizer
from gecko.train import NonFiniteError, Run

Command = Callable[..., Any]


def test_the_hub_is_not_asked_again_and_again_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    asked = []

    def unknown(host: str, *_: Any) -> list[Any]:
        asked.append(host)
        raise OSError("no name record")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("tried again"))
    with pytest.raises(FileNotFoundError, match=r"got 'someone/model', .* cannot be reached, and tokenizer"):
        load_tokenizer("someone/model")
    assert len(asked) <= 2


@pytest.mark.parametrize(
    "arguments", [("academic", "RUN", "piqa"), ("scrolls", "RUN", "qmsum")], ids=lambda arguments: arguments[0]
)
def test_data_sets_of_the_hub_are_not_asked_for_again_and_again_without_a_network(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("lm_eval")
    hub, datasets = pytest.importorskip("huggingface_hub"), pytest.importorskip("datasets")

    def unknown(*_: Any) -> list[Any]:
        raise OSError("no name record")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("tried again"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)  # tests of transformers in this process set them
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    result = command("eval", *(str(run_folder) if part == "RUN" else part for part in arguments))
    answer = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, repr(result.exception)
    assert "https://huggingface.co cannot be reached" in answer and "--data" in answer
    assert not hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_a_diverged_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, train

    (tmp_path / "text.txt").write_text("red green blue " * 60)
    run = Run(
        model=CONFIG, output=str(tmp_path / "run"), data=DataSettings(source=str(tmp_path / "text.txt")), steps=2,
        batch_size=2, sequence_length=24, optimizer=OptimizerSettings(learning_rate=1e30, weight_decay=0.0),
        evaluation=EvaluationSettings(final_rows=4), checkpoint=CheckpointSettings(every=2), max_skips=5, threads=1,
    )  # fmt: skip
    try:
        train(run)
    except NonFiniteError as error:
        written = str(error)
    else:
        written = capsys.readouterr().out
    assert "Try a lower optimizer.learning_rate" in written


def test_a_vocabulary_that_the_tokenizer_does_not_use_is_named(tmp_path: Path) -> None:
    import dataclasses
    import io

    from rich.console import Console

    from gecko.parallel.mesh import Ranks
    from gecko.train import DataSettings
    from gecko.train.data import load_data

    (tmp_path / "text.txt").write_text("red green blue " * 600)
    model, output = dataclasses.replace(CONFIG, vocab_size=600), io.StringIO()
    data = DataSettings(source=str(tmp_path / "text.txt"))
    load_data(Run(model=model, output="x", data=data, steps=1), Ranks(), Console(file=output, width=300))
    assert "the model has 600 ids, of which the tokenizer 'bytes' uses 257" in output.getvalue()
    assert "model.vocab_size=264" in output.getvalue()


def test_importing_libraries_prints_nothing(environment: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    ran = subprocess.run(
        [sys.executable, "-c", "import gecko.hf"], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "" and "W1" not in ran.stderr and "Failed to load" not in ran.stderr
