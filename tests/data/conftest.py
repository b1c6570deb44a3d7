"""Tokenizers of every kind, trained on a few lines."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.corpora import as_lines

from gecko.data import Tokenizer, load_tokenizer
from gecko.data.tokenize import TokenizingPlan, run_here

LINES = ["the quick brown fox jumps over the lazy dog", "five dozen liquor jugs", "naïve café, 你好 世界 🎉"] * 20


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte-level BPE as Hugging Face stores it, without a tokenizer_config.json."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(LINES, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def byte_fallback_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BPE that writes unknown characters as byte tokens, as Llama's tokenizer.json does."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, processors

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thequickbrown", "th", "▁th"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("▁", "th")]
    library = Library(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session", params=["bytes", "bpe", "byte_fallback", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    name = {"bpe": "bpe_folder"}.get(request.param, f"{request.param}_file")
    return load_tokenizer(str(request.getfixturevalue(name)))


@pytest.fixture
def write_config(bpe_folder: Path, tmp_path: Path) -> Callable[[object], Path]:
    """Return a function that copies the BPE and writes a tokenizer_config.json with the given content."""

    def write(config: object) -> Path:
        (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Return thirty documents without digits; every third contains multi-byte characters."""
    return [("é" if number % 3 == 0 else "a") * (number % 7 + 3) + "bcdef" for number in range(30)]


@pytest.fixture(scope="session")
def written_shards(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer, sources = tmp_path_factory.mktemp("shards"), load_tokenizer("bytes"), []
    for number in range(3):
        (folder / f"source{number}").mkdir()
        sources.append(as_lines(texts[10 * number : 10 * number + 10], folder / f"source{number}"))
    plan = TokenizingPlan.make(sources, tokenizer, folder / "shards")
    plan.start()
    assert len(list(run_here(plan, tokenizer, 1))) == 3
    assert plan.finish() is not None
    return folder / "shards"


@pytest.fixture
def shard_folder(written_shards: Path, tmp_path: Path) -> Path:
    """Return the texts as shards of bytes, in three sources of one shard each, written just now."""
    return shutil.copytree(written_shards, tmp_path / "shards", copy_function=shutil.copy)
