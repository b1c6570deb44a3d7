"""Training speed compared with a Llama of equal size: tokens/s of a full step, by sequence length.

    python benchmarks/training.py --write    # writes benchmarks/results/training_PROCESSOR.md

Both models have about 1 M parameters, train in float32 on two threads with the same AdamW, and take the same number of
tokens per step. Steps of the two alternate, so that noise of the machine affects both; the table shows medians and
their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from measuring import machine, of_processor, parser_of, publish
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gecko
from gecko.runtime.process import keep_freed_memory

REPEATS = {2_048: 5, 8_192: 4, 32_768: 2}
"""Timed rounds (Gecko, Llama, Gecko) by tokens per row; full attention makes long rows slow."""


def llama_of_equal_size(config: gecko.GeckoConfig) -> nn.Module:
    """Return a Llama of the same width and depth, with wider feed-forward layers for an equal parameter count."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.model_dim, num_hidden_layers=config.num_layers,
            num_attention_heads=4, intermediate_size=436, max_position_embeddings=max(REPEATS),
            attn_implementation="sdpa", use_cache=False,
        )
    )  # fmt: skip


def step_of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], float]:
    """Return a training step on tokens (B, T + 1) that returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor) -> float:
        begin = time.perf_counter()
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def llama_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())

    return loss


def measure(length: int, tokens: int, repeats: int) -> tuple[float, float]:
    """Return the median tokens/s of Gecko and of Llama."""
    torch.manual_seed(0)
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny"))
    llama = llama_of_equal_size(model.config)
    steps = (step_of(model, model.loss), step_of(llama, llama_loss(llama)))
    batch = torch.randint(0, 256, (tokens // length, length + 1))
    for step in steps:
        step(batch)
    rounds = [[step(batch) for step in (steps[0], steps[1], steps[0])] for _ in range(repeats)]
    ours = tokens / statistics.median(seconds for first, _, last in rounds for seconds in (first, last))
    theirs = tokens / statistics.median(seconds for _, seconds, _ in rounds)
    print(
        f"{length:>6} tokens a row: gecko {ours:,.0f}, llama {theirs:,.0f} tokens/s, {ours / theirs:.2f}",
        flush=True,
    )
    return ours, theirs


def matrix_rate(size: int = 2048, repeats: int = 7) -> float:
    """Return the median GFLOP/s of a large float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(times) / 1e9


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens a step")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows = [(length, *measure(length, args.tokens, repeats)) for length, repeats in REPEATS.items()]
    config = gecko.GeckoConfig.preset("tiny")
    rounds = ", ".join(map(str, REPEATS.values()))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (gecko.Gecko(config), llama_of_equal_size(config))]
    lines = [
        "# Training speed", "", machine() + ".", "",
        f"Gecko `tiny` ({sizes[0]:,} parameters) and `LlamaForCausalLM` with SDPA ({sizes[1]:,}), float32, "
        f"{args.tokens:,} tokens a step, medians of {rounds} rounds of Gecko, Llama, Gecko "
        "(loss, backward, clip, AdamW). "
        f"Matrix products reach {matrix_rate():.0f} GFLOP/s in the same run.", "",
        "| tokens a row | gecko tokens/s | llama tokens/s | ratio |", "|---:|---:|---:|---:|",
        *(f"| {length:,} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |" for length, ours, theirs in rows), "",
        f"Gecko's tokens/s at {rows[-1][0]:,} are {rows[-1][1] / rows[0][1]:.2f} of those at {rows[0][0]:,}.",
        "", "Written by `python benchmarks/training.py --write`.",
    ]  # fmt: skip
    publish(of_processor("training"), lines, args.write)


if __name__ == "__main__":
    main()
