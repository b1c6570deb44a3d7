"""lm-evaluation-harness as a client: ``lm_eval --model local-completions`` gets the model's own log-likelihoods."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from serving.sites import Site, alone, distributions, document, serving

import gecko
from gecko.data import Tokenizer
from gecko.hf import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from support.harness_tasks import ANSWERS, CHOICES, ROWS, TEXTS, evaluate, write_tasks


def likelihood(model: gecko.Gecko, before: str, text: str) -> tuple[float, bool]:
    ids, start = document(before + text), len(document(before))
    chances, wanted = distributions(model, ids)[start - 1 : -1], torch.tensor(ids[start:])
    return float(chances.gather(1, wanted[:, None]).sum()), bool((chances.argmax(-1) == wanted).all())


@pytest.mark.parametrize("ends", [False, True])
def test_likelihoods_of_choices(model: gecko.Gecko, tokenizer: Tokenizer, tmp_path: Path, ends: bool) -> None:
    """Also of a model that would end every text: the harness drops the last entry, that of the token after the text."""
    if ends:
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.head.weight[256] = 0.3
    tasks = write_tasks(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with serving(model, tokenizer, tmp_path / "model") as site:
        ask = partial(ask_harness, site, tmp_path, tasks)
        found = ask(CHOICES, 1 if ends else 5, num_concurrent=3 if ends else 1, add_bos_token=True)
        for row, answers in zip(ROWS, found, strict=True):
            for choice, ((value, greedy),) in zip(row["choices"], answers, strict=True):
                expected = likelihood(model, f"Q: {row['question']}\nA:", f" {choice}")
                assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
        if ends:
            return
        for row, (value,) in zip(ROWS, ask(TEXTS, 2), strict=True):
            assert value[0] == pytest.approx(likelihood(model, "", str(row["text"]))[0], abs=1e-4)
        for row, ((text,),) in zip(ROWS, ask(ANSWERS, 1, add_bos_token=True), strict=True):
            whole = alone(model, document(f"Q: {row['question']}\nA:"), 9, temperature=0)
            assert text == whole.partition("q")[0]


def ask_harness(site: Site, folder: Path, tasks: object, task: str, batch: int, **options: object) -> list:
    """Return what the harness got for each item, in order."""
    given = {"model": "small", "base_url": f"{site.url}/v1/completions", "tokenizer": str(folder), **options}
    return evaluate(task, tasks, "local-completions", given, batch).responses
