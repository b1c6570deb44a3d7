"""A whole training step: tokens/s, MFU and memory of Gecko and of a Llama of equal size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from gpu.timing import NO_ROOM, Bench, why

from gecko.config import GeckoConfig
from gecko.models import LlamaConfig, ModelConfig, build_model, meta_model
from gecko.models.gecko import ActivationCheckpointing
from gecko.plan.memory import Share, step_memory
from gecko.train import Run
from gecko.train.optimizers.build import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import Part, train_step
from gecko.train.throughput import flops_per_token

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes in the order in which they are tried: the first that fits is the fastest."""
LLAMA_HEAD = 64
LLAMA = "Llama, SDPA flash"


@dataclass(frozen=True)
class Training:
    """Results of one model at one row length, with one row per step. Numbers are None if no mode fits."""

    model: str
    parameters: int
    length: int
    flops: float
    """FLOPs per token."""
    checkpointing: str = ""
    seconds: float | None = None
    peak: int | None = None
    """Largest memory in use on the card, in bytes."""

    @property
    def speed(self) -> float | None:
        """Tokens/s."""
        return None if self.seconds is None else self.length / self.seconds

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


def train(name: str, config: ModelConfig, length: int, bench: Bench) -> Training:
    """Measure with the least recomputation that fits. Modes whose planned memory is too large are not tried."""
    nothing = Training(name, count(config), length, flops_per_token(config, length))
    reason = NO_ROOM
    for checkpointing in CHECKPOINTING:
        bytes_planned = planned(config, length, checkpointing, bench)
        if bytes_planned > bench.memory:
            reason = f"does not fit ({bytes_planned / 1e9:.0f} GB planned, recomputing: {checkpointing})"
            continue
        bench.reset_peak()
        try:
            seconds = _step_seconds(config, length, checkpointing, bench)
        except Exception as error:
            reason = why(error)
            if reason == NO_ROOM:
                continue
            return dataclasses.replace(nothing, checkpointing=reason)
        return dataclasses.replace(nothing, checkpointing=checkpointing, seconds=seconds, peak=bench.peak())
    return dataclasses.replace(nothing, checkpointing=reason)


def planned(config: ModelConfig, length: int, checkpointing: ActivationCheckpointing, bench: Bench) -> int:
    """Return the bytes on one card that ``gecko plan`` computes."""
    run = Run(
        config, "runs/planned", batch_size=1, sequence_length=length, steps=1, activation_checkpointing=checkpointing
    )
    return sum(step_memory(run, Share(1, 1, length, 1, bench.dtype == torch.bfloat16)).values())


def _step_seconds(config: ModelConfig, length: int, checkpointing: ActivationCheckpointing, bench: Bench) -> float:
    torch.manual_seed(0)
    with bench.device:
        model = build_model(config)
    model.activation_checkpointing = checkpointing
    optimizer = build_optimizer(model, OptimizerSettings())
    tokens = torch.randint(config.vocab_size, (1, length + 1), device=bench.device)
    weight = torch.ones((), dtype=torch.float64, device=bench.device)
    part = Part(tokens[:, :-1], tokens[:, 1:], torch.zeros((1, length), dtype=torch.int64), weight)
    precision = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"

    def step() -> None:
        train_step(model, optimizer, [part], learning_rate=1e-4, clip=1.0, precision=precision)

    return bench.seconds(step).seconds
