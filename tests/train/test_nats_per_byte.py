"""Held-out nats per byte, times the bytes of exactly the scored tokens, are the nats of these tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.chats import spoken, write_chats
from support.corpora import as_files, as_shards, write_tokenizer

from gecko.data import IGNORED, load_tokenizer
from gecko.models.gecko import Gecko
from gecko.parallel.mesh import Ranks
from gecko.train import Run
from gecko.train.data import load_data
from gecko.train.evaluate import evaluate

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġthe", "Ġthe")]
ENGLISH, CHINESE = " the" * 300, "你好世界🎉é" * 40


def write_source(kind: str, folder: Path) -> str:
    if kind == "chats":
        chats = [spoken("你好" * 3, ENGLISH[:80] + CHINESE), spoken("the", CHINESE[:9] + ENGLISH), spoken("é", "the é")]
        return str(write_chats(folder / "chats.jsonl", chats * 4))
    texts = {"one": [ENGLISH + CHINESE], "two": [ENGLISH, CHINESE], "many": [ENGLISH[:90], CHINESE[:50]] * 20}[kind]
    return as_files(texts, folder)


@pytest.mark.parametrize("kind", ["one", "two", "many", "chats", "shards"])
@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_nats_are_divided_by_the_bytes_of_the_scored_tokens(
    small_run: Run, tmp_path: Path, kind: str, tokens: str
) -> None:
    """Tokens of one byte and of eight lie in different parts of a text, and rows cut texts and characters anywhere."""
    spec = "bytes" if tokens == "bytes" else write_tokenizer(tmp_path / "tokenizer", MERGES)
    if kind == "shards" and tokens == "words":
        pytest.skip("as_shards tokenizes bytes")
    source = as_shards([ENGLISH, CHINESE] * 8, tmp_path) if kind == "shards" else write_source(kind, tmp_path)
    format = "chat" if kind == "chats" else "text"
    settings = dataclasses.replace(
        small_run.data, source=source, tokenizer=spec, format=format, validation_fraction=0.4
    )
    tokenizer = load_tokenizer(spec)
    model = dataclasses.replace(small_run.model, vocab_size=-(-tokenizer.vocab_size // 8) * 8)
    run = dataclasses.replace(small_run, model=model, data=settings, batch_size=1)
    data = load_data(run, Ranks(), Console(quiet=True))
    torch.manual_seed(0)
    network = Gecko(run.model)
    for held_out in (data.final, data.held_out, data.final.spread(3)):
        result = evaluate(network, held_out, "float32")
        targets = held_out.rows.targets
        scored = targets[(targets != IGNORED) & (targets != tokenizer.document_end)].tolist()
        if tokens == "bytes":
            text_bytes = len(scored)
        else:  # byte-level: a piece has one letter for each byte
            from tokenizers import Tokenizer

            library = Tokenizer.from_file(spec)
            text_bytes = sum(len(library.id_to_token(index)) for index in scored)
        assert result.nats_per_byte * text_bytes == pytest.approx(sum(result.row_losses), rel=1e-9)
