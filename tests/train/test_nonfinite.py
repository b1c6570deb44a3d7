"""The origin of a non-finite value is found, and its step is skipped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.whole_runs import curve, skip, stop_after
from torch import Tensor, nn

from gecko.train import NonFiniteError, Run, train
from gecko.train.health import find_nonfinite
from gecko.train.trainer import Trainer


class Bad(nn.Module):
    """Identity that adds a number, in the forward or in the backward pass."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.forward_extra, self.backward_extra = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight + self.forward_extra
        y.register_hook(lambda grad: grad + self.backward_extra)
        return y


def chain(**positions: Bad) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the modules Linear, a, Linear, b, Linear, and a function that computes loss and gradients."""
    torch.manual_seed(0)
    names: dict[str, nn.Module] = {"first": nn.Linear(4, 4), "a": Bad(), "middle": nn.Linear(4, 4), "b": Bad()}
    model = nn.Sequential()
    for name, module in {**names, **positions, "last": nn.Linear(4, 4)}.items():
        model.add_module(name, module)

    def compute() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    return model, compute


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_first_module_is_named(name: str, value: float) -> None:
    model, compute = chain(**{name: Bad(forward=value)})
    assert find_nonfinite(model, compute) == f"the output of {name} (Bad) is not finite"


def test_of_two_the_first_in_the_forward_pass_is_named() -> None:
    model, compute = chain(a=Bad(forward=float("inf")), b=Bad(forward=float("nan")))
    assert "output of a " in find_nonfinite(model, compute)


def test_a_gradient_is_named_by_its_parameter_in_backward_order() -> None:
    model, compute = chain(b=Bad(backward=float("nan")))
    assert find_nonfinite(model, compute) == "the gradient of b.weight is not finite"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_is_named_before_what_it_spoils() -> None:
    model, compute = chain()
    with torch.no_grad():
        model.get_parameter("middle.bias")[0] = float("nan")
    assert find_nonfinite(model, compute) == "the parameter middle.bias is not finite"


def test_a_loss_alone_is_named() -> None:
    model, compute = chain()
    assert "loss" in find_nonfinite(model, lambda: compute() * float("nan"))


def test_no_hook_stays_behind() -> None:
    model, compute = chain(a=Bad(forward=float("nan")))
    find_nonfinite(model, compute)
    hooks: list[Any] = [module._forward_hooks for module in model.modules()]
    assert not any(hooks)


def test_only_skips_in_a_row_count(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips before a checkpoint count too: the first session is stopped in step 4, which is skipped."""
    skip({1, 2, 4, 5, 6}, monkeypatch, "the cause")
    run = replace(small_run, max_skips=3)
    stop_after(4, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert train(run).step == 4
    with pytest.raises(NonFiniteError, match=r"steps 4 to 6 .*max_skips=3.*the cause"):
        train(run, resume=True)


def poison(model: Any, steps: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one module return NaN in the given steps."""
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        module = self.model.blocks[1].feed_forward.fc2  # type: ignore[union-attr]
        hook = module.register_forward_hook(lambda m, i, out: out * float("nan"))
        if self.next_step not in steps:
            hook.remove()
        original(self)
        hook.remove()

    monkeypatch.setattr(Trainer, "_step", stepping)


def test_a_non_finite_step_is_named_and_skipped(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(small_run, range(3, 5), monkeypatch)
    result = train(replace(small_run, max_skips=3))
    skipped = {record["step"]: record for record in curve(small_run) if "skipped" in record}
    assert list(skipped) == [3, 4]
    assert skipped[3]["loss"] is None
    assert "blocks.1.feed_forward.fc2" in skipped[3]["skipped"]
    assert result.finished
    assert all(torch.isfinite(tensor).all() for tensor in load_file(result.checkpoint / "model.safetensors").values())


def test_too_many_in_a_row_end_the_run_and_keep_the_checkpoint(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(small_run, range(6, 100), monkeypatch)
    with pytest.raises(NonFiniteError, match=r"steps 6 to 8 .*blocks\.1\.feed_forward\.fc2.*--resume"):
        train(replace(small_run, max_skips=3))
    assert [path.name for path in (small_run.folder / "checkpoints").iterdir()] == ["step-00000004"]
