"""Files by which transformers opens the tokenizer of bytes; they lie beside the models that were trained with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gecko.io.files import write_text

DEFINITION, SETTING = "tokenizer.json", "tokenizer_config.json"
"""File names of transformers."""
BORDER, PADDING = "<|endoftext|>", "<|pad|>"
"""Names of 256, which starts and ends a document, and of 257, which pads."""


def byte_definition() -> str:
    """Return the ``tokenizer.json``, in which no token of several bytes exists and a text starts with 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # A byte without a sign of its own is written as one after U+00FF, as in every tokenizer of this kind.
    signs = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start, *sequences = (
        {"SpecialToken": {"id": BORDER, "type_id": 0}}, *({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    )  # fmt: skip
    fields: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": text, **plain} for i, text in enumerate((BORDER, PADDING))],
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing", "single": [start, sequences[0]], "pair": [start, *sequences],
            "special_tokens": {BORDER: {"id": BORDER, "ids": [256], "tokens": [BORDER]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(sorted(signs.items(), key=lambda entry: entry[1])), "merges": []},
    }  # fmt: skip
    return json.dumps(fields, indent=1) + "\n"


def byte_settings(*, chat: bool) -> dict[str, Any]:
    """Return the settings of the tokenizer; with ``chat``, a text may name special tokens, as chat templates do."""
    return {
        "bos_token": BORDER, "eos_token": BORDER, "pad_token": PADDING, "padding_side": "left",
        "split_special_tokens": not chat, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip


def write_byte_tokenizer(folder: Path, *, chat: bool) -> None:
    """Write both files to ``folder``, each atomically."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **byte_settings(chat=chat)}
    for name, text in ((DEFINITION, byte_definition()), (SETTING, json.dumps(settings, indent=2) + "\n")):
        write_text(folder / name, text)


def holds_byte_tokenizer(folder: Path) -> bool:
    """Return whether ``folder`` has the ``tokenizer.json`` that ``write_byte_tokenizer`` writes."""
    path = folder / DEFINITION
    return path.is_file() and path.read_bytes() == byte_definition().encode()
