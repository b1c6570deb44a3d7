"""The metrics file contains every step once, however often a run was resumed."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.train.metrics import MetricsWriter, read_metrics


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def write_steps(folder: Path, resumed_at: int | None, last: int) -> None:
    with MetricsWriter(folder, resumed_at) as metrics:
        for step in range((resumed_at or 0) + 1, last + 1):
            metrics.write("train", step, {"loss": 1.0 / step})


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove TensorBoard; this also shows that training works without it."""
    original = builtins.__import__

    def importing(name: str, *arguments: Any, **keywords: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", importing)


@settings(max_examples=30, deadline=None)
@given(sessions=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10), st.booleans()), max_size=5))
def test_every_step_once_in_order(
    sessions: list[tuple[int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sessions go back some steps, write some, and may be killed in the middle of a line."""
    folder = tmp_path_factory.mktemp("metrics")
    write_steps(folder, None, 15)
    write_steps(folder, None, 10)  # a new run starts a new file
    end = 10
    for back, more, killed in sessions:
        start = max(0, end - back)
        end = start + more
        write_steps(folder, start, end)
        assert steps(folder) == list(range(1, end + 1))
        if killed:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "tra')


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, None) as metrics:
        metrics.write("validation", 1, {"loss": float("nan"), "by_position": [1.0, float("inf")]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss"], record["by_position"]) == (None, [1.0, None])
