"""What the memory holds: the reference forms, the task beyond the window, and a table that continues."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import capacity
import evidence
import pytest
import tables
import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.eval.synthetic import hits_by_distance
from gecko.ops.loss import IGNORED


def step_by_step(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, log_decay: Tensor) -> Tensor:
    """Write and read one token after the other."""
    state, found = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        key, decayed = k[:, :, t, :, None], log_decay[:, :, t, None, None].exp() * state
        error = v[:, :, t, None] - key.mT @ decayed
        state = decayed + strength[:, :, t, None, None] * key @ error
        found.append(q[:, :, t, None] @ state)
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("length", [5, 16, 50])
@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_the_delta_rule_of_chunks_is_that_of_single_tokens(length: int, decay: float) -> None:
    q, k, v = (torch.randn(2, 3, length, width) for width in (8, 8, 6))
    inputs = q, F.normalize(k, dim=-1), v, torch.rand(2, 3, length), -decay * torch.rand(2, 3, length)
    torch.testing.assert_close(capacity.delta_rule(*inputs), step_by_step(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pairs", [1, 2, *capacity.PAIRS])
def test_no_query_sees_its_pair_by_attention(pairs: int) -> None:
    batch = capacity.far_pairs(pairs, 4, 7)
    assert min(hits_by_distance(batch, batch.targets, capacity.CHUNK)) >= 2
    rows, places = (batch.targets != IGNORED).nonzero(as_tuple=True)
    sources = batch.sources[rows, places]
    assert len(rows) == 4 * pairs and torch.equal(batch.tokens[rows, sources], batch.targets[rows, places])
    assert torch.equal(batch.tokens[rows, sources - 1], batch.tokens[rows, places])


@pytest.mark.parametrize("name", capacity.FORMS)
@torch.no_grad()
def test_only_a_memory_knows_far_values(name: str) -> None:
    """With norms of single steps and a CEMA that adds nothing, a model without memory answers the same."""
    torch.manual_seed(0)
    form = capacity.FORMS[name]
    model = capacity.build(replace(form, model=lambda width: {**form.model(width), "norm": "rms"}), 16)
    batch = capacity.far_pairs(4, 1, 0)
    other = batch.tokens.clone()
    other[0, [1, 3, 5, 7]] = other[0, [3, 5, 7, 1]] - 1
    for block in model.blocks if model.config.local_mixing == "cema" else ():
        torch.nn.init.zeros_(block.mixer.cema.gamma)
    changed = (model(batch.tokens)[0] - model(other)[0])[batch.targets != IGNORED].abs().max().item()
    assert changed == 0 if name == capacity.NONE else changed > 1e-4


def test_a_table_continues(results: Path) -> None:
    cells = [capacity.Cell("linear", 4, 16, 0, rate, "tuning", 2) for rate in capacity.RATES]
    table = tables.Table("capacity.csv", capacity.COLUMNS)
    for cell, loss in zip(cells, ("nan", "1.5", "1.25", "1.3", "1.2", "2"), strict=True):
        assert not list(capacity.grid(["linear"], 2, range(1), tables.rows_of("capacity.csv"))), "rates are missing"
        table.add([(*cell.key, "0.5", loss, 2, "abcdefg", "a", "x")])
    (first, *rest) = capacity.grid(["linear"], 2, range(1), tables.rows_of("capacity.csv"))
    assert first == capacity.Cell("linear", 4, 16, 0, capacity.RATES[4], "test", 2) and len(rest) == 19
    for number, cell in enumerate([first, *rest]):
        table.add([(*cell.key, (0.1, 0.5, 0.95)[min(number, 2)], "1", 2, "abcdefg", "a", "x")])
    again = list(capacity.grid(["linear"], 2, capacity.SEEDS, tables.rows_of("capacity.csv")))
    assert [(cell.pairs, cell.width, cell.seed) for cell in again] == [(4, 32, n) for n in (1, 2, 3)], "only the edge"


def test_intervals_of_forms(results: Path) -> None:
    assert "Not run" in capacity.page() and capacity.difference("linear", capacity.PAPER) is None
    table = tables.Table("capacity.csv", capacity.COLUMNS)
    for form, more in ((capacity.PAPER, 0.3), ("linear", 0.0)):
        for seed in range(4):
            assert evidence.rules()[2].startswith("open"), "a cell with three seeds is not all"
            if form == "linear" and seed > 1:
                assert f"{(4 - seed) * 2} runs are missing |" in capacity.page(), "a part of the cells is not shown"
            if form == "linear" and seed == 1:
                assert evidence.rules()[1] == "seed 0 alone, mean recall of all 20 cells: adaptive 0.923, linear 0.905"
            for pairs in (4, 8) if seed else capacity.PAIRS:
                for width in (16,) if seed else capacity.WIDTHS:
                    chosen = (pairs, width) in ((4, 16), (8, 16))
                    lead = more * (1 if pairs == 4 else 0.2)
                    recall = 0.5 + lead + seed / 100 * (form == "linear") if chosen else 0.95
                    line = *capacity.Cell(form, pairs, width, seed, 1e-2).key, recall, 1, 9, "abcdefg", "a", "x"
                    table.add([line])
    # The mean of (8, 16) is 0.04, and the margin is in its interval.
    assert capacity.differing(capacity.PAPER, "linear") == ([(4, 16)], [])
    (middle, low, high), cells = capacity.difference("linear", capacity.PAPER) or ((0, 0, 0), 0)
    assert (middle, cells) == (pytest.approx(-0.16), 2) and low < middle < high, "seed 0 chooses, and does not answer"
    assert capacity.missing(capacity.PAPER, "linear") == 0 and evidence.rules()[2] == "holds"
    assert "| -0.160 [" in capacity.page() and ", 2 cells: 0 more, 1 less |" in capacity.page()


def test_the_command_trains_and_scores(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "WIDTHS", (16,))
    monkeypatch.setattr(capacity, "PAIRS", (4,))
    monkeypatch.setattr(capacity, "TEST_ROWS", 4)
    monkeypatch.setattr(sys, "argv", ["capacity.py", "--only", "DeltaNet", "--steps", "2", "--results", str(results)])
    for _ in range(2):
        capacity.main()
        splits = [row["split"] for row in tables.rows_of("capacity.csv")]
        number = splits.count("tuning")
        assert splits[: number + 1] == [*["tuning"] * number, "test"] and number in (5, 6)
