"""Effect of fewer bits: in weights, in the file of a state, and in a state between calls.

    python benchmarks/quantization.py --write

Everything is measured on the held-out documents of the run that trained the model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import DEMO, described, find_model, parsed, parser_of, publish, seconds_of, table
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


def _held_out(run: Run, tokenizer: Tokenizer, folder: Path) -> TokenizedCorpus:
    source = run.data.validation or run.data.source
    corpus = TokenizedCorpus.build(load_documents(source, field=run.data.field), tokenizer)
    if run.data.validation:
        return corpus
    return corpus.split(run.data.validation_fraction, run.seed, row_layout(folder))[1]


# Weights


def weights_rows(model: gecko.Gecko, held_out: HeldOut, tokens: Tensor) -> Iterator[tuple[object, ...]]:
    """Yield name, bytes of the file, loss, its change, tokens/s of prefill, and milliseconds per decoded token."""
    exact = 0.0
    for bits in (32, 8, 4):
        reduced = copy.deepcopy(model)
        if bits < 32:
            quantize(reduced, bits)
        loss = evaluate(reduced, held_out, "float32").nats_per_byte
        exact = exact or loss
        with tempfile.TemporaryDirectory() as scratch:
            reduced.save(scratch)
            size = (Path(scratch) / "model.safetensors").stat().st_size
        read(reduced, [tokens[:8192]])
        reading = seconds_of(lambda: read(reduced, [tokens]))  # noqa: B023
        prefill = read(reduced, [tokens])
        stream = TokenStream(reduced, [prefill], seeds=[0], sampling=Sampling(1.0), max_new_tokens=DECODED)
        decoding = seconds_of(lambda: list(stream)) / DECODED  # noqa: B023
        name = "float32" if bits == 32 else f"int{bits}"
        yield name, size, loss, loss - exact, len(tokens) / reading, 1e3 * decoding


# A state in a file


def file_section(model: gecko.Gecko, stream: Tensor, texts: int) -> list[str]:
    """Stop in the middle of held-out texts, save, load, and continue."""
    costs, logits = list[Tensor](), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        near, exact = Path(scratch) / "compact", Path(scratch) / "wide"
        for place in torch.linspace(20_000, len(stream) - max(AHEAD) - 1, texts).long().tolist():
            reading = read(model, [stream[place - 20_000 : place]])
            reading.state.save(near, compact=True)
            reading.state.save(exact)
            ahead = stream[place : place + max(AHEAD) + 1]
            ours, theirs = (_continue(model, gecko.GeckoState.load(path), ahead) for path in (near, exact))
            costs.append(ours[0] - theirs[0])
            logits.append(float((ours[1] - theirs[1]).norm() / theirs[1].norm()))
        sizes = exact.stat().st_size, near.stat().st_size
    changes = {count: torch.stack(costs)[:, :count] for count in AHEAD}
    return [
        "## A state in a file",
        f"{sizes[0]:,} bytes as it is, {sizes[1]:,} compact. From compact files of {texts} places in the held-out "
        f"text, against exact ones: the first token's logits differ by {100 * sum(logits) / texts:.3f} % (norm), "
        "the loss by",
        table(
            ["bytes that follow|,", "mean cost, nats a byte|+.6f", "±|.6f", "largest of one byte|.4f"],
            ((count, float(x.mean()), float(x.mean(1).std()) / texts**0.5, float(x.abs().max()))
             for count, x in changes.items()),
        ),
    ]  # fmt: skip


@torch.no_grad()
def _continue(model: gecko.Gecko, state: gecko.GeckoState, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of the following tokens, and the logits after the first one."""
    losses, _ = model.token_losses(tokens[None, :-1], tokens[None, 1:], state=state)
    return losses[0], model(tokens[None, :1], state=state)[0][0, 0]


# A state between calls


def policy_section(model: gecko.Gecko, tokens: Tensor) -> list[str]:
    size = max(64, (len(tokens) - 1) // 8)
    exact = _policy_losses(model, tokens, size, lambda state: state)
    some, everything = _rounder(_rounded_names(model)), _rounder(None)
    chunk = model.config.chunk_size
    policies = {
        f"compact parts, every {chunk} tokens": _policy_losses(model, tokens, chunk, some) - exact,
        "compact parts, every token": _policy_losses(model, tokens, 1, some) - exact,
        f"all numbers, every {chunk} tokens": _policy_losses(model, tokens, chunk, everything) - exact,
        "all numbers, every token": _policy_losses(model, tokens, 1, everything) - exact,
        "the decoder's window": _decoded_losses(model, tokens, torch.bfloat16) - _decoded_losses(model, tokens),
    }
    means = zip(*([float(part.mean()) for part in x.split(size)] for x in (exact, *policies.values())), strict=True)
    return [
        "## A state between calls",
        "The state rounded to bfloat16 after a call, against float32: cost in nats a byte by position. Compact parts "
        "are those that a compact file rounds; all numbers are these, norm statistics and log sums. The decoder's "
        "window is `Engine(window_dtype=torch.bfloat16)` against float32, token by token.",
        table(
            ["from position|,", "float32, nats a byte|.4f", *(f"{name}|+.5f" for name in policies)],
            ((place * size, *row) for place, row in enumerate(means)),
        ),
    ]


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


def main() -> None:
    given = parsed(parser_of(
        __doc__, threads=True, model=(DEMO, "a run's folder"), rows=(300, "held-out rows for the loss of the weights"),
        texts=(20, "places at which a state is saved"), length=(16_384, "bytes for the states between calls"),
    ))  # fmt: skip
    keep_freed_memory()
    folder = find_model(given.model)
    model, run = gecko.load(folder), Run.load(folder / "recipe.json")
    tokenizer = load_tokenizer(run.data.tokenizer)
    corpus = _held_out(run, tokenizer, folder)
    stream = torch.from_numpy(corpus.tokens.astype("int64"))
    held_out = HeldOut.of(corpus, given.rows, run.sequence_length, 1, tokenizer)
    columns = ["blocks' matrices", "file, bytes|,", "nats a byte|.4f", "cost|+.4f", "reading, tokens/s|,.0f",
               "a decoded token, ms|.2f"]  # fmt: skip
    publish(
        "quantization.md", given, "What fewer bits cost", described(model, folder, "the run's held-out documents"),
        "## Weights", f"Loss over {held_out.rows.scored_tokens:,} held-out tokens.",
        table(columns, weights_rows(model, held_out, stream[:32_768])),
        *file_section(model, stream, given.texts), *policy_section(model, stream[: given.length + 1]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
