"""One optimizer step: gradient accumulation, clipping, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import BYTE_MODEL
from torch import Tensor

from gecko.data import IGNORED, Batch
from gecko.models.gecko import Gecko
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import compute_gradients, split_batch, start_step

CPU = torch.device("cpu")


def random_batch(seed: int, rows: int = 6, length: int = 19, ignored: float = 0.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, BYTE_MODEL.vocab_size, (rows, length + 1), generator=generator)
    segments = (torch.rand(rows, length, generator=generator) < 0.1).cumsum(dim=1)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(rows, length, generator=generator) < ignored] = IGNORED
    targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = IGNORED
    return Batch(tokens[:, :-1], targets, segments)


def gradients(model: Gecko, batch: Batch, parts: int) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = compute_gradients(model, split_batch(batch, parts, CPU), "float32")
    return loss, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.sampled_from([2, 3, 6]), ignored=st.floats(0, 0.97))
def test_a_batch_in_parts_is_the_batch(seed: int, parts: int, ignored: float) -> None:
    """Also if the parts have very different numbers of targets."""
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL).double()
    batch = random_batch(seed, ignored=ignored)
    if not batch.scored_tokens:
        return
    loss, whole = gradients(model, batch, 1)
    loss_in_parts, in_parts = gradients(model, batch, parts)
    # The sum of the parts' losses is float32.
    torch.testing.assert_close(loss_in_parts, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=1e-8)


def test_a_batch_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one target"):
        split_batch(random_batch(0, ignored=1.1), 2, CPU)


def step_of(model: Gecko, **changes: Any) -> Any:
    optimizer = build_optimizer(model, OptimizerSettings())
    arguments = {"learning_rate": 1e-3, "clip": 1.0, "precision": "float32", **changes}
    return start_step(model, optimizer, split_batch(random_batch(1), 1, CPU), **arguments).wait()


def test_gradients_are_clipped_to_the_norm() -> None:
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL)
    assert step_of(model, clip=0.01).grad_norm > 0.01
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert norms.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_bfloat16_keeps_parameters_gradients_and_loss_in_float32() -> None:
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL)
    seen = set()
    model.blocks[0].mixer.to_value.register_forward_hook(lambda m, i, out: seen.add(out.dtype))  # type: ignore
    exact = step_of(Gecko(BYTE_MODEL).requires_grad_(True))
    rounded = step_of(model, precision="bfloat16")
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)


def test_activation_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL)
    _, kept = gradients(model, random_batch(2), 1)
    model.activation_checkpointing = "full"
    _, recomputed = gradients(model, random_batch(2), 1)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
