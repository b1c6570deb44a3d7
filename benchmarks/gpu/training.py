"""Training steps of Gecko and of a Llama of equal size: tokens/s, MFU and memory, and what must not change them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu.record import Row, noted
from gpu.timing import NO_ROOM, Bench, why
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gecko.config import GeckoConfig
from gecko.models import LanguageModel, LlamaConfig, ModelConfig, meta_model
from gecko.models.gecko import ActivationCheckpointing
from gecko.parallel.sharding import shard_model
from gecko.runtime.tensors import to_device
from gecko.train.model import compile_block
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import BatchPart, Step, compute_gradients
from gecko.train.throughput import flops_per_token

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes in the order in which they are tried: the first that fits is the fastest."""
LLAMA_HEAD = 64
LLAMA = "Llama, SDPA flash"
CAPTURED_STEP = "captured"
"""Form of a step whose forward and backward are one graph."""
Gradients = Callable[[], Tensor]
"""Computes gradients in the place of the last ones, and returns the loss."""


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


@dataclass
class Steps:
    """Training steps of one model on the same random rows."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    part: BatchPart

    @classmethod
    def of(
        cls, config: ModelConfig, rows: int, length: int, bench: Bench, checkpointing: ActivationCheckpointing = "none"
    ) -> Steps:
        model = bench.model(config)
        model.activation_checkpointing = checkpointing
        tokens = torch.randint(config.vocab_size, (rows, length + 1), device=bench.device)
        weight = torch.ones((), dtype=torch.float64, device=bench.device)
        part = BatchPart(tokens[:, :-1], tokens[:, 1:], torch.zeros((rows, length), dtype=torch.int64), weight)
        return cls(model, build_optimizer(model, OptimizerSettings()), part)

    def __call__(self) -> None:
        """Make a whole step."""
        Step(self.model, self.optimizer, 1.0, "bfloat16").start([self.part], 1e-4).wait()

    def gradients(self) -> Tensor:
        """Compute gradients in the place of the last ones, and return the loss."""
        self.model.zero_grad(set_to_none=False)
        return compute_gradients(self.model, [self.part], "bfloat16")

    def step(self, gradients: Gradients) -> Tensor:
        """Make a step whose gradients are computed so; return the loss before it."""
        loss = gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def losses(self, gradients: Gradients, number: int) -> Tensor:
        return torch.stack([self.step(gradients).detach().clone() for _ in range(number)])


# ---- Speed and memory


def train(name: str, config: ModelConfig, rows: int, length: int, bench: Bench, form: str = "") -> Row:
    """Measure with the least recomputation that fits.

    Raises:
        MemoryError: no mode fits.
    """
    for checkpointing in CHECKPOINTING:
        bench.settle()
        try:
            seconds = bench.seconds(Steps.of(config, rows, length, bench, checkpointing)).seconds
            return _row(name, config, rows, length, bench, seconds, checkpointing, form)
        except Exception as error:
            if why(error) != NO_ROOM:
                raise
    raise MemoryError(NO_ROOM)


def _row(
    name: str, config: ModelConfig, rows: int, length: int, bench: Bench, seconds: float, recomputed: str, form: str
) -> Row:
    speed = rows * length / seconds
    return {
        "table": "training", "model": name, "form": form, "parameters": count(config), "rows": rows, "length": length,
        "recomputed": recomputed, "speed": speed, "flops": speed * flops_per_token(config, length),
        "memory": bench.peak(),
    }  # fmt: skip


def train_captured(name: str, config: ModelConfig, rows: int, length: int, bench: Bench, number: int) -> Iterator[Row]:
    """Compare the losses of steps whose forward and backward are one graph with those of eager steps, and time them."""
    eager = Steps.of(config, rows, length, bench)
    wanted = eager.losses(eager.gradients, number)
    del eager
    bench.settle()
    steps = Steps.of(config, rows, length, bench)
    gradients = captured(steps, bench)
    apart = float((steps.losses(gradients, number) - wanted).abs().max())
    yield noted(f"{name}: largest difference of {number} losses, captured and eager", apart, "nats")
    seconds = bench.seconds(lambda: steps.step(gradients)).seconds
    yield _row(name, config, rows, length, bench, seconds, "none", CAPTURED_STEP)


def captured(steps: Steps, bench: Bench) -> Gradients:
    """Return a function that computes gradients by one graph of forward and backward, and returns the loss.

    What the host copies to the device, layouts of documents that do not change, is copied once before. On a CPU nothing
    is captured.
    """
    steps.gradients()  # allocates the gradients
    if not bench.is_card:
        return steps.gradients
    stream, graph, copied = torch.cuda.Stream(), torch.cuda.CUDAGraph(), list[Tensor]()

    def copy(tensor: Tensor, device: torch.device | str) -> Tensor:
        copied.append(to_device(tensor, device))
        return copied[-1]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps.gradients()
        with _copying_by(copy):
            steps.gradients()
    torch.cuda.current_stream().wait_stream(stream)
    again = iter(copied)
    with _copying_by(lambda *_: next(again)), torch.cuda.graph(graph, capture_error_mode="relaxed"):
        loss = steps.gradients()

    def replay(_: list[Tensor] = copied) -> Tensor:  # the graph reads the copies, so they must stay
        graph.replay()
        return loss

    return replay


@contextmanager
def _copying_by(copy: Callable[..., Tensor]) -> Iterator[None]:
    """Within the context, the package copies to the device by ``copy``."""
    modules = [x for name, x in list(sys.modules.items()) if name.startswith("gecko.") and hasattr(x, "to_device")]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "to_device", copy))
        yield


# ---- Single questions


def sharded(config: ModelConfig, rows: int, length: int, bench: Bench) -> Row:
    """Compare losses of steps of a model that is sharded on a world of one rank with those of a plain one."""
    plain = Steps.of(config, rows, length, bench)
    backend = "nccl" if bench.is_card else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Steps.of(config, rows, length, bench).model
        shard_model(model, init_device_mesh(bench.device.type, (1,)), bfloat16=True)
        steps = Steps(model, build_optimizer(model, OptimizerSettings()), plain.part)
        apart = float((steps.losses(steps.gradients, 3) - plain.losses(plain.gradients, 3)).abs().max())
    finally:
        dist.destroy_process_group()
    return noted("largest difference of 3 losses, sharded on one rank and plain", apart, "nats")


def recomputed(config: ModelConfig, rows: int, length: int, bench: Bench) -> Row:
    """Compare the gradients of a model that recomputes all activations with those of one that keeps them."""
    kept, again = (Steps.of(config, rows, length, bench, checkpointing) for checkpointing in ("none", "full"))
    for steps in (kept, again):
        steps.gradients()
    grads = ([x.grad for x in steps.model.parameters() if x.grad is not None] for steps in (kept, again))
    apart = [(a - b).norm() / a.norm().clamp(min=1e-30) for a, b in zip(*grads, strict=True)]
    worst = float(torch.stack(apart).max())
    return noted("largest relative difference of a gradient, recomputed and kept", worst, "")


def with_compiled_blocks(config: ModelConfig, rows: int, length: int, bench: Bench) -> Row:
    """Time gradients of a model with compiled blocks, beside those of the same one before."""
    steps = Steps.of(config, rows, length, bench)
    plain = bench.seconds(steps.gradients).seconds
    for block in steps.model.blocks:
        compile_block(block, **({} if bench.is_card else {"backend": "aot_eager"}))
    compiled = bench.seconds(steps.gradients).seconds
    return noted("step with compiled blocks, of the time without", compiled / plain, "")
