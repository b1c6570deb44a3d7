"""Training steps of Gecko and of a Llama of equal size: tokens/s, MFU and memory, and what must not change them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, repeat

import torch
import torch.distributed as dist
from gpu.record import Row, noted
from gpu.timing import NO_ROOM, Bench, why
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gecko.config import GeckoConfig
from gecko.models import LanguageModel, LlamaConfig, ModelConfig, meta_model
from gecko.models.gecko import ActivationCheckpointing, Gecko
from gecko.parallel.sharding import shard_model
from gecko.train.capture import CapturedGradients
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
Gradients = Callable[[BatchPart], Tensor]
"""Computes gradients of a batch in the place of the last ones, and returns the loss."""


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

    def gradients(self, part: BatchPart | None = None) -> Tensor:
        """Compute gradients in the place of the last ones, and return the loss."""
        self.model.zero_grad(set_to_none=False)
        return compute_gradients(self.model, [part or self.part], "bfloat16")

    def batches(self) -> Iterator[BatchPart]:
        """Yield two batches in turn, of 2 and 3 documents a row, but for a Llama."""
        tokens, found = self.part.tokens, []
        for documents in (2, 3):
            ids = torch.arange(tokens.shape[1]).mul(documents if isinstance(self.model, Gecko) else 0)
            ids, rolled = ids.div(tokens.shape[1], rounding_mode="floor"), tokens.roll(documents, 1)
            found.append(BatchPart(rolled, rolled.roll(-1, 1), ids.expand(tokens.shape), self.part.weight))
        return cycle(found)

    def step(self, gradients: Gradients, part: BatchPart) -> Tensor:
        """Make a step whose gradients are computed so; return the loss before it."""
        loss = gradients(part)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def losses(self, gradients: Gradients, number: int, batches: Iterator[BatchPart] | None = None) -> Tensor:
        given = batches or repeat(self.part)
        return torch.stack([self.step(gradients, next(given)).detach().clone() for _ in range(number)])


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
    """Compare the losses of steps whose forward and backward are a graph with those of eager steps, and time them.

    Two batches take turns, of other tokens and, but for a Llama, other documents. On a CPU nothing is captured. If
    losses differ, eager steps are made once more: PyTorch's gradient of attention adds in any order.
    """

    def eager() -> Tensor:
        bench.settle()
        steps = Steps.of(config, rows, length, bench)
        return steps.losses(steps.gradients, number, steps.batches())

    wanted = eager()
    bench.settle()
    steps = Steps.of(config, rows, length, bench)
    graphs = CapturedGradients(steps.model, "bfloat16") if bench.is_card else None
    gradients = steps.gradients if graphs is None else lambda part: graphs([part])
    apart = float((steps.losses(gradients, number, steps.batches()) - wanted).abs().max())
    yield noted(f"{name}: largest difference of {number} losses, captured and eager", apart, "nats")
    batches = steps.batches()
    seconds = bench.seconds(lambda: steps.step(gradients, next(batches))).seconds
    yield _row(name, config, rows, length, bench, seconds, "none", CAPTURED_STEP)
    if apart:
        del steps, graphs, gradients
        apart = float((eager() - wanted).abs().max())
        yield noted(f"{name}: largest difference of {number} losses, eager and eager again", apart, "nats")


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
