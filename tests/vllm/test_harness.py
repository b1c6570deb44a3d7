"""lm-evaluation-harness gets the same numbers from ``gecko eval``, transformers, vLLM and our server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from serving.sites import serving
from support.harness_tasks import ANSWERS, CHOICES, ROWS, TEXTS, Evaluated, evaluate, write_tasks

import gecko
from gecko.data import ByteTokenizer
from gecko.eval.academic import HarnessModel
from gecko.eval.scored_model import GeckoModel
from gecko.hf import byte_tokenizer, export

Run = Callable[..., Evaluated]


@pytest.fixture(scope="module")
def model() -> gecko.Gecko:
    """Return a model whose answers differ in more than the fourth digit, in letters only."""
    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", chunk_size=16))
    with torch.no_grad():
        model.head.weight.mul_(8)
        model.final_norm.bias.fill_(1)
        model.head.weight[:97], model.head.weight[123:] = -0.2, -0.2
    return model


@pytest.fixture(scope="module")
def folder(model: gecko.Gecko, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "gecko-tiny"
    export(model, folder, byte_tokenizer())
    return folder


@pytest.fixture(scope="module")
def ways(model: gecko.Gecko, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Return how to run a task in each way, as a user would; ``add_bos_token`` is an argument of all but the first."""
    tasks = write_tasks(tmp_path_factory.mktemp("tasks"))
    ours = HarnessModel(GeckoModel(model, ByteTokenizer(), "model"))
    settings = {"enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8}

    @cache
    def made(kind: str, **more: Any) -> LM:
        return get_model(kind)(pretrained=str(folder), dtype="float32", batch_size=3, **more)

    with serving(model, ByteTokenizer(), tmp_path_factory.mktemp("states")) as site:
        address = {"model": "small", "base_url": f"{site.url}/v1/completions", "tokenizer": str(folder)}
        yield {
            "gecko eval": lambda task, **_: evaluate(task, tasks, ours),
            "hf": lambda task, **more: evaluate(task, tasks, made("hf", device="cpu", **more), batch=3),
            "vllm": lambda task, **more: evaluate(task, tasks, made("vllm", **settings, **more), batch=3),
            "server": lambda task, **more: evaluate(task, tasks, "local-completions", {**address, **more}, 3),
        }


def test_choices(ways):
    """Log-likelihoods, greedy or not, and the accuracy. The API client adds no start token unless it is told to.
    ``pytest -s`` shows the table of the documentation."""
    found = {name: run(CHOICES, **({"add_bos_token": True} if name == "server" else {})) for name, run in ways.items()}
    ours = found["gecko eval"]
    show(found)
    assert len(ours.responses) == len(ROWS)
    for name, other in found.items():
        assert other.metric == ours.metric, name
        for answers, expected in zip(other.responses, ours.responses, strict=True):
            for ((value, greedy),), ((wanted, wanted_greedy),) in zip(answers, expected, strict=True):
                assert (value, greedy) == (pytest.approx(wanted, abs=1e-4), wanted_greedy), name


def show(found: Mapping[str, Evaluated]) -> None:
    """Print the accuracy of each way, and its log-likelihoods beside those of ``gecko eval``."""
    numbers = {
        name: torch.tensor([[value for ((value, _),) in row] for row in one.responses], dtype=torch.float64)
        for name, one in found.items()
    }
    sys.stdout.write("\n| way | accuracy | sum of log-likelihoods | largest difference |\n|---|---:|---:|---:|\n")
    for name, one in found.items():
        apart = float((numbers[name] - numbers["gecko eval"]).abs().max())
        sys.stdout.write(f"| {name} | {one.metric:.2f} | {float(numbers[name].sum()):.4f} | {apart:.1e} |\n")


def test_whole_texts(ways):
    """Here the harness adds the start token itself, so the tokenizer must not; the API client never adds it. The
    harness adds up in float32, so sums above 100 nats may differ in the seventh digit."""
    ours = ways["gecko eval"](TEXTS)
    for name, run in ways.items():
        found = run(TEXTS, **({"add_bos_token": False} if name in ("hf", "vllm") else {}))
        for (value,), (wanted,) in zip(found.responses, ours.responses, strict=True):
            assert _number(value) == pytest.approx(_number(wanted), rel=1e-6, abs=1e-4), name


def test_answers(ways):
    found = {name: run(ANSWERS, **({"add_bos_token": True} if name == "server" else {})) for name, run in ways.items()}
    assert all(answer for ((answer,),) in found["gecko eval"].responses)
    for name, other in found.items():
        assert other.responses == found["gecko eval"].responses, name


def _number(value: Any) -> float:
    """Return a log-likelihood, which some models of the harness wrap in a tuple."""
    return float(value[0] if isinstance(value, tuple | list) else value)
