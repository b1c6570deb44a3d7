"""Mistakes of a first hour: each message says what was given and what to type."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import CONFIG, write_run
from support.chats import some_chats, write_chats

import gecko
from gecko.data import load_tokenizer
from gecko.inference import read
from gecko.train import NonFiniteError, Run

Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate notes.txt", "; notes.txt is a file. The MODEL comes first; a text to continue is given by --file"),
        ("generate demo2", "there is no demo2. Did you mean demo?"),
        ("state show demo", "demo must be a file written by gecko; it is a folder"),
        ("train demo", "demo is a run or checkpoint. To train it further: gecko train demo/recipe.json --resume"),
        ("train texts", "texts is a folder. To train on it: gecko train tiny data.source=texts --out"),
        ("train notes.txt", "notes.txt is another file. To train on it: gecko train tiny data.source=notes.txt"),
        ("train tokenizer.json", "A tokenizer is named by data.tokenizer=tokenizer.json"),
        ("train tiny data.source=chats.jsonl --out r", "Chats are learned by gecko finetune MODEL CHATS"),
        ("train tiny --steps 50", "A setting of the recipe is written steps=VALUE"),
        ("train tiny sequence_lenght=8", "Did you mean 'sequence_length'? gecko train RECIPE --show lists all"),
        ("train tiny vocab_size=300", "got 'vocab_size'. Did you mean 'model.vocab_size'?"),
        ("generate demo --tokenizer byte", "got 'byte'. Did you mean 'bytes'?"),
        ("serve demo --host 203.0.113.7", "--host must be an address of this machine: 127.0.0.1"),
        ("compare compare_gecko compare_llama data.source=nowhere --out cmp", "got 'nowhere', which does not exist"),
        ("chat demo --state other.state", "other.state cannot be continued with demo: the state was made by other"),
        ("generate demo -p a --state other.state", "`gecko read demo TEXT --out FILE` writes one of this model"),
    ],
)
def test_a_mistake_is_answered_by_what_to_type(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "demo")
    Run(model=CONFIG, output="demo", steps=1).save(tmp_path / "demo" / "recipe.json")
    (tmp_path / "texts").mkdir()
    (tmp_path / "notes.txt").write_text("a text")
    write_chats(tmp_path / "chats.jsonl", some_chats(2))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    torch.manual_seed(7)
    read(gecko.Gecko(CONFIG).eval(), [torch.tensor([256, 3])]).state.save(tmp_path / "other.state")
    result = command(*arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert len(result.stderr) < 900
    assert not (tmp_path / "cmp").exists()


def test_a_plan_takes_the_gpus_of_its_recipe(command: Command) -> None:
    assert "gecko_7b on 256 × H100" in " ".join(command("plan", "gecko_7b").stdout.split())
    assert "tiny on 4 × H100" in " ".join(command("plan", "tiny").stdout.split())


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
