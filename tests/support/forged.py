"""A process that opens forged files, and is started again when one of them has ended it or holds it up."""

import contextlib
import hashlib
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

SECONDS = 300
"""Time after which a case counts as hung. One takes milliseconds; the first of a process imports what it needs."""


class Opener:
    """Opens files in another process, which outlives all that it refuses."""

    def __init__(self) -> None:
        self._process: Any = None

    def open(self, door: str, path: Path) -> str:
        """Return ``opened: DIGEST``, ``refused: MESSAGE``, ``crashed``, ``hung``, or ``failed`` with a traceback."""
        if self._process is None or not self._process.is_alive():
            context = mp.get_context("spawn")
            self._end, other = context.Pipe()
            self._process = context.Process(target=_work, args=(other,), daemon=True)
            self._process.start()
            other.close()
        self._end.send((door, str(path)))
        if not self._end.poll(SECONDS):
            self.close()
            return "hung"
        try:
            answer: str = self._end.recv()
        except EOFError:
            self._process.join()
            return f"crashed with exit code {self._process.exitcode}"
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _work(end: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        door, path = end.recv()
        try:
            result = hashlib.sha256(repr(DOORS[door](Path(path))).encode()).hexdigest()[:12]
            end.send(f"opened: {result}")
        except (ValueError, FileNotFoundError) as error:
            end.send(f"refused: {error}")
        except Exception:
            end.send(f"failed: {traceback.format_exc()}")


def _command(*arguments: object) -> str:
    """Return what a command prints; raise ValueError with its message if it fails with one."""
    from typer.testing import CliRunner

    from gecko.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exit_code == 2 and result.stderr.startswith("error: "):
        raise ValueError(result.stderr)
    if result.exit_code:
        raise RuntimeError(f"{result.stderr}\n{''.join(traceback.format_exception(result.exception))}")
    return result.stdout


_GREEDY = ("--tokenizer", "bytes", "--prompt", "a", "--temperature", 0, "-n", 2)


def _model(folder: Path) -> str:
    import gecko

    gecko.load(folder)  # most are refused here, which takes a tenth of the time of a command
    return _command("generate", folder, *_GREEDY)


def _llama(folder: Path) -> Any:
    from gecko.models import load_any

    return load_any(folder)(torch.arange(9)[None])


def _state(path: Path) -> str:
    """Continue a state with the model beside it, in the command and as the server opens it."""
    from gecko.serving.limits import ApiError
    from gecko.serving.stores import SavedStates
    from gecko.state import GeckoState

    with contextlib.suppress(ApiError):
        SavedStates(path.parent).load(path.stem)
    GeckoState.load(path)
    return _command("generate", path.with_name("model"), "--state", path, *_GREEDY)


def _shards(folder: Path) -> Any:
    """Read every row of the training documents, and all held-out ones, as a run does."""
    from gecko.data.tokenizers import load_tokenizer
    from gecko.data.training_data import DataRequest, open_training_data

    data = open_training_data(str(folder), (), load_tokenizer("bytes"), DataRequest(16, 0.4, 0))
    return [data.rows.row(index) for index in range(data.rows.rows_per_epoch)], data.held_out(100).digest()


def _checkpoint(folder: Path) -> Any:
    """Restore the checkpoint of a run as ``--resume`` does."""
    from gecko.io.checkpoints import verify_files
    from gecko.parallel.mesh import Ranks
    from gecko.train import Run
    from gecko.train.metrics import row_layout
    from gecko.train.model import starting_model
    from gecko.train.optimizer import build_optimizer
    from gecko.train.state import restore_snapshot
    from gecko.train.step import carried_state

    verify_files(folder)
    run = Run.load(folder / "recipe.json")
    row_layout(folder)
    model = starting_model(run, Ranks(), torch.device("cpu"), fresh=False)
    optimizer = build_optimizer(model, run.optimizer)
    carried = carried_state(run, model, Ranks())
    position = restore_snapshot(folder, model, optimizer, carried)
    return position, {name: x.sum().item() for name, x in model.state_dict().items()}


DOORS: dict[str, Callable[[Path], Any]] = {
    "model": _model, "llama": _llama, "state": _state, "shards": _shards, "checkpoint": _checkpoint,
}  # fmt: skip
