"""Tokenizers (bytes, Hugging Face ``tokenizer.json``, SentencePiece) and their files in a model folder."""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gecko.io.files import read_object, whole_file, write_text
from gecko.runtime.process import is_reachable, require

TokenIds = NDArray[np.int64]

RECIPE = "recipe.json"  # file with the settings of the run that made a model
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""File names of a tokenizer; if a folder has both, ``load_tokenizer`` reads the first."""
TEMPLATE = "chat_template.jinja"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE)
"""File names of optional settings beside a tokenizer."""
START_TOKENS = ("<s>", "<bos>", "<|begin_of_text|>")
END_TOKENS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
"""Names of the document borders in tokenizers without a configuration, the most specific first."""


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    name: str
    """Argument with which ``load_tokenizer`` loads this tokenizer from any working folder."""
    digest: str
    """SHA-256 of the tokenizer's file and borders: tokenizers with equal digests encode every text equally."""
    folder: Path | None
    """Folder of its files on this machine; None if it has no files."""
    vocab_size: int
    """Largest id plus one."""
    document_start: int
    """Id that precedes every document."""
    document_end: int
    """Id that follows every document; it may equal ``document_start``."""
    special_ids: frozenset[int]
    """Ids that do not represent text, such as the document borders; no text encodes to them."""
    special_texts: Mapping[str, int]
    """Special ids by their names in chat templates; ids without a name are left out."""

    def __hash__(self) -> int: ...

    def encode(self, text: str) -> TokenIds:
        """Return the ids of ``text``, (length,) int64, without document borders."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode every text, on all processor cores if the library can."""

    def normalize(self, text: str) -> str:
        """Return the text that is divided into tokens."""

    def piece(self, index: int) -> str:
        """Return the entry of an id in the vocabulary."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, without special ids and ids beyond the vocabulary; U+FFFD for bytes that are not
        UTF-8."""


class ByteTokenizer:
    """Tokenizer of bytes: ids 0 to 255 are the bytes of UTF-8 text, 256 starts and ends a document."""

    name = digest = "bytes"
    folder: Path | None = None
    vocab_size = 257
    document_start = document_end = 256
    special_ids = frozenset({256})
    special_texts: Mapping[str, int] = {"<|endoftext|>": 256}

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def normalize(self, text: str) -> str:
        return text

    def piece(self, index: int) -> str:
        return f"<0x{index:02X}>"

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(text_ids(self, ids)).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every id; none for the special id."""
        return [bytes([index]) for index in range(256)] + [b""]


class HuggingFaceTokenizer:
    """Tokenizer of a ``tokenizer.json``, read by the ``tokenizers`` library.

    The ``tokenizer_config.json`` beside it may name the document borders.
    """

    def __init__(self, path: Path, name: str) -> None:
        library = require("tokenizers", "tokenizers")
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            kind = "a tokenizer.json of the tokenizers library"
            raise ValueError(f"{path} must be {kind}; it could not be read: {error}") from error
        # Many published files contain settings of another use: its batches, or its training with random tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            self._tokenizer.model.dropout = None
        self.name = name
        self.folder: Path | None = path.absolute().parent
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        config = path.with_name(SETTINGS[0])
        settings = read_object(config, "a tokenizer's configuration") if config.is_file() else {}
        self.document_start, self.document_end = _find_borders(vocabulary, settings, name)
        # Without these two lines, "<|endoftext|>" quoted in a document would end the document.
        self._tokenizer.encode_special_tokens = True
        # Not every file marks its borders as special.
        borders = {self.document_start, self.document_end}
        texts = [self._tokenizer.id_to_token(index) for index in sorted(borders)]
        self._tokenizer.add_special_tokens([library.AddedToken(text, special=True, normalized=False) for text in texts])
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset({index for index, token in added.items() if token.special} | borders)
        special = sorted(self.special_ids)
        self.special_texts: Mapping[str, int] = {self._tokenizer.id_to_token(index): index for index in special}
        self.digest = _digest(path, self.document_start, self.document_end)

    @property
    def definition(self) -> str:
        """Content of the ``tokenizer.json``, with the document borders as special tokens."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> TokenIds:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def piece(self, index: int) -> str:
        return self._tokenizer.id_to_token(index) or ""

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(text_ids(self, ids), skip_special_tokens=False)
        return text


