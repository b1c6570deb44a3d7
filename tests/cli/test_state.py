"""``gecko state show`` and ``gecko state diff``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gecko
from gecko.inference import read

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def states(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of states: one text, and variations that differ from it in one way each."""
    folder = tmp_path_factory.mktemp("states")
    newest, older = (gecko.load(run_folder / "checkpoints" / f"step-0000000{step}") for step in (2, 1))
    tokens = torch.arange(1500) % 251
    state = read(newest, [tokens]).state
    state.save(folder / "text")
    state.save(folder / "again")
    state.save(folder / "compact", compact=True)
    read(newest, [tokens[:-1]]).state.save(folder / "shorter")
    read(older, [tokens]).state.save(folder / "older")
    dataclasses.replace(state, model=older.fingerprint()).save(folder / "relabelled")
    newest.empty_state().save(folder / "empty")
    gecko.GeckoState.stack([state, newest.empty_state()]).save(folder / "two")
    gecko.GeckoState.empty(gecko.GeckoConfig.preset("tiny")).save(folder / "tiny")
    return folder


def parts(output: str) -> dict[str, list[str]]:
    """Return the rows of the printed table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows if row[0]}


def test_show_says_what_was_read_and_by_whom(command: Command, states: Path) -> None:
    result = command("state", "show", states / "text")
    assert result.exit_code == 0, result.stderr
    state = gecko.GeckoState.load(states / "text")
    lines = {name: " ".join(result.stdout.split()).partition(name)[2] for name in ("weights", "position", "begins at")}
    assert lines["weights"].startswith(f" {state.model}")
    assert lines["position"].startswith(" 1,500 ")
    assert lines["begins at"].startswith(" 0 ")
    assert f"{state.num_bytes:,} bytes in memory, {(states / 'text').stat().st_size:,} in the file" in result.stdout
    assert "SHA-256" in result.stdout


def test_show_counts_every_byte_of_every_part(command: Command, states: Path) -> None:
    state = gecko.GeckoState.load(states / "text")
    table = parts(command("state", "show", states / "text").stdout)
    assert sum(int(row[1].replace(",", "")) for row in table.values() if row[1]) == state.num_bytes
    assert table["CEMA"][2] == "float32"
    assert parts(command("state", "show", states / "compact").stdout)["CEMA"][2] == "bfloat16"


def test_show_measures_what_is_there(command: Command, states: Path) -> None:
    """The log of an empty sum means 0 and does not count as a large number."""
    state = gecko.GeckoState.load(states / "text")
    moving = torch.cat([mixer.cema.flatten() for mixer in state.mixers])
    table = parts(command("state", "show", states / "text").stdout)
    assert float(table["CEMA"][3]) == pytest.approx(moving.square().mean().sqrt().item(), rel=1e-2)
    assert float(parts(command("state", "show", states / "empty").stdout)["working memory"][3]) == 0


def test_several_texts(command: Command, states: Path) -> None:
    assert "1,500, 0" in command("state", "show", states / "two").stdout


def test_diff_of_equal_states(command: Command, states: Path) -> None:
    result = command("state", "diff", states / "text", states / "again")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "equal"
    assert {row[0] for row in parts(result.stdout).values()} == {"none"}
    assert "model: the same" in result.stdout


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("compact", "model: the same"),
        ("shorter", "position: 1,500 and 1,499"),
        ("older", "model: other weights"),
        ("relabelled", "model: other weights"),
        ("tiny", "model: other architectures: num_layers 2 and 4"),
        ("two", "position: 1,500 and 1,500, 0"),
        ("empty", "position: 1,500 and 0"),
    ],
)
def test_diff_says_what_differs(command: Command, states: Path, other: str, message: str) -> None:
    for pair in ((states / "text", states / other), (states / other, states / "text")):
        result = command("state", "diff", *pair)
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1] == "not equal"
        if pair[0].name == "text":
            assert message in result.stdout


def test_diff_measures_each_part(command: Command, states: Path) -> None:
    a, b = (gecko.GeckoState.load(states / name) for name in ("text", "compact"))
    expected = torch.stack([x.cema - y.cema for x, y in zip(a.mixers, b.mixers, strict=True)]).norm()
    expected = expected / torch.stack([x.cema for x in a.mixers]).norm()
    table = parts(command("state", "diff", states / "text", states / "compact").stdout)
    assert float(table["CEMA"][0]) == pytest.approx(expected.item(), rel=1e-2)
    assert table["clock"] == table["timestep norms"] == ["none"]


def test_counts_do_not_hide_what_changed_beside_them(command: Command, states: Path, tmp_path: Path) -> None:
    state = gecko.GeckoState.load(states / "text")
    doubled = state.map(lambda x: 2 * x if x.is_floating_point() else x)
    doubled.save(tmp_path / "doubled")
    table = parts(command("state", "diff", states / "text", tmp_path / "doubled").stdout)
    assert table["timestep norms"] == table["CEMA"] == ["1"]
    assert table["clock"] == ["none"]


def test_files_that_are_no_sound_state(command: Command, states: Path, tmp_path: Path) -> None:
    damaged = bytearray((states / "text").read_bytes())
    damaged[-5] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    for arguments in (
        ("show", tmp_path / "damaged"),
        ("diff", states / "text", tmp_path / "damaged"),
        ("diff", tmp_path / "damaged", states / "text"),
    ):
        result = command("state", *arguments)
        assert result.exit_code == 2
        assert "damaged" in result.stderr
    assert "there is none" in command("state", "show", tmp_path / "gone").stderr
