import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gecko.data import StreamDecoder, Tokenizer, check_vocabulary, load_tokenizer
from gecko.data.tokenizers import END_TOKENS

any_case = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# SentencePiece and Llama's BPE write a space as "▁", so a "▁" in the text is decoded as a space.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)


@any_case
@given(text=texts)
@example(text="  the <|endoftext|></s><s> <|pad|> café 你好🎉\r\n\t \ufffd\x00")
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids.isdisjoint(ids.tolist())
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    batch = [text, "the fox", text[3:]]
    assert [ids.tolist() for ids in tokenizer.encode_batch(batch)] == [tokenizer.encode(x).tolist() for x in batch]


def test_special_ids_and_those_beyond_the_vocabulary_stand_for_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox").tolist()
    borders = [tokenizer.document_start, *ids, tokenizer.document_end, tokenizer.vocab_size + 3]
    assert tokenizer.decode(borders) == "the fox"
    assert {tokenizer.document_start, tokenizer.document_end} <= tokenizer.special_ids


def test_name_reloads_the_tokenizer_from_any_folder(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = load_tokenizer(tokenizer.name)
    assert again.encode("the café").tolist() == tokenizer.encode("the café").tolist()
    assert again.document_end == tokenizer.document_end


@any_case
@given(data=st.data())
def test_stream_joins_to_the_whole_for_any_split(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(texts)
    specials = st.sampled_from(sorted(tokenizer.special_ids))
    ids = [
        index
        for token in tokenizer.encode(text).tolist()
        for index in (token, *data.draw(st.lists(specials, max_size=1)))
    ]
    decoder, emitted, begin = StreamDecoder(tokenizer), "", 0
    while begin < len(ids):
        size = data.draw(st.integers(1, 4))
        emitted += decoder.push(ids[begin : begin + size])
        assert text.startswith(emitted), "half a character, or text that was taken back"
        begin += size
    assert emitted + decoder.flush() == tokenizer.decode(ids) == text


@any_case
@given(data=st.data())
def test_stream_of_ids_that_are_no_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    if "fallback" in tokenizer.name:
        pytest.skip("the library spoils whole characters before a bad byte, which a stream has given out by then")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 4), max_size=20))
    decoder = StreamDecoder(tokenizer)
    streamed = "".join(decoder.push([index]) for index in ids) + decoder.flush()
    assert streamed == tokenizer.decode(ids)


def test_borders_and_special_ids_have_well_known_names(
    bpe_folder: Path, byte_fallback_file: Path, sentencepiece_file: Path
) -> None:
    for spec, borders, named in (
        (bpe_folder, (0, 0), {"<|endoftext|>": 0, "<|pad|>": 1}),
        (byte_fallback_file, (1, 2), {"<unk>": 0, "<s>": 1, "</s>": 2}),
        (sentencepiece_file, (1, 2), {"<s>": 1, "</s>": 2}),
        ("bytes", (256, 256), {"<|endoftext|>": 256}),
    ):
        tokenizer = load_tokenizer(str(spec))
        assert (tokenizer.document_start, tokenizer.document_end) == borders
        assert tokenizer.special_texts == named and tokenizer.special_ids == frozenset(named.values())


@pytest.mark.parametrize(
    ("config", "borders"),
    [
        ({"eos_token": "<|pad|>", "bos_token": None}, (1, 1)),
        ({"bos_token": {"content": "<|pad|>"}, "eos_token": "<|endoftext|>"}, (1, 0)),
        ({"eos_token": "<not there>"}, (0, 0)),
    ],
)
def test_borders_are_those_of_the_configuration(
    write_config: Callable[[object], Path], config: object, borders: tuple[int, int]
) -> None:
    tokenizer = load_tokenizer(str(write_config(config)))
    assert (tokenizer.document_start, tokenizer.document_end) == borders


def changed(folder: Path, into: Path, change: Callable[[Any], None]) -> Tokenizer:
    """Return the tokenizer of ``folder`` after ``change`` to the library's tokenizer; it is saved ``into`` a folder."""
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(library)
    library.save(str(into / "tokenizer.json"))
    return load_tokenizer(str(into))


