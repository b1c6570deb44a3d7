"""lm-evaluation-harness as a client: ``lm_eval --model local-completions`` gets the model's own log-likelihoods."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from serving.conftest import StartServer
from serving.sites import alone, distributions, document, serving

import gecko
from gecko.data import Tokenizer
from gecko.hf import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from support.harness_tasks import ANSWERS, CHOICES, ROWS, TEXTS, write_tasks
from support.harness_tasks import evaluate as evaluate_task

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder


def evaluate(url: str, tasks: TaskManager, task: str, tokenizer: Path, batch: int, **options: Any) -> list[Any]:
    """Return what the harness got for each item, in order."""
    given = {"model": "small", "base_url": f"{url}/v1/completions", "tokenizer": str(tokenizer), **options}
    return evaluate_task(task, tasks, "local-completions", given, batch).responses


def likelihood(model: gecko.Gecko, before: str, text: str) -> tuple[float, bool]:
    ids = document(before + text)
    start = len(document(before))
    chances, wanted = distributions(model, ids)[start - 1 : -1], torch.tensor(ids[start:])
    return float(chances.gather(1, wanted[:, None]).sum()), bool((chances.argmax(-1) == wanted).all())


@pytest.mark.parametrize(("batch", "concurrent"), [(5, 1), (1, 3)])
@pytest.mark.parametrize("ends", [False, True])
def test_likelihoods_of_choices(
    model: gecko.Gecko, tokenizer: Tokenizer, tasks: TaskManager, tokenizer_folder: Path, tmp_path: Path,
    batch: int, concurrent: int, ends: bool,
) -> None:  # fmt: skip
    """Also of a model that would end every text: the harness drops the last entry, that of the token after the text."""
    if ends:
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.head.weight[256] = 0.3
    with serving(model, tokenizer, tmp_path) as site:
        found = evaluate(
            site.url, tasks, CHOICES, tokenizer_folder, batch, num_concurrent=concurrent, add_bos_token=True
        )
    for row, answers in zip(ROWS, found, strict=True):
        for choice, ((value, greedy),) in zip(row["choices"], answers, strict=True):
            expected = likelihood(model, f"Q: {row['question']}\nA:", f" {choice}")
            assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_likelihoods_of_whole_texts_and_answers(
    start: StartServer, model: gecko.Gecko, tasks: TaskManager, tokenizer_folder: Path
) -> None:
    site = start()
    found = evaluate(site.url, tasks, TEXTS, tokenizer_folder, 2)
    for row, (value,) in zip(ROWS, found, strict=True):
        assert value[0] == pytest.approx(likelihood(model, "", str(row["text"]))[0], abs=1e-4)
    written = evaluate(site.url, tasks, ANSWERS, tokenizer_folder, 1, add_bos_token=True)
    for row, ((text,),) in zip(ROWS, written, strict=True):
        whole = alone(model, document(f"Q: {row['question']}\nA:"), 9, temperature=0)
        assert text == whole.partition("q")[0]
