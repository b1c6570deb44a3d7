"""Effect of fewer bits: in weights, in the file of a state, and in a state between calls.

    python benchmarks/quantization.py --write

Everything is measured on the held-out documents of the run that trained the model.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import DEMO, describe, find_model, parser_of, publish
from torch import Tensor

import gecko
from gecko.data import TokenizedCorpus, Tokenizer, load_documents, load_tokenizer
from gecko.inference import Sampling, TokenStream, read
from gecko.inference.decoder import Decoder
from gecko.io.model_folder import load_tensors
from gecko.io.quantization import quantize
from gecko.runtime.process import keep_freed_memory
from gecko.train import Run
from gecko.train.evaluate import HeldOut, evaluate
from gecko.train.metrics import row_layout

Round = Callable[[gecko.GeckoState], gecko.GeckoState]

AHEAD = (1, 16, 256, 2048)
"""Numbers of bytes after a snapshot over which the loss is measured."""
DECODED = 100


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    folder = find_model(arguments.model)
    model, run = gecko.load(folder), Run.load(folder / "recipe.json")
    tokenizer = load_tokenizer(run.data.tokenizer)
    held_out = _held_out(run, tokenizer, folder)
    stream = torch.from_numpy(held_out.tokens.astype("int64"))
    options = f"--model {arguments.model} --rows {arguments.rows} --texts {arguments.texts} --length {arguments.length}"
    heading = describe(model, folder, [], f"python benchmarks/quantization.py {options} --threads {arguments.threads}")
    lines = [
        "# What fewer bits cost", "", heading.replace("Text: .", "Text: the run's held-out documents."), "",
        *_weights_section(model, HeldOut.of(held_out, arguments.rows, run.sequence_length, 1, tokenizer), stream), "",
        *_file_section(model, stream, arguments.texts), "",
        *_policy_section(model, stream[: arguments.length + 1]),
    ]  # fmt: skip
    publish("quantization.md", lines, arguments.write)


def _held_out(run: Run, tokenizer: Tokenizer, folder: Path) -> TokenizedCorpus:
    source = run.data.validation or run.data.source
    corpus = TokenizedCorpus.build(load_documents(source, field=run.data.field), tokenizer)
    if run.data.validation:
        return corpus
    return corpus.split(run.data.validation_fraction, run.seed, row_layout(folder))[1]


# Weights


def _weights_section(model: gecko.Gecko, held_out: HeldOut, stream: Tensor) -> list[str]:
    lines = [
        "## Weights", "", f"Loss over {held_out.rows.scored_tokens:,} held-out tokens.", "",
        "| blocks' matrices | file, bytes | nats a byte | cost | reading, tokens/s | a decoded token, ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    exact = 0.0
    for bits in (32, 8, 4):
        reduced = copy.deepcopy(model)
        if bits < 32:
            quantize(reduced, bits)
        loss = evaluate(reduced, held_out, "float32").nats_per_byte
        exact = exact or loss
        reading, decoding = _speed(reduced, stream[:32_768])
        name = "float32" if bits == 32 else f"int{bits}"
        lines.append(
            f"| {name} | {_file_size(reduced):,} | {loss:.4f} | {loss - exact:+.4f} | {reading:,.0f} | {decoding:.2f} |"
        )
    return lines


def _file_size(model: gecko.Gecko) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        model.save(scratch)
        return (Path(scratch) / "model.safetensors").stat().st_size


def _speed(model: gecko.Gecko, tokens: Tensor) -> tuple[float, float]:
    """Return tokens/s of prefill, and milliseconds per decoded token."""
    read(model, [tokens[:8192]])
    begin = time.perf_counter()
    reading = read(model, [tokens])
    middle = time.perf_counter()
    list(TokenStream(model, [reading], seeds=[0], sampling=Sampling(1.0), max_new_tokens=DECODED))
    return len(tokens) / (middle - begin), 1e3 * (time.perf_counter() - middle) / DECODED


# A state in a file


def _file_section(model: gecko.Gecko, stream: Tensor, texts: int) -> list[str]:
    """Stop in the middle of held-out texts, save, load, and continue."""
    places = torch.linspace(20_000, len(stream) - max(AHEAD) - 1, texts).long().tolist()
    costs: list[Tensor] = []
    logits: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for place in places:
            reading = read(model, [stream[place - 20_000 : place]])
            near, exact = Path(scratch) / "compact", Path(scratch) / "wide"
            reading.state.save(near, compact=True)
            reading.state.save(exact)
            ahead = stream[place : place + max(AHEAD) + 1]
            ours, theirs = (_continue(model, gecko.GeckoState.load(path), ahead) for path in (near, exact))
            costs.append(ours[0] - theirs[0])
            logits.append(float((ours[1] - theirs[1]).norm() / theirs[1].norm()))
        sizes = exact.stat().st_size, near.stat().st_size
    change = torch.stack(costs)
    return [
        "## A state in a file", "",
        f"{sizes[0]:,} bytes as it is, {sizes[1]:,} compact. From compact files of {texts} places in the held-out "
        f"text, against exact ones: the first token's logits differ by {100 * sum(logits) / texts:.3f} % (norm), "
        "the loss by", "",
        "| bytes that follow | mean cost, nats a byte | ± | largest of one byte |", "|---:|---:|---:|---:|",
        *(f"| {count:,} | {change[:, :count].mean():+.6f} | {change[:, :count].mean(1).std() / texts**0.5:.6f} "
          f"| {change[:, :count].abs().max():.4f} |" for count in AHEAD),
    ]  # fmt: skip


@torch.no_grad()
def _continue(model: gecko.Gecko, state: gecko.GeckoState, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of the following tokens, and the logits after the first one."""
    losses, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:], state=state)
    return losses[0], model(tokens[None, :1], state=state)[0][0, 0]


