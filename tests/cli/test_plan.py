"""``gecko plan``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Command = Callable[..., Any]
ALONE = "parallel.replicate=1", "parallel.shard=1", "parallel.context=1"


def test_json_adds_up(command: Command) -> None:
    result = command("plan", "gecko_7b", "model.num_layers=2", "--gpus", 256, "--gpu", "h200", "--json")
    facts = json.loads(result.stdout)
    memory = facts["memory_bytes"]
    assert memory.pop("total") == sum(memory.values())
    assert facts["fits"] and facts["gpu"] == "H200 141 GB"
    assert set(facts["flops_per_token"]) == {"linear", "attention", "memory", "CEMA", "norms", "head", "recomputed"}
    assert round(facts["tokens_per_second"] * facts["seconds"]["step"]) == 4_194_304


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
