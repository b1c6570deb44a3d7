"""A training step of one block and the head: on a card, or on a device without numbers, launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gecko import Gecko
from gecko.config import GeckoConfig
from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch
from gecko.train.step import autocast

RUN = Launch.run
Visit = Callable[[Launch], None]


@dataclass(frozen=True)
class Step:
    """Loss and gradients of ``rows`` of ``length`` tokens, under autocast to bfloat16, in the widths of a preset."""

    preset: str
    length: int
    config: GeckoConfig | None = None
    """Of the preset, if it is not given."""
    rows: int = 1

    def __str__(self) -> str:
        return f"{self.preset}, {self.length:,} tokens"

    def prepare(self, device: torch.device) -> Callable[[], None]:
        """Return a function that makes the step. On a CPU, parameters are unwritten and take no space."""
        from kernels.recording import model_on_nothing

        config = replace(self.config or GeckoConfig.preset(self.preset), num_layers=1)
        torch.manual_seed(0)
        model = Gecko(config).to(device) if device.type == "cuda" else model_on_nothing(config)
        text = torch.randint(config.vocab_size, (self.rows, self.length + 1), device=device)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with autocast("bfloat16", device):
                loss = model.loss(text[:, :-1], text[:, 1:])
            loss.backward()  # outside, as in training: autocast would round products of gradients

        return step


def visit_launches(call: Callable[[], Any], device: torch.device, visit: Visit) -> None:
    """Make ``call`` with ``visit`` in the place of every launch. On a CPU, results are unwritten."""
    if device.type != "cuda":
        from kernels.recording import launches

        launches(call, visit)
        return
    # Dispatch modes, which count operations, must not change the way in which kernels are called.
    with (
        patch.object(Launch, "run", lambda launch: visit(launch)),
        patch.object(dispatch, "is_watched", lambda: False),
    ):
        call()


def execute_on(device: torch.device) -> Visit:
    """Return a function that runs a launch; on a CPU it does nothing."""
    return RUN if device.type == "cuda" else lambda _: None


def kernel_name(launch: Launch) -> str:
    """Return the operator's and the kernel's name."""
    return f"{launch.kernel.fn.__module__.removeprefix('gecko.ops.').partition('.')[0]}.{launch.kernel.__name__}"


class Copies:
    """Copies of tensors, so that a kernel that writes into them can run again. Autograd does not see that they are
    restored: it would take tensors that it keeps for changed ones."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._kept = [x.data for x in tensors], [x.data.clone() for x in tensors]

    @classmethod
    def of(cls, launch: Launch) -> Copies:
        return cls([x for x in launch.arguments.values() if isinstance(x, Tensor)])

    def restore(self) -> None:
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
