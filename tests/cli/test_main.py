"""The command as a whole: help, errors, exit codes, start, messages and home folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli.conftest import CONFIG
from cli.test_convert import release_of_gecko
from support.interrupts import take_interrupts
from support.native_agreement import needs_compiler

import gecko
from gecko.data import load_tokenizer
from gecko.recipes import get_recipe
from gecko.train import NonFiniteError, Run

# ---- The command as a whole: help, errors and exit codes.


def test_debug_shows_where_it_comes_from(process: Callable[..., Any], tmp_path: Path) -> None:
    result = process("--debug", "generate", tmp_path / "nowhere")
    assert result.returncode != 0
    assert b"Traceback" in result.stderr
    assert b"FileNotFoundError" in result.stderr


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
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, shown: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gecko.cli.doctor.machine", fail)
    result = command("doctor")
    assert result.exit_code == code
    assert shown in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bug_is_not_dressed_up_as_a_message(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's message says nothing to a user; the place in the code does.
    monkeypatch.setattr("gecko.cli.doctor.machine", lambda: torch.zeros(2) @ torch.zeros(3))
    result = command("doctor")
    assert isinstance(result.exception, RuntimeError)
    assert not isinstance(result.exception, SystemExit)


def test_a_reader_that_goes_away_is_no_error(run_folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gecko", "generate", run_folder, "-n", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(5).isalpha()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 141


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupt_ends_at_once_and_quietly(run_folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gecko", "generate", run_folder, "-n", "10000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, preexec_fn=take_interrupts,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(5)
        running.send_signal(signal.SIGINT)
        begin = time.monotonic()
        running.stdout.read()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 130
        assert time.monotonic() - begin < 20


# ---- Help and version do not import PyTorch, imports are lazy, and text does not wait for modules of training.

HEAVY = ("torch", "numpy", "safetensors", "gecko.config", "gecko.train")
UNUSED = ("torch._dynamo", "torch.distributed.fsdp", "sympy", "transformers", "matplotlib")
"""Modules of training and compiling, which take longer to import than PyTorch itself."""


def _loaded(program: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    """Return which of ``modules`` a fresh process has imported after ``program``."""
    report = f"import json, sys; print(); print(json.dumps([name for name in {modules!r} if name in sys.modules]))"
    program = f"try:\n    {program}\nexcept SystemExit:\n    pass\n{report}"
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["eval", "retrieval", "--help"], ["state", "--help"]])
def test_help_and_version_do_not_import_pytorch(arguments: list[str]) -> None:
    assert _loaded(f"from gecko.cli import app; app({arguments!r})") == []


def test_the_package_imports_pytorch_on_first_use() -> None:
    assert _loaded("import gecko; assert set(gecko.__all__) <= set(dir(gecko))") == []
    assert "torch" in _loaded("import gecko; gecko.Gecko")
    with pytest.raises(AttributeError, match="'gecko' has no attribute 'nothing'"):
        _ = gecko.nothing  # type: ignore[attr-defined]


def test_text_does_not_wait_for_modules_of_training() -> None:
    arguments = ["generate", "books", "--prompt", "It was ", "-n", "20"]
    assert _loaded(f"from gecko.cli import app; app({arguments!r})", UNUSED) == []


@needs_compiler
def test_a_short_prompt_needs_the_small_library_only(tmp_path: Path) -> None:
    """The other one takes twice as long to compile, so the first text would come later."""
    arguments = ["generate", "books", "--prompt", "It was ", "-n", "20", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "gecko", *arguments], env=environment, capture_output=True, check=True)
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.so")] == ["decoding"]


def test_a_shell_completes_commands_without_pytorch() -> None:
    """The shell asks for completions by environment variables."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1]), "_GECKO_COMPLETE": "complete_bash",
        "COMP_WORDS": "gecko ch", "COMP_CWORD": "1",
    }  # fmt: skip
    program = "import sys\nfrom gecko.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["chat"]


# ---- Mistakes of a first hour: each message says what was given and what to type.

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
    result = command("eval", *(str(run_folder) if part == "RUN" else part for part in arguments), code=2)
    answer = " ".join(result.output.replace("│", " ").split())
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


# ---- ``~`` is the home folder in every path option, also where the shell does not expand it: ``--out=~/run``.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a home folder, and check that nothing is written to the current folder."""
    for name in ("home", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield tmp_path / "home"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_train_and_compare(command: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("gecko.train.train", lambda run, **_: seen.update(run=run))
    monkeypatch.setattr(
        "gecko.experiments.compare.compare",
        lambda plan, **_: seen.update(plan=plan) or SimpleNamespace(page=None, stopped=None, failed=False),
    )
    get_recipe("tiny").save(home / "mine.json")
    command("train", "~/mine.json", "--out=~/run", code=0)
    assert seen["run"].folder == home / "run"
    command("compare", "tiny", "~/mine.json", "steps=7", "--out=~/compared", code=0)
    assert (seen["plan"].folder, list(seen["plan"].recipes)) == (home / "compared", ["tiny", "mine"])


def test_tokenize(command: Command, home: Path) -> None:
    (home / "texts").mkdir()
    (home / "texts" / "a.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    result = command("tokenize", "~/texts", "--tokenizer", "bytes", "--out=~/shards", "--verify", code=0)
    assert (home / "shards" / "manifest.json").is_file()
    result = command("tokenize", "~/texts", "--tokenizer", "bytes", "--out=~/texts/shards", code=2)
    assert "must lie outside the sources" in result.stderr


def test_convert_and_state(command: Command, home: Path) -> None:
    release_of_gecko(home / "release")
    command("convert", "~/release", "~/model", code=0)
    gecko.load(home / "model").empty_state().save(home / "empty.state")
    command("state", "show", "~/empty.state", code=0)
    command("state", "diff", "~/empty.state", "~/empty.state", code=0)
