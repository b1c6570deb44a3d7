"""Where commands write: looked at before the work, and nothing but a file is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gecko.cli.output import output_file


def test_a_new_file_an_old_one_and_a_link_are_taken(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "target")
    for name in ("old", "link", "new/deep/file"):
        assert output_file(str(tmp_path / name)) == tmp_path / name
    # Where the file will be written.
    assert (tmp_path / "far").is_dir() and (tmp_path / "new" / "deep").is_dir()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "file").touch()
    wrong = ("/dev/null", tmp_path, tmp_path / "pipe", tmp_path / "link", tmp_path / "file" / "below")
    for path in map(str, wrong):
        with pytest.raises(ValueError, match=f"--out must be a file in a folder that can be .* got {path}. "):
            output_file(path)
    with pytest.raises(ValueError, match="--save-state must be a file"):
        output_file(str(tmp_path), "--save-state")
