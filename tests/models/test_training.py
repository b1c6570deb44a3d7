"""The trainer trains a Llama as it trains a Gecko; the run says which model it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.whole_runs import killed, same_end
from transformers import AutoModelForCausalLM

from gecko.config import GeckoConfig
from gecko.models import Llama, LlamaConfig, load_any, meta_model
from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.recipes import COMPARISON, apply_overrides, get_recipe
from gecko.train import ParallelSettings, Run, train
from gecko.train.metrics import read_metrics
from gecko.train.throughput import flops_per_token

GECKO = GeckoConfig(
    vocab_size=264, num_layers=1, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip
Runs = Callable[..., Run]


def losses(run: Run) -> list[tuple[str, int, float]]:
    return [(record["kind"], record["step"], record["loss"]) for record in read_metrics(run.folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("step", "changes"), [(1, {}), (7, {}), (4, {"model": LlamaConfig(264, 1, 32, 2, 32, tie_embedding=True)})], ids=str
)
def test_killed_and_resumed_is_uninterrupted(run_in: Runs, step: int, changes: dict[str, Any]) -> None:
    whole, stopped = (run_in(name, **changes) for name in ("whole", "stopped"))
    expected = train(whole)
    killed(step + 1, stopped)
    resumed = train(stopped, resume=True)
    assert losses(stopped) == losses(whole)
    assert same_end(resumed, expected)


@pytest.mark.usefixtures("pictures")
def test_a_run_learns_and_leaves_a_model_for_us_and_for_transformers(run_in: Runs) -> None:
    run = run_in("run")
    result = train(run)
    training = [loss for kind, _, loss in losses(run) if kind == "train"]
    assert training[-1] < training[0] - 1
    assert result.report is not None
    page = result.report.read_text(encoding="utf-8")
    assert "gecko train" in page and "Dotted" not in page and "gecko generate" not in page
    assert (run.folder / "sample.txt").read_text(encoding="utf-8").startswith("red ")
    assert Run.load(result.checkpoint / "recipe.json") == result.run
    model, tokens = load_any(result.checkpoint), torch.arange(20).unsqueeze(0)
    assert isinstance(model, Llama) and model.config == run.model
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_fine_tuning_starts_from_the_weights_of_its_kind(run_in: Runs) -> None:
    """And another kind of model is another run."""
    first = train(run_in("first"))
    again = train(run_in("again", init_from=str(first.run.folder), steps=1))
    assert first.evaluation is not None
    (start,) = [loss for kind, step, loss in losses(again.run) if (kind, step) == ("validation", 0)]
    (end,) = [loss for kind, step, loss in losses(first.run) if (kind, step) == ("validation", 12)]
    assert start == pytest.approx(end, rel=1e-6)
    for model, difference in ((GECKO, ".*key_dim"), (LlamaConfig(264, 2, 32, 4, 64), "ffn_dim")):
        with pytest.raises(ValueError, match=f"this run's architecture; .* differs in {difference}"):
            train(run_in("other", model=model, init_from=str(first.run.folder)))
    with pytest.raises(ValueError, match=r"^model.model_type must be .* trained with, 'llama'; got 'gecko'"):
        train(run_in("again", model=GECKO), resume=True)


@pytest.mark.parametrize("config", [GECKO, LlamaConfig(264, 2, 32, 4, 48)], ids=["gecko", "llama"])
def test_a_recipe_says_which_model_it_is_of(run_in: Runs, tmp_path: Path, config: Any) -> None:
    run = run_in("run", model=config)
    run.save(tmp_path / "recipe.json")
    assert Run.load(tmp_path / "recipe.json") == run
    changed = apply_overrides(run, ["model.num_layers=3", "model.rope_base=2e4"])
    assert changed.model == replace(config, num_layers=3, rope_base=2e4)
    with pytest.raises(ValueError, match="override must be one of"):
        apply_overrides(run, ["model.model_type=gecko"])


def test_older_recipes_are_of_gecko(run_in: Runs) -> None:
    values = run_in("run", model=GECKO).to_dict()
    assert values["model"].pop("model_type") == "gecko"
    assert Run.from_dict(json.loads(json.dumps(values))).model == GECKO
    with pytest.raises(ValueError, match=r"model.model_type must be one of gecko, llama; got 'lama'. Did you mean"):
        Run.from_dict({**values, "model": {"model_type": "lama"}})
    with pytest.raises(ValueError, match=r"field must be one of .*model\.[a-z_]+.*; got 'model.window'"):
        Run.from_dict({**values, "model": {**values["model"], "window": 2}})


def test_ranks_cannot_share_its_rows(run_in: Runs) -> None:
    with pytest.raises(ValueError, match=r"parallel.context must be 1 for a Llama.*got 2. Try parallel.shard"):
        run_in("run", parallel=ParallelSettings(context=2))


def test_flops_grow_with_the_row() -> None:
    """6 per number in a matrix, plus 12 per layer and feature for every key that is seen."""
    config = LlamaConfig.preset("llama-tiny")
    matrices = 995_712 - 264 * 128 - 11 * 128
    assert flops_per_token(config, 2048) == 6 * matrices + 12 * 5 * 128 * 1024


@pytest.mark.parametrize(("size", "parameters"), [("", 993_280), ("_4m", 3_756_032), ("_15m", 14_589_952)])
def test_comparison_needs_equal_runs_of_equal_size(size: str, parameters: int) -> None:
    """Everything except model, learning rate and folder is equal, and the numbers of parameters are within 2 %."""
    runs = {name: get_recipe(name) for name in COMPARISON if (re.findall(r"_\d+m$", name) or [""]) == [size]}
    first = runs[f"compare_gecko{size}"]
    assert {f"compare_{name}{size}" for name in ("gecko", "megalodon", "llama")} <= runs.keys()
    assert len({run.model for run in runs.values()}) == len(runs)
    for name, run in runs.items():
        rate = first.optimizer.learning_rate if size else run.optimizer.learning_rate  # tuned with a million
        optimizer = replace(run.optimizer, learning_rate=rate)
        assert replace(run, model=first.model, optimizer=optimizer, output="runs/one", recipe="") == replace(
            first, output="runs/one", recipe=""
        ), name
        assert run.output == f"runs/{name}"
        count = sum(parameter.numel() for parameter in meta_model(run.model).parameters())
        assert count == pytest.approx(parameters, rel=0.02), name
    assert first.steps is not None and first.steps * first.tokens_per_step == pytest.approx(10e6, rel=1e-3)


def test_attention_sees_at_most_as_many_keys_in_each() -> None:
    """Values are unit vectors, so the outputs are the attention weights."""
    queries, values = torch.zeros(1, 1, 512, 8), torch.eye(512)[None, None]
    fewest = {"compare_gecko": 65, "compare_chunk": 1, "compare_window": 128, "compare_megalodon": 1}
    for name, least in fewest.items():
        config = get_recipe(name).model
        assert isinstance(config, GeckoConfig)
        weights, _ = chunk_attention(queries, queries, values, Pattern(config.chunk_size, config.attention))
        seen = (weights[0, 0, 128:] > 0).sum(dim=1)
        assert (int(seen.min()), int(seen.max())) == (least, 128), name
