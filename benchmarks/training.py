"""Training speed compared with a Llama of equal size: tokens/s of a full step, by sequence length.

    python benchmarks/training.py --write    # writes benchmarks/results/training_PROCESSOR.md

Both models have about 1 M parameters, train in float32 on two threads with the same AdamW, and take the same number of
tokens per step. Steps of the two, and of a Gecko whose queries attend to the same number of tokens in a sliding window
instead of sliding chunks, alternate, so that noise of the machine affects all; the table shows medians and ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from measuring import in_turns, median_seconds, of_processor, parsed, parser_of, publish, seconds_of, size_of, table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gecko
from gecko.runtime.process import keep_freed_memory

REPEATS = {2_048: 5, 8_192: 4, 32_768: 2}
"""Timed rounds (Gecko, Llama, Gecko) by tokens per row; full attention makes long rows slow."""
MATRIX = 2048
"""Size of the square matrices with which the rate of products is measured."""


def models() -> tuple[gecko.Gecko, gecko.Gecko, nn.Module]:
    """Return a Gecko, one with a sliding window of its reach, and a Llama of equal size: wider feed-forward layers."""
    torch.manual_seed(0)
    config = gecko.GeckoConfig.preset("tiny")
    assert config.chunk_size is not None
    window = replace(config, attention="sliding_window", chunk_size=2 * config.chunk_size)
    return gecko.Gecko(config), gecko.Gecko(window), LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.model_dim, num_hidden_layers=config.num_layers,
            num_attention_heads=4, intermediate_size=436, max_position_embeddings=max(REPEATS),
            attn_implementation="sdpa", use_cache=False,
        )
    )  # fmt: skip


def step_of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], None]:
    """Return a training step on tokens (B, T + 1)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor) -> None:
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(tokens: int) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield rows: tokens a row, median tokens/s of Gecko and of Llama, and the ratios to it and to a sliding window."""
    for length, repeats in REPEATS.items():
        model, window, llama = models()

        def llama_loss(tokens: Tensor, targets: Tensor, llama: nn.Module = llama) -> Tensor:
            return nn.functional.cross_entropy(llama(tokens).logits.flatten(0, 1), targets.flatten())

        ours, sliding, theirs = step_of(model, model.loss), step_of(window, window.loss), step_of(llama, llama_loss)
        batch = torch.randint(0, 256, (tokens // length, length + 1))
        for step in (ours, sliding, theirs):
            step(batch)
        ways = {"first": ours, "window": sliding, "llama": theirs, "last": ours}
        times = in_turns({name: partial(seconds_of, partial(step, batch)) for name, step in ways.items()}, repeats)
        seconds = statistics.median(times["first"] + times["last"])
        other, slow = statistics.median(times["window"]), statistics.median(times["llama"])
        yield length, tokens / seconds, tokens / slow, slow / seconds, other / seconds


def main() -> None:
    given = parsed(parser_of(__doc__, threads=2, tokens=(32_768, "tokens a step")))
    keep_freed_memory()
    rows = list(measure(given.tokens))
    rounds = ", ".join(map(str, REPEATS.values()))
    a, b = torch.randn(2, MATRIX, MATRIX)
    rate = 2 * MATRIX**3 / median_seconds(lambda: a @ b, 7, warm_ups=1) / 1e9
    ours, _, theirs = map(size_of, models())
    publish(
        of_processor("training"), given, "Training speed", "",
        f"Gecko `tiny` ({ours:,} parameters) and `LlamaForCausalLM` with SDPA ({theirs:,}), float32, "
        f"{given.tokens:,} tokens a step, medians of {rounds} rounds of Gecko, one with a sliding window of its "
        f"reach, Llama, Gecko (loss, backward, clip, AdamW). Matrix products reach {rate:.0f} GFLOP/s in the same run.",
        table(
            ["tokens a row|,", "gecko tokens/s|,.0f", "llama tokens/s|,.0f", "ratio|.2f", "to a sliding window|.2f"],
            rows,
        ),
        f"Gecko's tokens/s at {rows[-1][0]:,} are {rows[-1][1] / rows[0][1]:.2f} of those at {rows[0][0]:,}.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
