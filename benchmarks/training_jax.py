"""Training speed compared with megalodon-jax of the same shape: tokens/s of a full jitted step, by row length.

    pip install -c constraints.txt 'gecko-lm[benchmark,peers]'
    python benchmarks/training_jax.py --write        # writes benchmarks/results/training_jax_PROCESSOR.md

Both have about 1 M parameters, train in float32 on the same cores with clipping and Adam, and take the same tokens per
step. Steps of the two alternate, so that noise of the machine affects both. Compilation is not timed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from measuring import in_turns, of_processor, parsed, parser_of, publish, seconds_of, size_of, table
from torch import Tensor
from training import step_of

import gecko
from gecko.runtime.process import keep_freed_memory, require

LEARNING_RATE, CLIP = 1e-3, 1.0
TARGETS = {2_048: 2.0, 8_192: 6.0}
"""Target of Gecko's speed relative to megalodon-jax, by tokens per row."""


def jax_step(config: gecko.GeckoConfig) -> tuple[Callable[[Tensor], None], int]:
    """Return a training step of megalodon-jax on tokens (B, T + 1), and the number of parameters.

    The step has the model's own loss, which shifts the labels, and JAX's Adam, in one jitted call. The Megalodon has
    Gecko's widths; it has no memory, and its chunks do not overlap.
    """
    eqx, jax, package = (require(name, "peers") for name in ("equinox", "jax", "megalodon_jax"))
    optimizers = require("jax.example_libraries.optimizers", "peers")
    shape = package.MegalodonConfig(
        vocab_size=config.vocab_size, model_dim=config.model_dim, num_layers=config.num_layers,
        num_heads=config.num_heads, z_dim=config.key_dim, value_dim=config.value_dim, ffn_hidden_dim=config.ffn_dim,
        cema_ndim=config.cema_modes, chunk_size=config.chunk_size, norm_num_groups=config.timestep_groups,
        swiglu=config.swiglu, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    model = package.MegalodonForCausalLM(shape, key=jax.random.PRNGKey(0))
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    begin_adam, update, current = optimizers.adam(LEARNING_RATE)
    adam = begin_adam(weights)

    def loss(weights: Any, tokens: Any) -> Any:
        return eqx.combine(weights, rest).compute_loss(tokens, tokens)

    @jax.jit
    def advance(count: Any, adam: Any, tokens: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(current(adam), tokens)
        return value, update(count, optimizers.clip_grads(gradients, CLIP), adam)

    def step(tokens: Tensor) -> None:
        nonlocal adam
        value, adam = advance(0, adam, jax.numpy.asarray(tokens.numpy(), dtype="int32"))
        jax.block_until_ready((value, adam))

    return step, sum(leaf.size for leaf in jax.tree.leaves(weights))


def main() -> None:
    given = parsed(parser_of(
        __doc__, threads=len(os.sched_getaffinity(0)), lengths=(list(TARGETS), "tokens a row"),
        tokens=(8_192, "tokens a step"), rounds=(5, "of one step of both"),
    ))  # fmt: skip
    # Must come before JAX starts its threads, one per core.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    keep_freed_memory()
    config = gecko.GeckoConfig.preset("tiny")
    torch.manual_seed(0)
    model = gecko.Gecko(config)
    theirs, their_size = jax_step(config)
    steps = {"gecko": step_of(model, model.loss), "jax": theirs}
    rows = []
    for length in given.lengths:
        batch = torch.randint(0, 256, (given.tokens // length, length + 1), generator=torch.Generator().manual_seed(0))
        for step in (*steps.values(), *steps.values()):
            step(batch)
        calls = {name: partial(seconds_of, partial(step, batch)) for name, step in steps.items()}
        times = in_turns(calls, given.rounds)
        speeds = [given.tokens / statistics.median(seconds) for seconds in times.values()]
        ratio = statistics.median(other / own for own, other in zip(times["gecko"], times["jax"], strict=True))
        rows.append((length, *speeds, ratio, f"≥ {TARGETS[length]:g}" if length in TARGETS else ""))
        print(rows[-1], flush=True)
    publish(
        of_processor("training_jax"), given, "Training speed beside megalodon-jax", f"JAX {version('jax')}.",
        f"Gecko `tiny` ({size_of(model):,} parameters) and megalodon-jax {version('megalodon-jax')} with the same "
        f"widths, layers, modes and chunk ({their_size:,}; chunks of {config.chunk_size} tokens that do not overlap, "
        f"no memory), jitted, with its own loss. Both float32, {given.tokens:,} tokens a step, loss, backward, "
        f"clipping and Adam, on the same cores ({given.threads}); {given.rounds} rounds of one step each, medians. "
        "Compilation is not counted.",
        table(["tokens a row|,", "gecko tokens/s|,.0f", "megalodon-jax tokens/s|,.0f", "ratio|.2f", "target|>"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
