"""A small model with random weights, and tokenizers trained on a few lines."""

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gecko
from gecko.data import Tokenizer, load_tokenizer

CONFIG = gecko.GeckoConfig(
    vocab_size=264, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32,
    cema_modes=4, chunk_size=8, timestep_groups=4,
)  # fmt: skip
LINES = ["the quick brown fox jumps over the lazy dog", "five dozen liquor jugs", "naïve café, 你好 世界 🎉"] * 20


@pytest.fixture(scope="session")
def model() -> gecko.Gecko:
    """Return a model whose logits differ enough that texts differ, but little enough that every token can be drawn."""
    torch.manual_seed(0)
    model = gecko.Gecko(CONFIG)
    with torch.no_grad():
        model.head.weight.mul_(4)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list of the shapes of the tokens that calls of models have read."""
    shapes: list[tuple[int, int]] = []
    hidden = gecko.Gecko.hidden

    def watched(model: gecko.Gecko, tokens: Tensor, *args: object, **more: object) -> object:
        shapes.append((tokens.shape[0], tokens.shape[1]))
        return hidden(model, tokens, *args, **more)

    monkeypatch.setattr(gecko.Gecko, "hidden", watched)
    return shapes


@pytest.fixture(scope="session", params=["bytes", "bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    folder = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(str(_bpe(folder) if request.param == "bpe" else _sentencepiece(folder)))


def _bpe(folder: Path) -> Path:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(LINES, trainer)
    library.save(str(folder / "tokenizer.json"))
    return folder


def _sentencepiece(folder: Path) -> Path:
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=trained, vocab_size=320, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tiny.model").write_bytes(trained.getvalue())
    return folder / "tiny.model"
