"""A small random model with the interface of evaluations, and one that answers by rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gecko
from gecko.data import ByteTokenizer, load_tokenizer
from gecko.eval import GeckoModel
from gecko.eval.scored_model import Text, open_texts

CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip
CUMULATIVE = dataclasses.replace(
    CONFIG, attention="chunk", memory="none", timestep_betas=None, cema_skip="learned", two_hop_residual=True
)


def random_model(config: gecko.GeckoConfig, dtype: torch.dtype = torch.float64) -> gecko.Gecko:
    torch.manual_seed(0)
    model = gecko.Gecko(config)
    with torch.no_grad():
        model.head.weight.mul_(4)
    return model.to(dtype)


@pytest.fixture(scope="session")
def model() -> GeckoModel:
    return GeckoModel(random_model(CONFIG), load_tokenizer("bytes"), "random")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that opens files with the given contents as texts."""

    def make(*contents: bytes, joined: bool = False) -> list[Text]:
        for number, content in enumerate(contents):
            (tmp_path / f"{number}.txt").write_bytes(content)
        return open_texts([str(tmp_path / f"{number}.txt") for number in range(len(contents))], joined=joined)

    return make


class RuleModel:
    """A ``ScoredModel`` without weights: ``loss`` maps (position, token) to a loss, ``answer`` a prompt to a text."""

    tokenizer = ByteTokenizer()

    def __init__(self, loss: Any = None, answer: Any = None) -> None:
        self._loss, self._answer = loss, answer
        self.read_texts: list[str] = []

    def losses(self, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
        position = -1
        for part in tokens:
            found = [self._loss(position + i, int(token)) for i, token in enumerate(part) if position + i >= 0]
            position += len(part)
            yield torch.tensor(found, dtype=torch.float64)

    def read(self, tokens: Tensor, after: str | None = None) -> str:
        self.read_texts.append(self.tokenizer.decode(tokens.tolist()))
        return (after or "") + self.read_texts[-1]

    def write(self, after: str, max_new_tokens: int, stops: Sequence[str] = ()) -> str:
        text = self._answer(after)
        for stop in stops:
            text = text.partition(stop)[0]
        return text.encode()[:max_new_tokens].decode()


@pytest.fixture(scope="session")
def rule_model() -> type[RuleModel]:
    return RuleModel


@pytest.fixture(scope="session")
def cumulative() -> gecko.Gecko:
    return random_model(CUMULATIVE)
