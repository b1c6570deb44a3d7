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
    result = command("plan", "gecko_7b", "--gpus", 8, "parallel.replicate=32")
    assert result.exit_code == 2 and "torchrun" not in result.stderr and "--gpus" in result.stderr
    kept = "gradient_accumulation_steps=1", "activation_checkpointing=full"
    advised = command("plan", "gecko_7b", "--gpus", 1, *ALONE, *kept, "batch_size=2").stdout
    advised = " ".join(advised.split())
    assert "short; try more GPUs or --gpu b200 or a larger gradient" in advised
    assert "try activation_checkpointing=full" not in advised and "gecko train" not in advised


def test_the_command_of_a_plan_trains_as_planned(command: Command) -> None:
    """A mesh is found; the printed settings are a recipe's, which give the same plan."""
    asked = "plan", "gecko_1b", "model.num_layers=3", "--gpus", 4, "--gpu", "a100", "--price", 2, "--json"
    result = command(*asked)
    found = json.loads(result.stdout)
    launch, settings = found["command"].split(" train gecko_1b ")
    assert launch == "torchrun --nproc-per-node 4 -m gecko" and found["fits"]
    again = json.loads(command("plan", "gecko_1b", *settings.split(), "--gpus", 4, "--gpu", "a100", "--json").stdout)
    assert {**again, "dollars": found["dollars"]} == found
    assert found["dollars"] == pytest.approx(2 * 24 * found["days"] * 4)


def test_what_is_short_is_said_if_nothing_fits(command: Command) -> None:
    result = command("plan", "gecko_7b", "--gpus", 1)
    said = result.stdout.replace("\n", " ")
    assert "169 GB of 80 GB: does not fit, 89.1 GB short; try more GPUs or --gpu b200" in said
    assert "gecko train" not in said and result.stderr.count("does not fit") == 2
