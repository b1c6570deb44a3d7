"""Bytes of ids, and ids as text."""

import io
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gecko.data import Batch, ByteTokenizer, StreamDecoder, TokenizedCorpus, Tokenizer, load_tokenizer
from gecko.data.loader import IGNORED, validation_batches
from gecko.data.text_stream import check_loss, token_bytes

# ---- Bytes belong to ids: of any text, of any part of it, and of any row they are those of the decoded text.

any_case = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(st.one_of(st.sampled_from("the quick,é你🎉 \n"), st.characters(exclude_categories=["Cs"])), max_size=40)
LINES = ["the quick brown fox, don't jump over the lazy dog.", "naïve café, 你好 世界 🎉", " five  dozen jugs"] * 20


@pytest.fixture(scope="session", params=["WordPiece", "WordLevel", "Unigram"])
def lossy_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    kind, unknown = request.param, {"unk_token": "[UNK]"}
    library = Tokenizer(getattr(models, kind)(**unknown if kind != "Unigram" else {}))
    if kind == "WordPiece":
        library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece()
    elif kind == "WordLevel":
        library.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = getattr(trainers, f"{kind}Trainer")(
        vocab_size=15 if kind == "WordLevel" else 120, special_tokens=["[UNK]", "</s>"], show_progress=False,
        **unknown if kind == "Unigram" else {},
    )  # fmt: skip
    library.train_from_iterator(LINES, trainer)
    path = tmp_path_factory.mktemp("lossy") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def normalizing_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SentencePiece model without byte tokens, which joins spaces and knows few characters."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=60, model_type=request.param,
        character_coverage=0.98, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("normalizing") / "tiny.model"
    path.write_bytes(model.getvalue())
    return path


def check_parts(tokenizer: Tokenizer, text: str) -> None:
    ids, sizes = tokenizer.encode(text), token_bytes(tokenizer)
    whole = sizes.of_text(ids)
    assert whole == len(tokenizer.decode(ids).encode())
    for cut in range(1, len(ids)):
        assert sizes.of_text(ids[:cut]) + sizes.of_text(ids[cut:], begins=False) == whole
        begin = tokenizer.decode(ids[:cut])
        if begin and "\ufffd" not in begin:
            assert sizes.of_text(ids[:cut]) == len(begin.encode())


@any_case
@given(text=texts)
@example(text="  the <|endoftext|></s><s> <|pad|> café 你好🎉\r\n\t \ufffd\x00")
def test_bytes_of_parts_add_up_to_those_of_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    check_parts(tokenizer, text)


@any_case
@given(text=texts)
def test_bytes_of_normalised_text(normalizing_file: Path, text: str) -> None:
    check_parts(load_tokenizer(str(normalizing_file)), text)


def test_bytes_of_text_that_loses_characters(lossy_file: Path) -> None:
    for text in ("the quick brown fox", "the dog 你好 jumps", "naïve, don't!", "dog"):
        check_parts(load_tokenizer(str(lossy_file)), text)


@any_case
@given(documents=st.lists(texts.filter(bool), min_size=1, max_size=5), length=st.integers(1, 9))
def test_rows_of_any_length_hold_the_bytes_of_all_documents(
    tokenizer: Tokenizer, documents: list[str], length: int
) -> None:
    corpus = TokenizedCorpus.build(documents, tokenizer)
    rows = list(validation_batches(corpus, 2, length))
    counted = sum(int(token_bytes(tokenizer).of_targets(batch).sum()) for batch in rows)
    assert counted == len("".join(documents).encode())


def test_special_ids_have_no_bytes_and_a_text_begins_after_each(byte_fallback_file: Path) -> None:
    """As in chats, whose texts between special tokens are encoded alone, and where only answers are targets."""
    tokenizer = load_tokenizer(str(byte_fallback_file))
    the, end = tokenizer.encode("the the").tolist(), tokenizer.document_end
    tokens = torch.tensor([[1, *the, end, end, *the, end, *the, *the, end]])
    targets, segments = tokens[:, 1:].clone(), torch.zeros_like(tokens[:, 1:])
    sizes, count = token_bytes(tokenizer), len(the)
    assert sizes.of_targets(Batch(tokens[:, :-1], targets, segments)).item() == 2 * 7 + len("the the the the")
    targets[:, -2 - 2 * count : -1 - count] = IGNORED  # the last answer follows a text that is not learned
    assert sizes.of_targets(Batch(tokens[:, :-1], targets, segments)).item() == 3 * 7


LOSSLESS = ["the quick, brown fox.\n\n  don't jump\t", " leading and trailing ", "é你好🎉 <|endoftext|></s>"]


def test_a_tokenizer_that_keeps_the_text_loses_nothing(tokenizer: Tokenizer) -> None:
    assert check_loss(tokenizer, LOSSLESS, allowed=False) == ""


