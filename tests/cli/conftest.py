"""A run folder with a random model, and the command line in this process or in a separate one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from typer.testing import CliRunner, Result

import gecko
from gecko.cli import app
from gecko.train import Run
from gecko.train.checkpoints import write_checkpoint

CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip

Command = Callable[..., Result]
NEWEST = Path("checkpoints", "step-00000002")
"""Newest checkpoint of ``run_folder``."""


def write_run(folder: Path, steps: tuple[int, ...] = (1,)) -> Path:
    """Write the files of a training run that other commands read."""
    run = Run(model=CONFIG, output=str(folder), steps=max(steps))
    for step in steps:
        torch.manual_seed(step)
        model = gecko.Gecko(CONFIG)
        with torch.no_grad():
            # Only letters are likely, so that texts do not depend on decoding and never end early.
            model.final_norm.bias.fill_(1)
            model.head.weight[:97], model.head.weight[123:] = -1, -1
            model.head.weight[97:123] *= 4

        def write_files(path: Path, model: gecko.Gecko = model) -> None:
            model.save(path)
            run.save(path / "recipe.json")

        write_checkpoint(folder / "checkpoints", step, write_files)
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", steps=(1, 2))


def greedy(model: Path | gecko.Gecko, text: bytes, new: int) -> str:
    """Return what a model writes after a text."""
    model = model if isinstance(model, gecko.Gecko) else gecko.load(model)
    return bytes(gecko.generate(model, [256, *text], max_new_tokens=new, temperature=0).tokens[0]).decode()


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """Make the command line once, and measure the memory of equal training steps once for all plans: it depends on
    neither the GPU nor its price."""
    import gecko.plan

    measured, step_memory = {}, gecko.plan.step_memory

    def remembered(run: Run, sizes: object) -> object:
        key = sizes, repr({**run.to_dict(), "output": "", "recipe": "", "overrides": ()})
        if key not in measured:
            measured[key] = step_memory(run, sizes)
        return measured[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gecko.plan, "step_memory", remembered)
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def command() -> Command:
    """Return a function that runs ``gecko …`` in this process, and that checks its exit code if one is given."""

    def run(*arguments: object, input: bytes | None = None, code: int | None = None) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)
        assert code in (None, result.exit_code), (result.output, result.exception)
        return result

    return run


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Use one thread: the models are so small that waking a second thread takes longer than they do."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(gecko.__file__).parents[1])}


@pytest.fixture
def start(environment: dict[str, str]) -> Callable[..., "subprocess.Popen[bytes]"]:
    """Return a function that starts ``python -m gecko …`` in a process with pipes."""

    def begin(*arguments: object, **options: Any) -> "subprocess.Popen[bytes]":
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
        return subprocess.Popen([sys.executable, "-m", "gecko", *map(str, arguments)], **{**pipes, **options})

    return begin


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> list[Any]:
        raise OSError("no name record")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
