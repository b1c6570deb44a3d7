"""A job of four nodes, with a network between them, that loses one: a new node joins, and training continues."""

import sys
from pathlib import Path

import pytest
from support.whole_runs import plain_report

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from node_loss import CASES, lose_a_node, why_not

STEPS = 20


def test_a_killed_node_is_replaced_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the step that ranks had not all finished is computed again."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr("gecko.train.finish.write_report", plain_report)
    outcome = lose_a_node(CASES["replaced"], tmp_path, STEPS, undisturbed=1)
    assert STEPS // 2 < outcome.finished <= outcome.resumed + 1
    assert outcome.difference < 1e-5
