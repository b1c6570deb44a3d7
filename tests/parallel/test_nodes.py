"""Four nodes with a network between them, one of which is lost: the job continues on the others and a new one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from node_loss import CASES, STEPS, lose_a_node, why_not


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_lost_node_is_replaced_and_no_finished_step_is_lost(tmp_path: Path) -> None:
    """Its network is gone before its processes are, so that its connections stay open, as without power."""
    outcome = lose_a_node(CASES["no-power"], tmp_path)
    assert STEPS // 2 <= outcome.finished <= outcome.resumed + 1
    assert outcome.difference < 1e-5
