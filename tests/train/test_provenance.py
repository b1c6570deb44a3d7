"""A run remembers which code and machine each of its sessions had."""

from __future__ import annotations

from gecko.model import Gecko
from gecko.train import Run, train
from gecko.train.provenance import SESSIONS, read_sessions
from gecko.version import code_version


def test_every_session_leaves_a_line(small_run: Run) -> None:
    assert read_sessions(small_run.folder) == []
    train(small_run)
    train(small_run, resume=True)
    first, second = read_sessions(small_run.folder)
    assert (first["step"], second["step"]) == (0, small_run.steps)
    for line in (first, second):
        assert {"version": line["version"], "commit": line["commit"]} == code_version()
        assert line["parameters"] == sum(p.numel() for p in Gecko(small_run.model).parameters())
        assert "PyTorch" in line["hardware"]["Software"]


def test_a_new_run_starts_a_new_file(small_run: Run) -> None:
    small_run.folder.mkdir()
    (small_run.folder / SESSIONS).write_text('{"step": 0}\n')
    train(small_run)
    assert [line["step"] for line in read_sessions(small_run.folder)] == [0]
    assert "version" in read_sessions(small_run.folder)[0]
