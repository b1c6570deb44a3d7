"""lm-evaluation-harness through transformers gives the numbers of ``gecko eval``, without settings."""

import pytest
import torch
from hf.conftest import text_model

import gecko
from gecko.data import ByteTokenizer
from gecko.hf import byte_tokenizer

pytest.importorskip("lm_eval", reason="pip install 'gecko-lm[eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from gecko.eval.academic import HarnessModel
from gecko.eval.scored_model import GeckoModel

LONG = "a text that is longer than the harness takes by default. " * 45
PAIRS = [("def f", "(x):"), ("", "import os"), (LONG, " the end"), ("question: 1 + 1? ", "answer: 2"), ("a\n", " b")]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = text_model()
    with torch.no_grad():
        model.head.weight.mul_(8)  # so that answers differ in more than the fourth digit
    model.save(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return HarnessModel(GeckoModel(gecko.load(folder), ByteTokenizer(), "model"))


def theirs(folder, **options):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", **options)


def close(found: list[float], expected: list[float]) -> None:
    """The harness adds up in float32, so thousands of nats may differ in the seventh digit."""
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_answers(rows, folder, ours):
    model = theirs(folder, batch_size=rows)
    assert model.max_length > 10**9 and len(LONG) > 2048
    found, expected = (each.loglikelihood(requests("loglikelihood", PAIRS)) for each in (model, ours))
    close([score for score, _ in found], [score for score, _ in expected])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_whole_texts(folder, ours):
    """Here the harness adds the start token itself, so the tokenizer must not."""
    texts = requests("loglikelihood_rolling", [(LONG,), ("def f(x):",), ("a",)])
    close(theirs(folder, add_bos_token=False).loglikelihood_rolling(texts), ours.loglikelihood_rolling(texts))


def test_continuations(folder, ours):
    settings = {"until": ["\n\n"], "max_gen_toks": 8}
    asked = requests("generate_until", [("def f", settings), ("a longer prompt", settings)])
    assert theirs(folder, batch_size=2).generate_until(asked) == ours.generate_until(asked)