class SentencePieceTokenizer:
    """Tokenizer of a SentencePiece ``.model`` file."""

    def __init__(self, path: Path) -> None:
        library = require("sentencepiece", "tokenizers")
        try:
            self._processor = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} must be a SentencePiece model; it could not be read: {error}") from error
        self.name = str(path.resolve())
        self.folder: Path | None = path.absolute().parent
        self.vocab_size = int(self._processor.get_piece_size())
        start, end = (x if x >= 0 else None for x in (self._processor.bos_id(), self._processor.eos_id()))
        self.document_start, self.document_end = _pair(start, end, self.name)
        control = [index for index in range(self.vocab_size) if self._processor.is_control(index)]
        self.special_ids = frozenset(control)
        self.special_texts: Mapping[str, int] = {self._processor.id_to_piece(index): index for index in control}
        self.digest = _digest(path, self.document_start, self.document_end)

    def encode(self, text: str) -> TokenIds:
        return np.array(self._processor.encode(text), dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [np.array(ids, dtype=np.int64) for ids in self._processor.encode(list(texts), num_threads=-1)]

    def normalize(self, text: str) -> str:
        return str(self._processor.normalize(text))

    def piece(self, index: int) -> str:
        return str(self._processor.id_to_piece(index))

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._processor.decode(text_ids(self, ids))
        return text

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every id inside a longer text; none for ids without text."""
        found, own = [], self._processor
        for index in range(self.vocab_size):
            piece = own.id_to_piece(index)
            empty = own.is_control(index) or own.is_unknown(index) or own.is_unused(index)
            text = b"" if empty else piece.replace("▁", " ").encode()
            found.append(bytes([int(piece[3:5], 16)]) if own.is_byte(index) else text)
        return found


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: ``bytes``; the path of a ``tokenizer.json``, of a folder that holds one, or of a
            SentencePiece ``.model``; or a name on the Hugging Face hub.

    Raises:
        FileNotFoundError: the path does not exist, or the name cannot be fetched.
        ValueError: the file is not a tokenizer, or has no token for the end of a document.
    """
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(spec).expanduser()
    path = _file_in(path) if path.is_dir() else path
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if path.is_file():
        of_bytes = path.name == TOKENIZERS[0] and holds_byte_tokenizer(path.parent)
        return ByteTokenizer() if of_bytes else HuggingFaceTokenizer(path, str(path.resolve()))
    choices = (
        f"a tokenizer must be {ByteTokenizer.name!r}, the path of a tokenizer.json, of its folder or of a "
        "SentencePiece .model, or a name on the Hugging Face hub"
    )
    if path.is_absolute() or path.suffix in (".json", ".model") or spec.startswith((".", "~")) or len(path.parts) > 2:
        raise FileNotFoundError(f"{choices}; got {spec!r}, which does not exist.")
    if difflib.get_close_matches(spec, [ByteTokenizer.name], cutoff=0.8):
        raise FileNotFoundError(f"{choices}; got {spec!r}. Did you mean {ByteTokenizer.name!r}?")
    hub = require("huggingface_hub", "tokenizers")
    try:
        path = _fetch(hub, spec, TOKENIZERS[0])
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{choices}; got {spec!r}, which could not be fetched: {error}") from error
    for file in (TEMPLATE, SETTINGS[0]):  # the hub's library stores them beside it
        with suppress(require("huggingface_hub.errors", "tokenizers").EntryNotFoundError):
            _fetch(hub, spec, file)
    return HuggingFaceTokenizer(path, spec)


def known_tokenizer(folder: Path) -> str | None:
    """Return the tokenizer of a model folder: its tokenizer files, as a recipe may name a path on another machine; else
    the name in its recipe, else None."""
    if holds_tokenizer(folder):
        return ByteTokenizer.name if holds_byte_tokenizer(folder) else str(folder)
    data = read_object(folder / RECIPE, "a recipe").get("data") if (folder / RECIPE).is_file() else None
    name = data.get("tokenizer") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError if a tokenizer has ids that a model with ``vocab_size`` embeddings lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the model's vocabulary must hold every id of the tokenizer; got vocab_size={vocab_size} and the "
            f"tokenizer {tokenizer.name!r} with {tokenizer.vocab_size} ids. "
            f"Train with model.vocab_size={-(-tokenizer.vocab_size // 64) * 64}, or take a smaller tokenizer."
        )


def text_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """Return the ``ids`` that represent text; ValueError if an id is negative."""
    special, limit = tokenizer.special_ids, tokenizer.vocab_size
    kept = [index for index in map(int, ids) if index < limit and index not in special]
    if kept and min(kept) < 0:
        raise ValueError(f"token ids must be at least 0; got {min(kept)}.")
    return kept


def _file_in(folder: Path) -> Path:
    """Return the tokenizer in a folder; of several the first of ``TOKENIZERS``."""
    if holds_tokenizer(folder):
        return next(folder / name for name in TOKENIZERS if (folder / name).is_file())
    found = sorted(entry.name for entry in folder.iterdir())
    raise FileNotFoundError(f"a tokenizer's folder must hold tokenizer.json or tokenizer.model; {folder} has {found}.")


