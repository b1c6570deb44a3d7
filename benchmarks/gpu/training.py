"""A whole training step, eager or captured: tokens/s, MFU and memory of Gecko and of a Llama of equal size."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from gpu.timing import NO_ROOM, Bench, why
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.models import LanguageModel, LlamaConfig, ModelConfig, build_model, meta_model
from gecko.models.gecko import ActivationCheckpointing
from gecko.parallel.mesh import MeshSizes
from gecko.plan.memory import step_memory
from gecko.runtime import tensors
from gecko.train import Run
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import BatchPart, Precision, Step, compute_gradients
from gecko.train.throughput import flops_per_token

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes in the order in which they are tried: the first that fits is the fastest."""
LLAMA_HEAD = 64
LLAMA = "Llama, SDPA flash"
CAPTURED_STEP = "captured"
"""Form of a step whose forward and backward are one graph."""


@dataclass(frozen=True)
class Training:
    """Results of one model at one row length. Numbers are None if no mode fits."""

    model: str
    parameters: int
    length: int
    flops: float
    """FLOPs per token."""
    checkpointing: str = ""
    seconds: float | None = None
    peak: int | None = None
    """Largest memory in use on the card, in bytes."""
    rows: int = 1
    form: str = ""
    """"captured" if forward and backward are one graph, or what differs from the package's constants."""

    @property
    def speed(self) -> float | None:
        """Tokens/s."""
        return None if self.seconds is None else self.rows * self.length / self.seconds

    def utilisation(self, rate: float) -> float | None:
        """Return the model FLOP/s as a share of ``rate`` FLOP/s."""
        return None if self.speed is None else self.speed * self.flops / rate


def equal_llama(config: GeckoConfig) -> LlamaConfig:
    """Return a Llama as deep and as wide; a wider feed-forward layer (a multiple of 16) makes the parameters equal."""
    least = LlamaConfig(
        vocab_size=config.vocab_size, num_layers=config.num_layers, model_dim=config.model_dim,
        num_heads=max(1, config.model_dim // LLAMA_HEAD), ffn_dim=16, tie_embedding=config.tie_embedding,
    )  # fmt: skip
    spare = (count(config) - count(least)) / (3 * config.num_layers * config.model_dim)
    return dataclasses.replace(least, ffn_dim=16 + max(0, 16 * round(spare / 16)))


def count(config: ModelConfig) -> int:
    """Return the number of parameters, with tied ones counted once."""
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def train(name: str, config: ModelConfig, length: int, bench: Bench, rows: int = 1, form: str = "") -> Training:
    """Measure with the least recomputation that fits. Modes whose planned memory is too large are not tried."""
    nothing = Training(name, count(config), length, flops_per_token(config, length), rows=rows, form=form)
    reason = NO_ROOM
    for checkpointing in CHECKPOINTING:
        bytes_planned = planned(config, length, checkpointing, bench, rows)
        if bytes_planned > bench.memory:
            reason = f"does not fit ({bytes_planned / 1e9:.0f} GB planned, recomputing: {checkpointing})"
            continue
        bench.reset_peak()
        try:
            seconds = bench.seconds(Steps.of(config, rows, length, bench, checkpointing)).seconds
        except Exception as error:
            reason = why(error)
            if reason == NO_ROOM:
                continue
            return dataclasses.replace(nothing, checkpointing=reason)
        return dataclasses.replace(nothing, checkpointing=checkpointing, seconds=seconds, peak=bench.peak())
    return dataclasses.replace(nothing, checkpointing=reason)


def planned(config: ModelConfig, length: int, checkpointing: ActivationCheckpointing, bench: Bench, rows: int) -> int:
    """Return the bytes on one card that ``gecko plan`` measures."""
    precision: Precision = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
    run = Run(
        config, "runs/planned", batch_size=rows, sequence_length=length, steps=1, precision=precision,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    return sum(step_memory(run, MeshSizes())[0].values())


@dataclass
class Steps:
    """Training steps of one model on the same random rows."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    part: BatchPart
    precision: Precision

    @classmethod
    def of(
        cls, config: ModelConfig, rows: int, length: int, bench: Bench, checkpointing: ActivationCheckpointing
    ) -> Steps:
        torch.manual_seed(0)
        with bench.device:
            model = build_model(config)
        model.activation_checkpointing = checkpointing
        tokens = torch.randint(config.vocab_size, (rows, length + 1), device=bench.device)
        weight = torch.ones((), dtype=torch.float64, device=bench.device)
        part = BatchPart(tokens[:, :-1], tokens[:, 1:], torch.zeros((rows, length), dtype=torch.int64), weight)
        precision = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
        return cls(model, build_optimizer(model, OptimizerSettings()), part, precision)

    def __call__(self) -> None:
        """Make a whole step."""
        Step(self.model, self.optimizer, 1.0, self.precision).start([self.part], 1e-4).wait()

    def again(self) -> Steps:
        """Return the steps with a new optimizer, of the parameters that the model has now."""
        return dataclasses.replace(self, optimizer=build_optimizer(self.model, OptimizerSettings()))

    def gradients(self) -> Tensor:
        """Compute gradients in the place of the last ones, and return the loss."""
        self.model.zero_grad(set_to_none=False)
        return compute_gradients(self.model, [self.part], self.precision)

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def captured(steps: Steps, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that computes gradients by one graph of forward and backward, and returns the loss.

    What the host copies to the device, layouts of documents that do not change, is copied once before. On a CPU nothing
    is captured.
    """
    steps.gradients()  # allocates the gradients
    if device.type != "cuda":
        return steps.gradients
    with _copies_kept() as copies:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                copies.begin()
                steps.gradients()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        copies.begin(again=True)
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            loss = steps.gradients()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


class _Copies:
    """Copies to the device, in order; while a graph is captured, those of the last call are used again."""

    def __init__(self, copy: Callable[..., Tensor]) -> None:
        self._copy, self._kept, self._next, self._again = copy, list[Tensor](), 0, False

    def begin(self, again: bool = False) -> None:
        self._kept, self._next, self._again = self._kept if again else [], 0, again

    def __call__(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        if not self._again:
            self._kept.append(self._copy(tensor, device))
        self._next += 1
        return self._kept[self._next - 1]


@contextmanager
def _copies_kept() -> Iterator[_Copies]:
    copies = _Copies(tensors.to_device)
    modules = [x for name, x in list(sys.modules.items()) if name.startswith("gecko.") and hasattr(x, "to_device")]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "to_device", copies))
        yield copies
