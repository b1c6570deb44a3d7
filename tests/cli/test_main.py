"""The command as a whole: exit codes, start, signals, and what is imported."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import CONFIG, Command
from rich.console import Console
from support.interrupts import take_interrupts
from support.native_agreement import needs_compiler

import gecko
from gecko.data import load_tokenizer
from gecko.parallel.mesh import Ranks
from gecko.train import DataSettings, NonFiniteError, OptimizerSettings, Run, train
from gecko.train.data import load_data


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ValueError("what must hold"), 2, "what must hold"),
        (FileNotFoundError("no file x"), 2, "no file x"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 2, "x.txt: No such file or directory."),
        (OSError(28, "could not write x; No space left"), 2, "could not write x; No space left"),
        (ImportError("pip install 'gecko-lm[data]'"), 2, "gecko-lm[data]"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, shown: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gecko.cli.doctor.machine", fail)
    result = command("doctor", code=code)
    assert shown in result.stderr and "Traceback" not in result.stderr


def test_bugs_and_errors_with_debug_are_not_dressed_up_as_messages(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's message says nothing to a user; the place in the code does."""
    monkeypatch.setattr("gecko.cli.doctor.machine", lambda: torch.zeros(2) @ torch.zeros(3))
    assert type(command("doctor").exception) is RuntimeError
    assert type(command("--debug", "generate", "nowhere").exception) is FileNotFoundError


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("end", ["interrupted", "unread"])
def test_a_command_ends_at_once_and_quietly(start: Callable[..., Any], run_folder: Path, end: str) -> None:
    with start("generate", run_folder, "-n", "10000000", preexec_fn=take_interrupts) as running:
        assert running.stdout.read(5).isalpha()
        begin = time.monotonic()
        if end == "unread":
            running.stdout.close()
        else:
            running.send_signal(signal.SIGINT)
            running.stdout.read()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == (141 if end == "unread" else 130)
        assert time.monotonic() - begin < 20


# ---- Imports: help, the version and completion need no PyTorch, and text does not wait for modules of training.


def loaded(environment: dict[str, str], modules: tuple[str, ...], *programs: str) -> list[str]:
    """Return which of ``modules`` a fresh process has imported after the programs, which may exit."""
    lines = [f"try:\n    {program}\nexcept SystemExit:\n    pass" for program in programs]
    report = f"import json, sys; print(); print(json.dumps([name for name in {modules!r} if name in sys.modules]))"
    found: list[str] = json.loads(ran(environment, "\n".join([*lines, report])).stdout.splitlines()[-1])
    return found


def ran(environment: dict[str, str], program: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True)


def test_help_version_and_the_package_do_not_import_pytorch(environment: dict[str, str]) -> None:
    heavy = ("torch", "numpy", "safetensors", "gecko.config", "gecko.train")
    helps = (["--help"], ["--version"], ["eval", "retrieval", "--help"], ["state", "--help"])
    commands = [f"from gecko.cli import app; app({arguments!r})" for arguments in helps]
    assert loaded(environment, heavy, "import gecko; assert set(gecko.__all__) <= set(dir(gecko))", *commands) == []
    asked = {**environment, "_GECKO_COMPLETE": "complete_bash", "COMP_WORDS": "gecko ch", "COMP_CWORD": "1"}
    program = "import sys\nfrom gecko.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    assert ran(asked, program).stdout.split() == ["chat"], "a shell asks for completions by environment variables"
    with pytest.raises(AttributeError, match="'gecko' has no attribute 'nothing'"):
        _ = gecko.nothing  # type: ignore[attr-defined]


@needs_compiler
def test_a_short_prompt_needs_the_small_library_and_nothing_of_training(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The other library takes twice as long to compile, and these modules longer than PyTorch to import."""
    unused = ("torch._dynamo", "torch.distributed.fsdp", "sympy", "transformers", "matplotlib")
    arguments = ["generate", "books", "--prompt", "It was ", "-n", "20", "--device", "cpu"]
    program = f"from gecko.cli import app; app({arguments!r})"
    assert loaded({**environment, "XDG_CACHE_HOME": str(tmp_path)}, unused, program) == []
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.so")] == ["decoding"]


def test_importing_libraries_prints_nothing(environment: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    done = ran(environment, "import gecko.hf")
    assert done.stdout == "" and "W1" not in done.stderr and "Failed to load" not in done.stderr


# ---- Mistakes of a first hour: each message says what was given and what to type.


@pytest.mark.parametrize("words", [("academic", "piqa"), ("scrolls", "qmsum")], ids=lambda words: words[0])
def test_data_sets_of_the_hub_are_not_asked_for_again_and_again_without_a_network(
    command: Command, run_folder: Path, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, str],
) -> None:  # fmt: skip
    pytest.importorskip("lm_eval")
    hub, datasets = pytest.importorskip("huggingface_hub"), pytest.importorskip("datasets")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)  # tests of transformers in this process set them
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("tried again"))
    with pytest.raises(FileNotFoundError, match=r"got 'someone/model', .* cannot be reached, and tokenizer"):
        load_tokenizer("someone/model")
    result = command("eval", words[0], run_folder, words[1], code=2)
    answer = " ".join(result.output.replace("│", " ").split())
    assert "https://huggingface.co cannot be reached" in answer and "--data" in answer
    assert not hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def run_on_text(folder: Path, **changes: Any) -> Run:
    (folder / "text.txt").write_text("red green blue " * 600)
    data = DataSettings(source=str(folder / "text.txt"))
    small = Run(model=CONFIG, output=str(folder / "run"), data=data, steps=2, batch_size=2, sequence_length=24)
    return dataclasses.replace(small, threads=1, **changes)


def test_a_diverged_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = OptimizerSettings(learning_rate=1e30, weight_decay=0.0)
    try:
        train(run_on_text(tmp_path, optimizer=optimizer, max_skips=5))
    except NonFiniteError as error:
        written = str(error)
    else:
        written = capsys.readouterr().out
    assert "Try a lower optimizer.learning_rate" in written


def test_a_vocabulary_that_the_tokenizer_does_not_use_is_named(tmp_path: Path) -> None:
    run = run_on_text(tmp_path, model=dataclasses.replace(CONFIG, vocab_size=600))
    load_data(run, Ranks(console=Console(file=(output := io.StringIO()), width=300)))
    assert "the model has 600 ids, of which the tokenizer 'bytes' uses 257" in output.getvalue()
    assert "model.vocab_size=264" in output.getvalue()
