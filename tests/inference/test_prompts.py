"""Several prompts in one call of the model: each gets what it would get alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gecko
from gecko.inference import Sampling, read
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.prompts import MOST_TOGETHER
from gecko.inference.request import Finished, KeptStates, Request
from gecko.inference.scheduler import Engine


def ids(length: int, seed: int) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(seed))


def run(engine: Engine, prompts: list[Tensor], states: list[gecko.GeckoState | None]) -> list[KeptStates]:
    """Read the prompts, without an answer, and return the states that the engine keeps of them."""
    kept = [KeptStates() for _ in prompts]
    for prompt, state, keep in zip(prompts, states, kept, strict=True):
        engine.submit(Request(prompt, 0, Sampling(0.0), state=state, keep=keep))
    while not engine.idle:
        assert all(event.reason == "length" for event in engine.step() if isinstance(event, Finished))
    return kept


def check(
    model: gecko.Gecko, prompts: list[Tensor], states: list[gecko.GeckoState | None], kept: list[KeptStates]
) -> None:
    for prompt, before, keep in zip(prompts, states, kept, strict=True):
        alone = read(model, [prompt], before).state
        assert keep.prompt is not None
        for (name, own), same in zip(keep.prompt.tensors().items(), alone.tensors().values(), strict=True):
            torch.testing.assert_close(own, same, rtol=1e-4, atol=1e-4, msg=name)


def test_short_prompts_are_read_in_one_call(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    prompts = [ids(length, length) for length in (30, 25, 28, 31)]
    kept = run(Engine(model, rows=4), prompts, [None] * 4)
    assert calls == [(4, 31)]
    check(model, prompts, [None] * 4, kept)


def test_prompts_after_states_at_different_positions(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    states = [read(model, [ids(length, 50)]).state if length else None for length in (5, 0, 16, 40)]
    calls.clear()
    prompts = [ids(length, length) for length in (20, 22, 24, 19)]
    kept = run(Engine(model, rows=4), prompts, states)
    assert calls == [(4, 24)]
    check(model, prompts, states, kept)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10] * (MOST_TOGETHER + 2), [(MOST_TOGETHER, 10), (2, 10)]),
        ([10, 11, 60], [(2, 11), (1, 60)]),  # padding would be more than reading
        ([3000, 2000, 100], [(1, 100), (1, 2000), (1, 3000)]),  # beyond the tokens of a call
    ],
)
def test_which_prompts_are_read_together(
    model: gecko.Gecko, calls: list[tuple[int, int]], lengths: list[int], expected: list[tuple[int, int]]
) -> None:
    run(Engine(model, rows=32), [ids(length, i) for i, length in enumerate(lengths)], [None] * len(lengths))
    assert calls == expected


def test_a_common_beginning_is_read_once(model: gecko.Gecko, calls: list[tuple[int, int]]) -> None:
    shared = ids(40, 0)
    prompts = [torch.cat([shared, ids(4, seed)]) for seed in (1, 2)]
    engine = Engine(model, rows=2, prefix_cache=PrefixCache(1 << 24))
    run(engine, [torch.cat([shared, ids(4, 3)])], [None])
    calls.clear()
    kept = run(engine, prompts, [None] * 2)
    assert sorted(calls) == [(1, 4), (1, 4), (1, 40)]
    check(model, prompts, [None] * 2, kept)


def test_a_prompt_that_fails_fails_alone(model: gecko.Gecko, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = model.hidden

    def failing(tokens: Tensor, **more: object) -> object:
        if (tokens == 7).all(1).any():
            raise RuntimeError("broken")
        return hidden(tokens, **more)

    monkeypatch.setattr(model, "hidden", failing)
    engine = Engine(model, rows=3)
    wanted = [ids(9, 1), torch.full((9,), 7), ids(9, 2)]
    names = [engine.submit(Request(prompt, 2, Sampling(0.0))) for prompt in wanted]
    ends: dict[int, str] = {}
    while not engine.idle:
        ends |= {event.request_id: event.reason for event in engine.step() if isinstance(event, Finished)}
    assert [ends[name] for name in names] == ["length", "error", "length"]