def test_truncation_padding_and_dropout_of_another_use_are_not_taken_over(bpe_folder: Path, tmp_path: Path) -> None:
    def change(library: Any) -> None:
        library.enable_truncation(4)
        library.enable_padding(pad_id=0, pad_token="<|endoftext|>")
        library.model.dropout = 0.5

    texts = ["the quick brown fox jumps over the lazy dog", "a"] * 4
    plain, other = load_tokenizer(str(bpe_folder)), changed(bpe_folder, tmp_path, change)
    expected = [ids.tolist() for ids in plain.encode_batch(texts)]
    assert [ids.tolist() for ids in other.encode_batch(texts)] == expected
    assert [other.encode(text).tolist() for text in texts] == expected


def test_text_that_spells_a_border_ends_no_document(bpe_folder: Path, tmp_path: Path) -> None:
    """Also if the file does not mark the border as special."""
    border = "<|end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": border}))
    tokens = pytest.importorskip("tokenizers")
    tokenizer = changed(
        bpe_folder, tmp_path, lambda library: library.add_tokens([tokens.AddedToken(border, special=False)])
    )
    text = f"a{border}b {border}"
    ids = tokenizer.encode(text)
    assert tokenizer.document_end not in ids and tokenizer.decode(ids) == text


def test_name_on_the_hub(bpe_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def download(name: str, file: str, local_files_only: bool = False) -> str:
        if name != "someone/model":
            raise OSError("no connection")
        if local_files_only and file == "tokenizer.json":
            raise LocalEntryNotFoundError("not in the cache")
        if file == "tokenizer_config.json":
            raise EntryNotFoundError("no such file")
        return str(bpe_folder / file)

    library = SimpleNamespace(hf_hub_download=download, constants=SimpleNamespace(ENDPOINT="https://localhost"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    tokenizer = load_tokenizer("someone/model")
    assert tokenizer.name == "someone/model"
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    with pytest.raises(FileNotFoundError, match=r"must be 'bytes', the path .* got 'other', which could not"):
        load_tokenizer("other")


def test_vocabulary_larger_than_the_models(tokenizer: Tokenizer) -> None:
    check_vocabulary(tokenizer, tokenizer.vocab_size)
    expected = f"got vocab_size={tokenizer.vocab_size - 1} and the tokenizer {tokenizer.name!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        check_vocabulary(tokenizer, tokenizer.vocab_size - 1)


@pytest.mark.parametrize("spec", ["missing/tokenizer.json", "./missing", "a/b/c", "missing.model", "/missing"])
def test_missing_path(spec: str) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"got {spec!r}, which does not exist")):
        load_tokenizer(spec)


WITHOUT_END = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": "x"}, r"must hold tokenizer\.json or tokenizer\.model; .* has \['notes.txt'\]"),
        ({"tokenizer.json": '{"version": '}, r"tokenizer\.json must be a tokenizer\.json.*could not be read"),
        ({"tokenizer.model": '{"version": '}, r"tokenizer\.model must be a SentencePiece.*could not be read"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json must"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json must"),
        ({"tokenizer.json": WITHOUT_END}, "a token for the end of a document.*" + re.escape(END_TOKENS[0])),
    ],
)
def test_damaged_folder(files: dict[str, str], message: str, tmp_path: Path, bpe_folder: Path) -> None:
    if "tokenizer_config.json" in files:
        shutil.copy(bpe_folder / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load_tokenizer(str(tmp_path))


def test_sentencepiece_without_one_border(tmp_path: Path) -> None:
    import sentencepiece

    prefix = tmp_path / "no_start"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the fox"] * 9), model_prefix=str(prefix), vocab_size=16, bos_id=-1, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(f"{prefix}.model")
    assert tokenizer.document_start == tokenizer.document_end >= 0


def test_negative_id(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at least 0; got -1"):
        tokenizer.decode([5, -1])