def _fetch(hub: Any, name: str, file: str) -> Path:
    """Return a file of the hub, from its cache if it is there.

    Without a network the hub's library would try six times, for half a minute.
    """
    missing = require("huggingface_hub.errors", "tokenizers").LocalEntryNotFoundError
    try:
        return Path(hub.hf_hub_download(name, file, local_files_only=True))
    except missing:
        if not is_reachable(hub.constants.ENDPOINT):
            raise missing(f"{hub.constants.ENDPOINT} cannot be reached, and {file} is not in the cache") from None
    return Path(hub.hf_hub_download(name, file))


def _digest(path: Path, document_start: int, document_end: int) -> str:
    return hashlib.sha256(f"{document_start} {document_end} ".encode() + path.read_bytes()).hexdigest()


def _find_borders(vocabulary: dict[str, int], config: dict[str, Any], name: str) -> tuple[int, int]:
    """Return the ids of the document borders: those in the configuration, else those with a known name."""
    # A configuration holds a token's text, or an object with the text.
    stored = (config.get(key) for key in ("bos_token", "eos_token"))
    named = [token.get("content") if isinstance(token, dict) else token for token in stored]
    choices = [[token] if isinstance(token, str) else [] for token in named]
    if not any(token in vocabulary for tokens in choices for token in tokens):
        choices = [list(START_TOKENS), list(END_TOKENS)]
    start, end = (next((vocabulary[x] for x in known if x in vocabulary), None) for known in choices)
    return _pair(start, end, name)


def _pair(start: int | None, end: int | None, name: str) -> tuple[int, int]:
    """Return both borders; if only one is known, it is used for both."""
    known = end if end is not None else start
    if known is None:
        raise ValueError(
            f"a tokenizer must have a token for the end of a document; {name} names none. Put a "
            f"tokenizer_config.json with 'eos_token' beside it (known without one: {', '.join(END_TOKENS)})."
        )
    return (known if start is None else start), known


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def copy_tokenizer(spec: str, folder: Path) -> None:
    """Copy the files of the tokenizer ``spec`` to ``folder``, each atomically, and delete those of another tokenizer.

    The bytes tokenizer has no files. A tokenizer of the hub is not copied: its name is valid everywhere. Raise OSError
    if a file cannot be read or written.
    """
    path, files = Path(spec).expanduser(), dict[str, Path]()
    if path.is_dir() and holds_tokenizer(path):
        path = _file_in(path)
    if spec != ByteTokenizer.name and path.is_file():
        beside = {name: path.with_name(name) for name in SETTINGS if path.with_name(name).is_file()}
        files = {TOKENIZERS[path.suffix == ".model"]: path, **beside}
    for name, path in files.items():
        with whole_file(folder / name) as temporary:
            shutil.copyfile(path, temporary)
    for name in {*TOKENIZERS, *SETTINGS} - files.keys():
        (folder / name).unlink(missing_ok=True)


_BORDER, _PADDING = "<|endoftext|>", "<|pad|>"
"""Names, for transformers, of 256, which starts and ends a document, and of 257, which pads."""


def byte_definition() -> str:
    """Return the ``tokenizer.json`` of the tokenizer of bytes, in which a text starts with 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # A byte without a sign of its own is written as one after U+00FF, as in every tokenizer of this kind.
    signs = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start, first, second = (
        {"SpecialToken": {"id": _BORDER, "type_id": 0}}, *({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    )  # fmt: skip
    fields = {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": text, **plain} for i, text in enumerate((_BORDER, _PADDING))],
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing", "single": [start, first], "pair": [start, first, second],
            "special_tokens": {_BORDER: {"id": _BORDER, "ids": [256], "tokens": [_BORDER]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(sorted(signs.items(), key=lambda entry: entry[1])), "merges": []},
    }  # fmt: skip
    return json.dumps(fields, indent=1) + "\n"


def byte_settings(*, chat: bool) -> dict[str, Any]:
    """Return its settings for transformers; with ``chat``, a text may name special tokens, as chat templates do."""
    return {
        "bos_token": _BORDER, "eos_token": _BORDER, "pad_token": _PADDING, "padding_side": "left",
        "split_special_tokens": not chat, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip


def write_byte_tokenizer(folder: Path, *, chat: bool) -> None:
    """Write the files by which transformers opens the tokenizer of bytes to ``folder``, each atomically."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **byte_settings(chat=chat)}
    for name, text in (TOKENIZERS[0], byte_definition()), (SETTINGS[0], json.dumps(settings, indent=2) + "\n"):
        write_text(folder / name, text)


def holds_byte_tokenizer(folder: Path) -> bool:
    """Return whether ``folder`` has the ``tokenizer.json`` that ``write_byte_tokenizer`` writes."""
    path = folder / TOKENIZERS[0]
    return path.is_file() and path.read_bytes() == byte_definition().encode()
