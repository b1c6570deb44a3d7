"""Operators of ``cases.py`` that move their inputs to a device and the results back."""

import dataclasses
from typing import Any

import torch
from support.cases import Form, Operator, map_state
from torch import Tensor

from gecko.segments import Segments


def on_device(operator: Operator, device: torch.device) -> Operator:
    """Return the operator with its fast form on ``device``; inputs, outputs and gradients are on the CPU."""
    return dataclasses.replace(operator, fast=_taken(operator.fast, device))


def _taken(form: Form, device: torch.device) -> Form:
    def fast(parameters: list[Tensor], inputs: list[Tensor], state: Any, segments: Segments) -> tuple[Tensor, Any]:
        there = dataclasses.replace(segments, device=device, _shared={})
        given = [[x.to(device) for x in some] for some in (parameters, inputs)]
        output, after = form(*given, map_state(state, lambda x: x.to(device)), there)
        assert output.device.type == device.type
        return output.cpu(), map_state(after, lambda x: x.cpu())

    return fast
