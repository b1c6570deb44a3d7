"""Tensor parallelism: ranks that each compute some heads, channels and features give the whole model's results."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import cases
from support.cases import tokens
from torch import Tensor

import gecko
from gecko.parallel.sharding import TensorParallel, sharded_model, sharded_state, sharded_weight


class Ranks:
    """Ranks as threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def run(self, work: Callable[[TensorParallel], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: work(self._rank(rank)), range(self.size)))

    def _rank(self, rank: int) -> TensorParallel:
        def exchange(tensor: Tensor) -> list[Tensor]:
            self._given[rank] = tensor.clone()
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        return TensorParallel(
            rank, self.size, lambda x: torch.stack(exchange(x)).sum(0), lambda x: torch.cat(exchange(x), dim=-1)
        )


def part(whole: gecko.Gecko, ranks: TensorParallel) -> gecko.Gecko:
    """Return a rank's part of a model, with its weights."""
    model = sharded_model(whole.config, ranks).to(whole.embedding.weight.dtype)
    weights = {name: sharded_weight(name, weight, ranks).clone() for name, weight in whole.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    return model


@pytest.mark.parametrize("variant", cases.PAPER_VARIANTS)
def test_ranks_together_are_the_whole_model(variant):
    whole, text = cases.model(variant), tokens(2, 45)

    @torch.inference_mode()
    def read(ranks: TensorParallel) -> tuple[Tensor, Tensor, gecko.GeckoState]:
        model = part(whole, ranks)
        first, state = model(text[:, :30])
        second, state = model(text[:, 30:44], state=state)
        last, state = model.step(text[:, 44], state)
        return torch.cat([first, second], 1), last, state

    with torch.inference_mode():
        expected, after = whole(text[:, :44])
        step, after = whole.step(text[:, 44], after)
    for logits, last, state in Ranks(2).run(read):
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(last, step)
        assert state.num_bytes < after.num_bytes


def test_the_state_of_a_rank_has_its_heads_and_channels():
    ranks = TensorParallel(1, 2, lambda x: x, lambda x: x)
    model = sharded_model(cases.SMALL, ranks)
    blank = sharded_state(gecko.GeckoState.empty(model.config), ranks)
    whole = gecko.GeckoState.empty(cases.SMALL)
    assert blank.mixers[0].cema.shape[1] * 2 == whole.mixers[0].cema.shape[1]
    assert blank.mixers[0].attention.keys.shape[1] * 2 == whole.mixers[0].attention.keys.shape[1]
    assert blank.mixers[0].norm.mean.shape == whole.mixers[0].norm.mean.shape


def test_ranks_that_cannot_divide_a_model_are_refused():
    with pytest.raises(ValueError, match=r"num_heads.*3 ranks. Try "):
        sharded_model(cases.SMALL, TensorParallel(0, 3, lambda x: x, lambda x: x))
