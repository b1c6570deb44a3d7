"""Texts of a few words, small enough to train on several times, and a model of their bytes."""

import json
import random
from pathlib import Path

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.data import IGNORED, Batch, load_tokenizer
from gecko.data.tokenize import TokenizingPlan, run_task

WORDS = ["red", "green", "blue", "stone", "river", "runs", "falls", "slowly", "over", "under"]
BYTE_MODEL = GeckoConfig(
    vocab_size=257, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip


def words(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def write_corpus(folder: Path, files: int = 20, first: int = 0) -> Path:
    """Create the folder and write ``files`` different texts of 60 words each, numbered from ``first``."""
    folder.mkdir(parents=True)
    for number in range(first, first + files):
        (folder / f"{number:02d}.txt").write_text(words(60, number), encoding="utf-8")
    return folder


def random_batch(seed: int, rows: int, length: int, ignored: float | Tensor = 0.0) -> Batch:
    """Return random bytes with random document starts, of which the share ``ignored`` are no targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, BYTE_MODEL.vocab_size, (rows, length + 1), generator=generator)
    segments = (torch.rand(rows, length, generator=generator) < 0.06).cumsum(dim=1)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(rows, length, generator=generator) < ignored] = IGNORED
    targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = IGNORED
    return Batch(tokens[:, :-1], targets, segments)


def as_lines(texts: list[str], folder: Path) -> str:
    """Write the texts as one source with a document per line, and return it."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def as_shards(texts: list[str], folder: Path) -> str:
    """Write the texts as one source, a folder of shards of bytes, and return it."""
    plan = TokenizingPlan.make([as_lines(texts, folder)], load_tokenizer("bytes"), folder / "shards")
    plan.start()
    run_task(plan.folder, 0)
    plan.finish()
    return str(folder / "shards")


def as_files(texts: list[str], folder: Path) -> str:
    """Write the texts as one source of numbered files, and return it."""
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    return str(folder / "[0-9]*.txt")


def write_tokenizer(folder: Path, merges: list[tuple[str, str]]) -> str:
    """Write a byte-level BPE tokenizer with the given merges and a document-start token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    library = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")
