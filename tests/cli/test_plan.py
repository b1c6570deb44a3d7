"""``gecko plan``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., Any]
ALONE = "parallel.replicate=1", "parallel.shard=1", "parallel.context=1"


def test_the_paper_run_fits_and_every_line_is_explained(command: Command) -> None:
    result = command("plan", "gecko_7b", "--gpus", 256, "--gpu", "h100")
    assert result.exit_code == 0, result.stderr
    for text in ("Memory of one GPU", "80 GB: fits", "Compute, GFLOPs per token", "Bytes that one GPU sends",
                 "Time of a step", "days for 476,837 steps"):  # fmt: skip
        assert text in result.stdout
    cells = [line.split("│")[1:4] for line in result.stdout.splitlines() if line.startswith("│")]
    lines = {name.strip(): explained.strip() for name, _, explained in cells if name.strip() not in ("", "total")}
    assert len(lines) == 9 + 7 + 4
    assert all(lines.values())


def test_json_adds_up(command: Command) -> None:
    result = command("plan", "gecko_7b", "model.num_layers=2", "--gpus", 256, "--gpu", "h200", "--json")
    facts = json.loads(result.stdout)
    memory = facts["memory_bytes"]
    assert memory.pop("total") == sum(memory.values())
    assert facts["fits"] and facts["gpu"] == "H200 141 GB"
    assert set(facts["flops_per_token"]) == {"linear", "attention", "memory", "CEMA", "norms", "head", "recomputed"}
    assert round(facts["tokens_per_second"] * facts["seconds"]["step"]) == 4_194_304


def test_what_does_not_fit_says_so(command: Command) -> None:
    result = command("plan", "gecko_7b", *ALONE, "batch_size=1", "--gpus", 1, "--gpu", "a100")
    assert result.exit_code == 0
    assert "does not fit; try" in result.stdout


def test_without_kernels_only_what_is_exact_is_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.triton_kernels_installed", lambda: False)
    result = command("plan", "gecko_7b")
    assert "exact, but without activations" in result.stdout.replace("\n", " ")
    facts = json.loads(command("plan", "gecko_7b", "--json").stdout)
    assert facts["fits"] is None and not facts["measured"]
    assert set(facts["memory_bytes"]) == {"parameters", "gradients", "optimizer", "total"}


def test_a_plan_speaks_of_its_own_options_and_of_what_is_not_on(command: Command) -> None:
    result = command("plan", "gecko_7b", "--gpus", 8)
    assert result.exit_code == 2 and "torchrun" not in result.stderr and "--gpus" in result.stderr
    advised = command("plan", "gecko_7b", "--gpus", 1, *ALONE, "batch_size=2")
    assert "does not fit; try more GPUs or a larger" in advised.stdout
    assert "try activation_checkpointing=full" not in advised.stdout.replace("\n", " ")
