"""Under each attack of one client, /health answers in time and memory stays below docs/server_operations.md's bound.

Run them alone (``make test-attacks``): an attack uses all processors, and answers are timed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import gecko

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measuring import settled_numbers
from server_attacks import BOUND, LONGEST, attacks, server, watch

ANSWERS = {
    "1,000,000 special ids": {"left", "200"},
    "500,000 messages": {"400"},
    "50,000 unknown fields": {"400"},
    "echo of 200 KB": {"400"},
    "60 × 15 MB to /health": {"405"},
    "60 × 15 MB to /nothing": {"404"},
    "60 × 15 MB to /v1/completions": {"400", "503", "left"},
    "20 × 3.9 MB of text": {"200", "503", "left"},
    "5,000,000 ids in 15 MB": {"400"},
    "5,000,000 empty lists": {"400"},
    "lists nested": {"400"},
    "a number of": {"400"},
    "logit_bias": {"400"},
    "20 log-probabilities, n = 128": {"400"},
    "20 log-probabilities, n = 16, in chat": {"200", "left"},
    "65,536 ids": {"200", "left"},
    "100 streams": {"not read"},
    "100 answers": {"not read"},
    "10 bodies of 240,000 chunks": {"400", "closed"},
    "10 bodies of 60,000 chunks": {"400", "503", "left"},
    "10 bodies of 1,000 chunks with names": {"400", "503", "left"},
    "20 chats of a template that loops": {"400"},
}
"""Allowed responses, by the beginning of an attack's name."""


@pytest.fixture(scope="module")
def attacked(model: gecko.Gecko, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, int]]:
    """Yield a real server in a separate process; its model reads fast."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model.save(folder)
    with server(folder) as found:
        yield found


@pytest.mark.parametrize("name", ANSWERS)
def test_health_answers_and_memory_is_bounded(attacked: tuple[psutil.Process, int], name: str) -> None:
    process, port = attacked
    attack = next(attack for found, attack in attacks() if found.startswith(name))
    seen = watch(process, port, attack)
    settled_numbers(port, 60)
    if seen.slowest > LONGEST:
        # Other processes may use the processors for a moment; a server that blocks is slow every time.
        seen = watch(process, port, attack)
        settled_numbers(port, 60)
    assert not seen.failures
    assert seen.slowest <= LONGEST
    assert seen.growth <= BOUND
    assert seen.answers.keys() <= ANSWERS[name], seen.answers