# A state between calls


def _policy_section(model: gecko.Gecko, tokens: Tensor) -> list[str]:
    size = max(64, (len(tokens) - 1) // 8)
    exact = _policy_losses(model, tokens, size, lambda state: state)
    some, everything = _rounder(_rounded_names(model)), _rounder(None)
    chunk = model.config.chunk_size
    policies = {
        f"compact parts, every {chunk} tokens": _policy_losses(model, tokens, chunk, some),
        "compact parts, every token": _policy_losses(model, tokens, 1, some),
        f"all numbers, every {chunk} tokens": _policy_losses(model, tokens, chunk, everything),
        "all numbers, every token": _policy_losses(model, tokens, 1, everything),
        "the decoder's window": exact + _decoded_losses(model, tokens, torch.bfloat16) - _decoded_losses(model, tokens),
    }
    begins = range(0, len(exact), size)
    return [
        "## A state between calls", "",
        "The state rounded to bfloat16 after a call, against float32: cost in nats a byte by position. Compact parts "
        "are those that a compact file rounds; all numbers are these, norm statistics and log sums. The decoder's "
        "window is `Engine(window_dtype=torch.bfloat16)` against float32, token by token.", "",
        f"| from position | float32, nats a byte | {' | '.join(policies)} |", f"|---:|---:|{'---:|' * len(policies)}",
        *(f"| {begin:,} | {exact[begin : begin + size].mean():.4f} | "
          + " | ".join(f"{(losses - exact)[begin : begin + size].mean():+.5f}" for losses in policies.values()) + " |"
          for begin in begins),
    ]  # fmt: skip


def _policy_losses(model: gecko.Gecko, tokens: Tensor, piece: int, after: Round) -> Tensor:
    def losses() -> Iterator[Tensor]:
        state = None
        for inputs, targets in zip(tokens[:-1].split(piece), tokens[1:].split(piece), strict=True):
            part, state = model.token_losses(inputs[None], targets[None], state=state)
            state = after(state)
            yield part[0]

    return torch.cat(list(losses())).double()


def _decoded_losses(model: gecko.Gecko, tokens: Tensor, window_dtype: torch.dtype | None = None) -> Tensor:
    decoder = Decoder(model, 1, window_dtype)
    with torch.inference_mode():
        decoder.add(model.empty_state(), torch.zeros(model.config.vocab_size, dtype=torch.bool))
        losses = [
            F.cross_entropy(decoder.step([a])[0], b) for a, b in zip(tokens[:-1].tolist(), tokens[1:], strict=True)
        ]
    return torch.stack(losses).double()


def _rounder(names: frozenset[str] | None) -> Round:
    """Return a function that rounds the tensors of these names, or (None) all floating-point tensors."""

    def rounded(state: gecko.GeckoState) -> gecko.GeckoState:
        values = iter([
            x.bfloat16().to(x.dtype) if (x.is_floating_point() if names is None else name in names) else x
            for name, x in state.tensors().items()
        ])  # fmt: skip
        return state.map(lambda _: next(values))

    return rounded


def _rounded_names(model: gecko.Gecko) -> frozenset[str]:
    with tempfile.TemporaryDirectory() as scratch:
        model.empty_state().save(Path(scratch) / "state", compact=True)
        tensors, _ = load_tensors(Path(scratch) / "state")
    return frozenset(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--model", default=DEMO, help="a run's folder")
    parser.add_argument("--rows", type=int, default=300, help="held-out rows for the loss of the weights")
    parser.add_argument("--texts", type=int, default=20, help="places at which a state is saved")
    parser.add_argument("--length", type=int, default=16_384, help="bytes for the states between calls")
    return parser.parse_args()


if __name__ == "__main__":
    main()
