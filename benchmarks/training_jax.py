"""Training speed compared with megalodon-jax of the same shape: tokens/s of a full jitted step, by row length.

    pip install -c constraints.txt 'gecko-lm[benchmark,peers]'
    python benchmarks/training_jax.py --write        # writes benchmarks/results/training_jax_PROCESSOR.md

Both have about 1 M parameters, train in float32 on the same cores with clipping and Adam, and take the same tokens per
step. Steps of the two alternate, so that noise of the machine affects both. Compilation is not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from measuring import load, machine, of_processor, parser_of, publish
from torch import Tensor
from training import step_of

import gecko
from gecko.runtime.process import keep_freed_memory, require

LEARNING_RATE, CLIP = 1e-3, 1.0
TARGETS = {2_048: 2.0, 8_192: 6.0}
"""Target of Gecko's speed relative to megalodon-jax, by tokens per row."""


@dataclass(frozen=True)
class Comparison:
    length: int
    ours: float
    """Median tokens/s."""
    theirs: float
    ratio: float
    """Median over the rounds of the ratio of two consecutive steps."""


def jax_step(config: gecko.GeckoConfig) -> tuple[Callable[[Tensor], float], int]:
    """Return a training step of megalodon-jax on tokens (B, T + 1) that returns its seconds, and the number of
    parameters.

    The step has the model's own loss, which shifts the labels, and JAX's Adam, in one jitted call.
    """
    eqx, jax = require("equinox", "peers"), require("jax", "peers")
    optimizers = require("jax.example_libraries.optimizers", "peers")
    model = _jax_model(config, jax)
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    begin_adam, update, current = optimizers.adam(LEARNING_RATE)
    adam = begin_adam(weights)

    def loss(weights: Any, tokens: Any) -> Any:
        return eqx.combine(weights, rest).compute_loss(tokens, tokens)

    @jax.jit
    def advance(count: Any, adam: Any, tokens: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(current(adam), tokens)
        return value, update(count, optimizers.clip_grads(gradients, CLIP), adam)

    def step(tokens: Tensor) -> float:
        nonlocal adam
        given = jax.numpy.asarray(tokens.numpy(), dtype="int32")
        begin = time.perf_counter()
        value, adam = advance(0, adam, given)
        jax.block_until_ready((value, adam))
        return time.perf_counter() - begin

    return step, sum(leaf.size for leaf in jax.tree.leaves(weights))


def _jax_model(config: gecko.GeckoConfig, jax: Any) -> Any:
    """Return a Megalodon with Gecko's widths; it has no memory, and its chunks do not overlap."""
    package = require("megalodon_jax", "peers")
    shape = package.MegalodonConfig(
        vocab_size=config.vocab_size, model_dim=config.model_dim, num_layers=config.num_layers,
        num_heads=config.num_heads, z_dim=config.key_dim, value_dim=config.value_dim, ffn_hidden_dim=config.ffn_dim,
        cema_ndim=config.cema_modes, chunk_size=config.chunk_size, norm_num_groups=config.timestep_groups,
        swiglu=config.swiglu, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    return package.MegalodonForCausalLM(shape, key=jax.random.PRNGKey(0))


def compare(steps: list[Callable[[Tensor], float]], length: int, tokens: int, rounds: int) -> Comparison:
    batch = torch.randint(0, 256, (tokens // length, length + 1), generator=torch.Generator().manual_seed(0))
    for step in steps:
        step(batch)
        step(batch)
    timed = [tuple(step(batch) for step in steps) for _ in range(rounds)]
    ours, theirs = (statistics.median(seconds) for seconds in zip(*timed, strict=True))
    ratio = statistics.median(second / first for first, second in timed)
    return Comparison(length, tokens / ours, tokens / theirs, ratio)


def page(results: list[Comparison], sizes: tuple[int, int], arguments: argparse.Namespace) -> list[str]:
    """Return the results in Markdown."""
    lines = [
        "# Training speed beside megalodon-jax", "", f"{machine()}, JAX {version('jax')}. {load()}", "",
        f"Gecko `tiny` ({sizes[0]:,} parameters) and megalodon-jax {version('megalodon-jax')} with the same widths, "
        f"layers, modes and chunk ({sizes[1]:,}; chunks of {gecko.GeckoConfig.preset('tiny').chunk_size} tokens that "
        "do not overlap, no memory), jitted, with its own loss. Both float32, "
        f"{arguments.tokens:,} tokens a step, loss, backward, clipping and Adam, on {arguments.threads} "
        f"core{'s' if arguments.threads > 1 else ''}; {arguments.rounds} rounds of one step each, medians. "
        "Compilation is not counted.", "",
        "| tokens a row | gecko tokens/s | megalodon-jax tokens/s | ratio | target |", "|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for result in results:
        target = f"≥ {TARGETS[result.length]:g}" if result.length in TARGETS else ""
        lines.append(
            f"| {result.length:,} | {result.ours:,.0f} | {result.theirs:,.0f} | {result.ratio:.2f} | {target} |"
        )
    command = f"python benchmarks/training_jax.py --threads {arguments.threads} --rounds {arguments.rounds} --write"
    return [*lines, "", f"Written by `{command}`."]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(TARGETS), help="tokens a row")
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores for both")
    arguments = parser.parse_args()
    # Must come before JAX starts its threads, one per core.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    config = gecko.GeckoConfig.preset("tiny")
    torch.manual_seed(0)
    model = gecko.Gecko(config)
    theirs, their_size = jax_step(config)
    steps = [step_of(model, model.loss), theirs]
    sizes = sum(parameter.numel() for parameter in model.parameters()), their_size
    results = []
    for length in arguments.lengths:
        results.append(compare(steps, length, arguments.tokens, arguments.rounds))
        print(results[-1], flush=True)
    publish(of_processor("training_jax"), page(results, sizes, arguments), arguments.write)


if __name__ == "__main__":
    main()
