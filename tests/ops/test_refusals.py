"""Operators refuse inputs that do not fit, before a kernel reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cases
from torch import Tensor

from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention
from gecko.ops.feed_forward import feed_forward, swiglu
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.norms import group_layer_norm
from gecko.ops.projections import projections
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.short_convolution import short_convolution
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm
from gecko.ops.working_memory import WorkingMemoryState, working_memory
from gecko.segments import Segments

X, W, H = torch.zeros(1, 2, 12), torch.zeros(32, 12), torch.zeros(2, 2, 20, 16)


def _average(length: int, channels: int = 5, state: Tensor | None = None, **given: Any) -> None:
    coefficients = CEMACoefficients.from_parameters(*cases.CEMA.draw_parameters(torch.Generator()))
    cema(torch.zeros(2, length, channels), coefficients, state, **given)


def _norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, groups: int = 3, **given: Any) -> None:
    timestep_norm(x, weight, bias, Statistics(groups, (0.999, 0.9999), 1e-5), **given)


def _attention(k: Tensor = H, v: Tensor = H, chunk: int = 8, segments: Segments | None = None, **changed: Any) -> None:
    state = replace(AttentionState.empty(2, 2, chunk, 16, 16), **changed)
    chunk_attention(H, k, v, Pattern(8), state=state, segments=segments)


def _memory(k: Tensor = H, v: Tensor = H, batch: int = 2, segments: Segments | None = None, **changed: Any) -> None:
    state = WorkingMemoryState.empty("adaptive", batch, 2, 16, 16)
    if weight := changed.pop("previous_weight", None):
        changed["previous"] = replace(state.previous, weight=torch.zeros(weight))
    working_memory(H, k, v, 8, state=replace(state, **changed), segments=segments)


OF_ANOTHER_CALL = {"segments": Segments.build(1, 20)}
OTHER_SEGMENTS = "segments must be those of the call, 2 rows of 20 tokens; got 1 of 20"
NO_TOKENS = "a call must have at least one token per row; got 0"

REFUSED = [
    (lambda: _average(4, 6), "coefficients.input must have shape (6, 3); got (5, 3)"),
    (lambda: _average(4, state=torch.zeros(1, 5, 3, 2)), "state must have shape (2, 5, 3, 2); got (1, 5, 3, 2)"),
    (lambda: _average(4, skip=torch.ones(1)), "skip must have shape (5,); got (1,)"),
    (lambda: short_convolution(torch.zeros(1, 5, 3), torch.zeros(2, 4)), "taps must have shape (3, 4)"),
    (lambda: short_convolution(X, torch.zeros(12, 4), torch.zeros(1, 4, 12)), "state must have shape (1, 3, 12)"),
    (lambda: _norm(X, groups=5), "groups must divide the features of x; got 5 and 12"),
    (lambda: _norm(X, torch.zeros(11), torch.zeros(12)), "weight must have shape (12,); got (11,)"),
    (lambda: _norm(X, torch.zeros(12)), "weight and bias must both be given, or neither; got a weight only"),
    (lambda: _norm(X, state=TimestepNormState.empty(2, 3)), "state.mean must have shape (1, 3); got (2, 3)"),
    (
        lambda: group_layer_norm(X, None, torch.zeros(12), 3, 1e-3),
        "weight and bias must both be given, or neither; got a bias only",
    ),
    (lambda: _attention(k=H[:, :, 1:]), "k must have shape (2, 2, 20, 16); got (2, 2, 19, 16)"),
    (lambda: _attention(v=H[:, :1]), "v must have shape (2, 2, 20, 16); got (2, 1, 20, 16)"),
    (lambda: _attention(chunk=9), "state.keys must have shape (2, 2, 16, 16)"),
    (
        lambda: _attention(values=torch.zeros(2, 2, 16, 1)),
        "state.values must have shape (2, 2, 16, 16); got (2, 2, 16, 1)",
    ),
    (lambda: _memory(k=H[:, :, 1:]), "k must have shape (2, 2, 20, 16); got (2, 2, 19, 16)"),
    (lambda: _memory(v=H[:, :1]), "v must have shape"),
    (lambda: _memory(batch=1), "state.memory must have shape (2, 2, 16, 16); got (1, 2, 16, 16)"),
    (lambda: _memory(normaliser=torch.zeros(2, 2, 1)), "state.normaliser must have shape (2, 2, 16); got (2, 2, 1)"),
    (lambda: _memory(previous_weight=(2, 2, 1)), "state.previous.weight must have shape"),
    (lambda: projections(X, (W, W[:, :11]), (None, None)), "weights[1] must have shape (32, 12); got (32, 11)"),
    (lambda: projections(X, (W,), (torch.zeros(1),)), "biases[0] must have shape (32,); got (1,)"),
    (lambda: projections(X, (W,), (None,), torch.zeros(2, 32)), "onto must have shape (1, 2, 32); got (2, 32)"),
    (lambda: feed_forward(X, W, W, W, X), "down must have shape (12, 32); got (32, 12)"),
    (lambda: feed_forward(X, W, W, W.t(), X[:, :1]), "onto must have shape (1, 2, 12); got (1, 1, 12)"),
    (lambda: silu_by_head(X, 5), "heads must divide the features of x; got 5 and 12"),
    (lambda: gated(X.view(1, 3, 2, 4), X[..., :4], None), "gate must have shape (1, 2, 12); got (1, 2, 4)"),
    (lambda: gated(X.view(1, 3, 2, 4), X, X), "recalled must have shape (1, 3, 2, 4); got (1, 2, 12)"),
    (lambda: swiglu(X, X[:, :1]), "b must have shape (1, 2, 12); got (1, 1, 12)"),
    (lambda: qk_scale_shift(X, X[0], X[0], 5, 1e-3), "heads must divide the features of z; got 5 and 12"),
    (lambda: qk_scale_shift(X, X[0, :, :-1], X[0], 2, 1e-3), "scale must have shape (2, 12); got (2, 11)"),
    (lambda: qk_scale_shift(X, X[0], X[0, :1], 2, 1e-3), "offset must have shape (2, 12); got (1, 12)"),
    (lambda: _average(20, **OF_ANOTHER_CALL), OTHER_SEGMENTS),
    (lambda: _norm(torch.zeros(2, 20, 12), **OF_ANOTHER_CALL), OTHER_SEGMENTS),
    (lambda: _attention(**OF_ANOTHER_CALL), OTHER_SEGMENTS),
    (lambda: _memory(**OF_ANOTHER_CALL), OTHER_SEGMENTS),
    (lambda: _average(0), NO_TOKENS),
    (lambda: _norm(X[:, :0]), NO_TOKENS),
    (lambda: chunk_attention(*(H[:, :, :0],) * 3, Pattern(8)), NO_TOKENS),
    (lambda: working_memory(*(H[:, :, :0],) * 3, 8), NO_TOKENS),
    (lambda: short_convolution(X[:, :0], torch.zeros(12, 4)), NO_TOKENS),
    (lambda: Segments.build(2, 0, segment_ids=torch.zeros(2, 0, dtype=torch.int64)), NO_TOKENS),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