def test_declared_normalisation_is_no_loss(normalizing_file: Path) -> None:
    """Of the SentencePiece models: spaces are joined, and compatible characters replaced."""
    tokenizer = load_tokenizer(str(normalizing_file))
    assert check_loss(tokenizer, ["the  quick brown fox", "ｔｈｅ lazy"], allowed=False) == ""
    with pytest.raises(ValueError, match=r"must keep 99\.9% .* loses 5\.000% of the characters, most often 'ж' \(in"):
        check_loss(tokenizer, ["the quick brownж fox"], allowed=False)


def test_lost_characters_are_named_and_refused(lossy_file: Path) -> None:
    tokenizer = load_tokenizer(str(lossy_file))
    with pytest.raises(ValueError, match=r"loses [\d.]+% of the characters, most often 'ж'.* data\.allow_loss=true"):
        check_loss(tokenizer, ["the lazy dog " + "ж" * 13], allowed=False)
    assert "most often 'ж'" in check_loss(tokenizer, ["the lazy dog " + "ж" * 13], allowed=True)
    told = check_loss(tokenizer, [*["the"] * 2000, "ж"], allowed=False)
    assert told.endswith("loses 0.017% of the characters, most often 'ж' (in a sample of 6,001)")


def test_characters_that_no_id_stands_for_are_lost(tmp_path: Path) -> None:
    """Without an unknown token the library drops them in silence."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.BPE({"a": 0, "b": 1, "</s>": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"loses 50\.000% of the characters, most often 'x', 'y'"):
        check_loss(load_tokenizer(str(tmp_path)), ["abxy"], allowed=False)


# ---- Ids that are not text are passed on with bounded work, and decode as the whole text would.

PIECES = ("é".encode(), "你".encode(), "🎉".encode(), b"a", b"\x80", b"\xff", b"\xf0\x9f", b"\xf0\x9f\x8e", b"\xe4")
"""Whole characters, bytes that are no character, and truncated characters."""


class Recording(ByteTokenizer):
    longest = 0

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


def stream(decoder: StreamDecoder, content: bytes) -> str:
    return "".join(decoder.push([byte]) for byte in content) + decoder.flush()


@settings(max_examples=200)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
@example([b"\x80"] * 11 + ["🎉".encode()])
@example([b"\xff"] * 7 + [b"\xf0\x9f\x8e"])
def test_any_bytes_decode_as_in_one_go(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    assert stream(StreamDecoder(ByteTokenizer()), content) == content.decode(errors="replace")


def test_a_long_stream_is_passed_on_as_it_comes() -> None:
    """Also of bytes that are no text; a push costs the same however long the stream is."""
    tokenizer = Recording()
    decoder = StreamDecoder(tokenizer)
    emitted = [decoder.push([index]) for index in [*([256] * 50), *"é🎉a".encode() * 50]]
    assert "".join(emitted) == "é🎉a" * 50 and tokenizer.longest <= 8
    for junk in (b"\xff", b"\x80", b"\xf0\x9f", b"\xe4\xbd", b"\xf0\x9f\x8e\xff"):
        emitted = "".join(decoder.push([byte]) for byte in junk * 500)
        missing = (junk * 500).decode(errors="replace").removeprefix(emitted)
        assert len(missing) <= 8
        assert emitted + decoder.flush() == (junk * 500).decode(errors="replace")
        assert decoder.push(b"a") == "a"
    assert tokenizer.longest <= 16


@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(["the", "quick", "é", "brown"]), min_size=2, max_size=8), data=st.data())
def test_a_text_that_goes_on_is_written_as_in_one_go(
    byte_fallback_file: Path, words: list[str], data: st.DataObject
) -> None:
    """Spaces before words are kept, also before the first word."""
    tokenizer = load_tokenizer(str(byte_fallback_file))
    before = " ".join(words[: data.draw(st.integers(1, len(words) - 1))])
    ids = tokenizer.encode(" ".join(words)).tolist()
    read = len(tokenizer.encode(before))
    assert tokenizer.decode(ids[:read]) == before
    decoder = StreamDecoder(tokenizer, goes_on=True)
    written = "".join(decoder.push([index]) for index in ids[read:]) + decoder.flush()
    assert before + written == " ".join(words)


def test_added_characters_are_named_and_refused(tmp_path: Path) -> None:
    """A byte-level tokenizer without its decoder writes other letters: the bytes of a text would be too many."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.BPE({"Ġ": 0, "a": 1, "</s>": 2}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"adds [\d.]+% of the characters, most often (' '|'Ġ')"):
        check_loss(load_tokenizer(str(tmp_path)), ["a a a a"], allowed=False)


def test_ids_beyond_those_of_the_tokenizer_are_special(byte_fallback_file: Path) -> None:
    """As those of a chat template, which a SentencePiece model lacks: no bytes, and a text begins after each."""
    tokenizer = load_tokenizer(str(byte_fallback_file))
    the, end, beyond = tokenizer.encode("the the").tolist(), tokenizer.document_end, tokenizer.vocab_size + 7
    counts = []
    for border in (end, beyond):
        tokens = torch.tensor([[border, *the, border, *the, border]])
        batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.zeros_like(tokens[:, 1:]))
        counts.append(token_bytes(tokenizer).of_targets(batch).item())
    assert counts == [14, 14]
