"""Models are saved to their own folders, never into a training run or over its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gecko
from gecko.io.files import whole_file

Command = Callable[..., Any]


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def _save_for_transformers(model: gecko.Gecko, folder: Path) -> None:
    pytest.importorskip("transformers")
    from gecko.hf import export

    export(model, folder)


@pytest.mark.parametrize("save", [gecko.Gecko.save, _save_for_transformers], ids=["save", "export"])
def test_neither_a_run_nor_a_checkpoint_is_saved_over(save: Callable[..., None], run: Path) -> None:
    model, before = gecko.load(_newest(run)), _files(run)
    for folder in (run, _newest(run)):
        with pytest.raises(FileExistsError, match=r"a model must be saved to a folder for itself.* Choose another"):
            save(model, folder)
    assert _files(run) == before


def test_a_model_is_saved_over_itself(run: Path, tmp_path: Path) -> None:
    model = gecko.load(_newest(run))
    for _ in range(2):
        model.save(tmp_path / "model")
    assert gecko.load(tmp_path / "model").config == model.config


def test_a_checkpoint_is_not_joined_into_a_run(command: Command, run: Path) -> None:
    before = _files(run)
    for out in (run, run / "model", _newest(run).with_name("step-00000001")):
        result = command("consolidate", run, "--out", out)
        assert result.exit_code == 2
        assert "--out must be a folder outside of training runs" in result.stderr
    assert command("consolidate", run, "--out", _newest(run)).exit_code == 0
    assert _files(run) == before


def test_a_release_is_not_converted_into_a_run(command: Command, run: Path, tmp_path: Path) -> None:
    before = _files(run)
    for out in (run, _newest(run), run / "new"):
        result = command("convert", tmp_path, out)
        assert result.exit_code == 2
        assert "OUT must be a folder outside of training runs" in result.stderr
    assert _files(run) == before


@pytest.mark.parametrize("existing", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("files", [0, 1])
@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "{run}", "{out}"), ("export", "{run}", "{out}"), ("consolidate", "{run}", "--out", "{out}"),
        ("average", "{run}", "--last", "2", "--out", "{out}"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_killed_command_leaves_nothing_in_the_way_of_the_same_command(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], files: int,
    existing: bool,
) -> None:  # fmt: skip
    """The process ends after some files, and removes nothing."""
    out = tmp_path / "models" / "out"
    out.mkdir(parents=True) if existing else out.parent.mkdir()
    arguments = [word.format(run=run, out=out) for word in words]
    written: list[Path] = []

    @contextmanager
    def killed_after_some(path: Path) -> Iterator[Path]:
        if len(written) == files:
            raise KeyboardInterrupt
        written.append(path)
        with whole_file(path) as temporary:
            yield temporary

    with monkeypatch.context() as patch:
        patch.setattr("gecko.io.model_folder.whole_file", killed_after_some)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        assert command(*arguments).exit_code != 0
    assert len(written) == files
    assert list(out.iterdir()) == [] if existing else not out.exists()
    result = command(*arguments)
    assert result.exit_code == 0, result.stderr
    assert list(out.parent.iterdir()) == [out]
    assert gecko.load(out).config == gecko.load(run).config
