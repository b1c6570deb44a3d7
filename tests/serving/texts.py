"""Requests to an engine, their events, and the result of each request alone."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gecko
from gecko.inference import Sampling
from gecko.inference.request import Event, Finished, PromptRead, Request, Token
from gecko.inference.scheduler import Engine


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(1000 * seed + length))


def request(prompt: Tensor | None = None, new: int = 5, sampling: Sampling | None = None, **more: Any) -> Request:
    return Request(text(10) if prompt is None else prompt, new, sampling or Sampling(0.0), more.pop("seed", 0), **more)


def alone(model: gecko.Gecko, asked: Request) -> gecko.inference.Generation:
    options = {name: getattr(asked.sampling, name) for name in Sampling.__dataclass_fields__}
    return gecko.generate(
        model, asked.prompt, max_new_tokens=asked.max_new_tokens, seed=asked.seed, stop_tokens=asked.stop_tokens,
        state=asked.state, **options,
    )  # fmt: skip


@dataclass
class Log:
    """Events of each request, by its id; fails if events are out of order."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)
    prompts: dict[int, PromptRead] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "nothing comes after the end"
            if isinstance(event, Finished):
                self.ends[event.request_id] = event
            elif isinstance(event, PromptRead):
                assert event.request_id not in self.tokens | self.prompts, "it comes once, before the first token"
                self.prompts[event.request_id] = event
            else:
                self.tokens.setdefault(event.request_id, []).append(event)

    def ids(self, request_id: int) -> list[int]:
        return [event.token for event in self.tokens.get(request_id, [])]


def run(engine: Engine, *requests: Request) -> tuple[list[int], Log]:
    ids, log = [engine.submit(asked) for asked in requests], Log()
    while not engine.idle:
        log.take(engine.step())
    assert (engine.active, engine.queued) == (0, 0)
    return ids, log
