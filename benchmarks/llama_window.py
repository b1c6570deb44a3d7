"""What a converted Llama loses beyond its window: loss with two chunks, with and without sinks, beside full attention.

    python benchmarks/llama_window.py models/smollm2 books/*.txt --write

Each text is one document. Its tokens are read by the same weights with other windows; full attention is a window that
holds the whole text. Differences are those of the same tokens after the first two chunks, with 95 % bootstrap intervals
over blocks of these tokens. The keys and values are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measuring import describe, find_model, parser_of, publish
from torch import Tensor

import gecko
from gecko.data.tokenizers import load_tokenizer
from gecko.eval.results import bootstrap_mean
from gecko.inference.prefill import inference

PIECE, BLOCK, SEED = 1024, 256, 0


def with_window(model: gecko.Gecko, chunk: int, sinks: int) -> gecko.Gecko:
    """Return a model with the parameters of ``model`` and another window."""
    config = replace(model.config, chunk_size=chunk, sinks=sinks, bfloat16_window=False)
    with torch.device("meta"):
        other = gecko.Gecko(config)
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie()
    return other.eval()


def token_losses(model: gecko.Gecko, tokens: Tensor) -> Tensor:
    """Return the losses in nats of tokens 1 … of one text."""
    found, state = [], None
    with inference(model):
        for begin in range(0, len(tokens) - 1, PIECE):
            inputs, targets = tokens[begin : begin + PIECE], tokens[begin + 1 : begin + PIECE + 1]
            losses, state = model.token_losses(inputs[None, : len(targets)], targets[None], state=state)
            found.append(losses[0].double())
    return torch.cat(found)


def rows(model: gecko.Gecko, texts: Sequence[Tensor], chunks: Sequence[int], sinks: Sequence[int]) -> Iterator[str]:
    """Yield the rows of the table, one for a window and a number of sinks."""
    length = len(texts[0])
    full = [token_losses(with_window(model, -(-length // 2), 0), text) for text in texts]
    for chunk in chunks:
        exact = torch.stack([losses[2 * chunk :] for losses in full])
        for count in sinks:
            window = with_window(model, chunk, count)
            losses = torch.stack([token_losses(window, text) for text in texts])
            change = (losses[:, 2 * chunk :] - exact)[:, : exact.shape[1] // BLOCK * BLOCK]
            blocks = change.unflatten(1, (-1, BLOCK)).mean(-1).flatten().numpy()
            interval = bootstrap_mean(np.asarray(blocks), "blocks", SEED)
            within = float((losses[:, : 2 * chunk] - torch.stack(full)[:, : 2 * chunk]).abs().max())
            line = (
                f"| {chunk:,} | {count} | {within:.4f} | {float(exact.mean()):.4f} | "
                f"{float(losses[:, 2 * chunk :].mean()):.4f} | {blocks.mean():+.4f} | "
                f"{interval.low:+.4f} .. {interval.high:+.4f} |"
            )
            print(line, flush=True)
            yield line


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("model", help="a folder of gecko convert")
    parser.add_argument("texts", nargs="+", type=Path, help="files, one document each")
    parser.add_argument("--skip", type=int, default=20_000, help="characters at the start of each file to leave out")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens to read of each file")
    parser.add_argument("--chunks", default="256,512,1024", help="chunks of the windows")
    parser.add_argument("--sinks", default="0,1", help="numbers of sinks")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = find_model(arguments.model)
    model, tokenizer = gecko.load(folder), load_tokenizer(folder)
    texts = []
    for path in arguments.texts:
        text = path.read_text(encoding="utf-8")[arguments.skip :][: 8 * arguments.tokens]
        texts.append(torch.tensor(tokenizer.encode(text)[: arguments.tokens]))
        if len(texts[-1]) < arguments.tokens:
            parser.error(f"{path} must hold --tokens {arguments.tokens} tokens after --skip; it holds {len(texts[-1])}")
    chunks, sinks = ([int(x) for x in given.split(",")] for given in (arguments.chunks, arguments.sinks))
    table = list(rows(model, texts, chunks, sinks))
    command = (
        f"python benchmarks/llama_window.py {arguments.model} {' '.join(path.name for path in arguments.texts)} "
        f"--tokens {arguments.tokens} --threads {arguments.threads}"
    )
    head = [
        "# What a converted Llama loses beyond its window", "",
        describe(model, folder, arguments.texts, command), "",
        f"{arguments.tokens:,} tokens of each text, read by the same weights; nats per token. Within is the largest "
        "difference of a token's loss in the first two chunks from full attention; the other columns are means over "
        "the tokens after them.", "",
        "| chunk | sinks | within | full attention | window | difference | interval |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    publish("llama_window.md", [*head, *table], arguments.write)


if __name__ == "__main__":
    main()
